"""How much of what an agent may say is understood: sentences in other people's words, held against what they mean.

python -m benchmarks.paraphrases FOLDER [--show]

FOLDER holds `<environment>.<language>.jsonl`, such as tests/fixtures/said; tests/support/paraphrases.py says what a
line is and when it is understood.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.support.paraphrases import lines_of, understands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", action="store_true", help="print what is not understood")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.*.jsonl"))
    if not files:
        parser.error(f"{options.folder} has no file <environment>.<language>.jsonl")
    right_of_all = count_of_all = 0
    for file in files:
        name, language, lines = lines_of(file)
        results = [(line, *understands(name, language, line)) for line in lines]
        right = sum(fits for _, fits, _ in results)
        right_of_all, count_of_all = right_of_all + right, count_of_all + len(lines)
        print(f"{name:14} {language} {right:3} of {len(lines)}")
        for line, fits, found in results:
            if options.show and not fits:
                print(f"    {line['text']}\n        meant {line['understood']}\n        heard {found}")
    print(f"{'all':17} {right_of_all:3} of {count_of_all}")


if __name__ == "__main__":
    main()
