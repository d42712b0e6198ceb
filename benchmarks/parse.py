"""How parsers do on real reasoning texts: every text parsed, styles found, borders against marks, listed steps back.

    python benchmarks/parse.py DATA          DATA holds cot/cot_handed.json and steps/bigbench_mistake/*.jsonl

`benchmarks/parse_marks.json` holds character offsets at which a reader let a step begin, with the text's SHA-256;
`benchmarks/parse_marks_blind.json` those of a reader who knew nothing of the parsers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import table

from slea_llm import registry
from slea_llm.parsers.coverage import Label, agreement, borders
from slea_llm.parsers.faults import faults
from slea_llm.parsers.sentences import Whole, json_values
from slea_llm.types import Step, Turn, leaf_steps

MARKS = ("parse_marks.json", "parse_marks_blind.json")
# Name of a style in the data -> the forms of which one must be found. `seen` looks for styles that are not listed.
FORMS: Mapping[str, tuple[str, ...]] = {
    "numbered_list": ("numbered_dot", "numbered_paren"),
    "zh_numbered_dot": ("numbered_dot",),
    "zh_first_next": ("first_next",),
    "zh_diyibu": ("zh_diyibu",),
    "zh_buzhou_n": ("zh_buzhou_n",),
    "zh_circled": ("circled_number",),
    "zh_paren_number": ("zh_paren_number",),
    "zh_ascii_paren": ("ascii_paren_number",),
    "zh_dunhao_number": ("zh_dunhao_number",),
    "markdown_headings": ("markdown_heading",),
    "step_n_colon": ("step_n_colon",),
    "thought_n_colon": ("thought_n_colon",),
    "react_numbered": ("action",),
    "react_unnumbered": ("action",),
    "react_alfworld_think": ("action",),
    "harmony_channels": ("analysis", "commentary", "final", "call", "observation"),
    "hermes_tool_call": ("tool_call",),
    "search_tags": ("search",),
    "xml_command": ("command",),
}
JSON_STYLES = (
    "json_plan",
    "toolbench_eval_json",
    "typed_reasoning_blocks",
    "json_tool_call",
    "anthropic_thinking_blocks",
)
OPEN, CLOSE = "<think>", "</think>"


def parser_of(name: str, **options: Any) -> Any:
    cls = registry.load("parser", name)
    return cls(cls.Config(**options))


def parsers() -> dict[str, Any]:
    """All parsers, `tagged` also with the custom tags that two of the texts use."""
    from slea_llm.parsers.tagged import TaggedParser

    custom = TaggedParser.Config(tool_tags=("tool_call", "search", "command"), reply_tags=("answer", "information"))
    return {
        "auto": parser_of("auto"),
        "markers": parser_of("markers"),
        "markers, sentences": parser_of("markers", sentences=True),
        "react": parser_of("react"),
        "reply": parser_of("reply"),
        "tagged": parser_of("tagged"),
        "tagged, split": parser_of("tagged", split_thoughts=True),
        "tagged, custom tags": TaggedParser(custom),
    }


def steps_by(parser: Any, text: str) -> tuple[Step, ...]:
    steps: tuple[Step, ...] = parser.parse(Turn(index=0, context=(), text=text), "t", None)
    return steps


def check(text: str, steps: Sequence[Step]) -> list[str]:
    """Promises that do not hold: the text rebuilt, nothing whole cut, no step across the end of the thought."""
    leaves = leaf_steps(steps)
    found = [] if "".join(leaf.text for leaf in leaves) == text else ["not rebuilt"]
    starts = [leaf.span.start for leaf in leaves[1:]]
    for low, high in [*json_values(text), *(match.span() for match in re.finditer(r"```.*?```", text, re.DOTALL))]:
        if CLOSE not in text[low:high] and any(low < start < high for start in starts):
            found.append(f"cut inside {text[low : low + 20]!r}")
    end = text.rfind(CLOSE) + len(CLOSE)
    if text.count(CLOSE) == 1 and any(
        s.span.start < end < s.span.end and text[end : s.span.end].strip() for s in leaves
    ):
        found.append("a step crosses the end of the thought")
    return found


def seen(style: str, text: str, forms: set[str], steps: Sequence[Step], tagged: Sequence[Step]) -> bool:
    """Whether the parsers found a style."""
    if style in FORMS:
        return bool(forms & set(FORMS[style]))
    thoughts = [step for step in tagged if step.kind == "thought"]
    broken = faults(Turn(index=0, context=(), text=text), tagged)
    opened = any(OPEN in step.text for step in thoughts)
    closed = any(CLOSE in step.text for step in thoughts)
    if style in JSON_STYLES:
        return any(True for _ in json_values(text))
    return {
        "think_closed": opened and closed,
        "think_unclosed": opened and not closed,
        "think_close_only": closed and not opened,
        "multi_think_blocks": opened and text.count(CLOSE) > 1,
        "code_block_inside": any("```" in step.text and Whole(text).touches(*_fence(text)) for step in steps),
        "malformed_tags": bool(broken),
        "repeated_eos": "repeated end mark" in broken,
        "python_dict_args": any("Python literal" in fault for fault in broken),
        "discussion_command_block": any(step.text.count("```") == 2 for step in steps),
    }.get(style, len(leaf_steps(steps)) > 1)


def _fence(text: str) -> tuple[int, int]:
    place = max(0, text.find("```"))
    return place, place + 3


def real_texts(folder: Path) -> None:
    """Parsed, promises, styles."""
    rows = json.loads((folder / "cot" / "cot_handed.json").read_text(encoding="utf-8"))
    found, wanted, missed = 0, 0, []
    broken: dict[str, int] = defaultdict(int)
    every = parsers()
    for row in rows:
        forms: set[str] = set()
        auto: tuple[Step, ...] = ()
        tagged: tuple[Step, ...] = ()
        for name, parser in every.items():
            steps = steps_by(parser, row["text"])
            for fault in check(row["text"], steps):
                broken[f"{name}: {row['id']}: {fault}"] += 1
            forms |= {form for step in steps if (form := Label.of(step).form)}
            auto, tagged = (steps if name == "auto" else auto), (steps if name == "tagged" else tagged)
        for style in row["style"]:
            wanted += 1
            if seen(style, row["text"], forms, auto, tagged):
                found += 1
            else:
                missed.append(f"{row['id']} {style}")
    print(f"{len(rows)} texts x {len(every)} parsers, promises broken: {dict(broken) or 'none'}")
    print(
        f"style labels found: {found}/{wanted} = {100 * found / wanted:.1f} %; missed: {', '.join(missed) or 'none'}\n"
    )


def marked(folder: Path, file: str) -> None:
    """Boundary F1 of leaf steps, and of top-level steps, against the marks: by language and style, micro-averaged."""
    rows = {row["id"]: row for row in json.loads((folder / "cot" / "cot_handed.json").read_text(encoding="utf-8"))}
    marks = json.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    sets = sorted({mark["set"] for mark in marks.values()})
    columns = (*(group for one in sets for group in (one, f"{one} en", f"{one} zh")), "all")
    lines, by_style = [], []
    for name, parser in parsers().items():
        for level in ("leaf", "top"):
            sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
            for key, mark in marks.items():
                text = rows[key]["text"]
                if hashlib.sha256(text.encode()).hexdigest() != mark["sha256"]:
                    raise SystemExit(f"text {key} is not the one that was marked")
                steps = steps_by(parser, text)
                steps = steps if level == "leaf" else tuple(step for step in steps if step.parent is None)
                here, there = borders(steps), {start for start in mark["starts"] if text[:start].strip()}
                groups = (
                    mark["set"],
                    f"{mark['set']} {rows[key]['lang']}",
                    "all",
                    rows[key]["lang"],
                    *rows[key]["style"],
                )
                for group in groups:
                    sums[group][0] += len(here & there)
                    sums[group][1] += len(here)
                    sums[group][2] += len(there)
            lines.append([name, level, *(_f1(sums[group]) for group in columns)])
            if name == "auto" and level == "leaf":
                by_style = [[group, str(one[2]), _f1(one)] for group, one in sorted(sums.items()) if one[2]]
    print(f"{len(marks)} texts of {file}: F1 (precision, recall)\n")
    print(table(["parser", "steps", *columns], lines), "\n")
    print(table(["style (auto, leaf steps)", "marks", "F1 (precision, recall)"], by_style), "\n")


def _f1(sums: Sequence[int]) -> str:
    common, here, there = sums
    value, both = agreement_of(common, here, there)
    return (
        f"{value / both if both else 1:.3f} ({common / here if here else 1:.2f}, {common / there if there else 1:.2f})"
    )


def agreement_of(common: int, here: int, there: int) -> tuple[int, int]:
    """As `coverage.agreement`, from counts."""
    assert agreement(set(range(common)), set(range(common))) == (2 * common, 2 * common)  # noqa: S101  one definition
    return 2 * common, here + there


def content(step: Step) -> str:
    """A step without tags and marker."""
    text = re.sub(r"</?think>", "", step.text).strip()
    return re.sub(r"^(?:\d+\.|Step \d+:)\s+", "", text).strip()


FORMATS: Mapping[str, Callable[[Sequence[str]], str]] = {
    "numbered list": lambda steps: "\n".join(f"{i}. {step}" for i, step in enumerate(steps, 1)),
    "numbered list, think tags": lambda s: f"<think>\n{FORMATS['numbered list'](s)}\n</think>\nDone.",
    "lines in think tags": lambda steps: "<think>\n" + "\n".join(steps) + "\n</think>\nDone.",
    "paragraphs in think tags": lambda steps: "<think>" + "\n\n".join(steps) + "</think>Done.",
    "Step N: joined by blanks": lambda steps: " ".join(f"Step {i}: {step}" for i, step in enumerate(steps, 1)),
    "Step N: in think tags": lambda s: f"<think>{FORMATS['Step N: joined by blanks'](s)}</think>Done.",
}


def listed(folder: Path) -> None:
    """Share of traces whose listed steps are exactly the top-level steps, marker and tags aside."""
    lines = []
    for name in ("markers", "auto"):
        parser = parser_of(name)
        for kind, write in FORMATS.items():
            good = total = 0
            for steps in _traces(folder):
                found = [content(step) for step in steps_by(parser, write(steps)) if step.parent is None]
                good += (found[:-1] if "think" in kind else found) == steps
                total += 1
            lines.append([name, kind, f"{good}/{total}", f"{100 * good / total:.2f} %"])
    print(table(["parser", "written as", "traces", "exact"], lines))


def _traces(folder: Path) -> Iterator[list[str]]:
    for path in sorted((folder / "steps" / "bigbench_mistake").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["steps"]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("data", type=Path)
    folder = arguments.parse_args().data
    real_texts(folder)
    for file in MARKS:
        marked(folder, file)
    listed(folder)


if __name__ == "__main__":
    main()
