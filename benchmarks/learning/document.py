"""The tables of docs/study.md, written from the kept runs: what stands between two marks is theirs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from protocol import Study
from runs import Result
from tables import parts

BLOCK = re.compile(r"(<!-- (tuned|table (\w+)) -->\n).*?(<!-- end -->)", re.DOTALL)
FOLDED = ("Alarms", "Every seed")
"""Long tables, which a reader opens."""


def documented(text: str, *, tuned: Callable[[], Sequence[str]], table: Callable[[str], Sequence[str]]) -> str:
    """The page with every block written anew: `tuned` gives the search's table, `table` that of a study by name.

    Raises ValueError where a block has no end of its own: what follows it would be lost.
    """

    def written(block: re.Match[str]) -> str:
        if block[0].count("<!-- ") != 2:
            raise ValueError(f"{block[1].strip()} has no <!-- end --> before the next block")
        lines = table(block[3]) if block[3] else tuned()
        return "\n".join([block[1].strip(), "", *lines, "", block[4]])

    return BLOCK.sub(written, text)


def block(study: Study, results: Sequence[Result]) -> list[str]:
    """What stands on the page for a study."""
    if not results:
        return ["No run is finished yet."]
    found: Mapping[str, Sequence[str]] = parts(study, results)
    lines: list[str] = []
    for heading, part in found.items():
        if heading in FOLDED:
            lines += [f"<details><summary>{heading}</summary>", "", *part, "", "</details>", ""]
        elif part:
            lines += [*([] if heading == study.name else [f"#### {heading}", ""]), *part, ""]
    return lines[:-1]
