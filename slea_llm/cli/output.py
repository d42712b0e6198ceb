"""What commands print."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One line of a command's result, to standard output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
