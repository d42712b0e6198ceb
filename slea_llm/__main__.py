"""`python -m slea_llm`, the form that `accelerate launch -m slea_llm` starts."""

import sys

from slea_llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
