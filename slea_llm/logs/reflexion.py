"""Logs of Reflexion: sections of correct, incorrect and halted agents, one ReAct text after another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from slea_llm.logs.facts import Facts
from slea_llm.logs.fields import mapping, optional_text
from slea_llm.logs.formats import LogRecord, RecordError, TextFormat
from slea_llm.logs.react_text import add_react
from slea_llm.logs.transcript import Transcript
from slea_llm.types import Termination, Trajectory

SECTIONS: Mapping[str, tuple[bool | None, Termination | None]] = {
    "CORRECT": (True, None),
    "SUCCESS": (True, None),
    "INCORRECT": (False, None),
    "FAIL": (False, None),
    "FAILED": (False, None),
    "HALTED": (None, "max_turns"),
}

_SECTION = re.compile(r"\s*-+\s*BEGIN (?P<name>[A-Z]+) AGENTS\s*-+\s*$")
_TRIAL = re.compile(r"\s*BEGIN TRIAL\s+(?P<number>\d+)")
_QUESTION = re.compile(r"\s*Question\s*:\s*(?P<text>.*)")
_CORRECT = re.compile(r"^Correct answer:[ \t]*(?P<answer>.*)$", re.MULTILINE)
_RULE = re.compile(r"\s*(?:#{5,}|-{5,}.*|Trial summary:.*|BEGIN TRIAL.*)\s*$")


class ReflexionLog(TextFormat):
    """Each `Question:` begins a dialogue; its section says how it ended. The right answer is kept under `grader`."""

    name: ClassVar[str] = "reflexion"

    def recognises_text(self, head: str) -> bool:
        lines = head.split("\n")
        return any(_SECTION.match(line) for line in lines) or any(_TRIAL.match(line) for line in lines[:10])

    def records(self, file: str, lines: Iterable[tuple[int, str]]) -> Iterator[LogRecord]:
        section, trial, count = "", "", 0
        held: list[str] = []
        start = 1
        for number, line in lines:
            begins = _QUESTION.match(line) is not None
            rule = _RULE.match(line) is not None
            if (begins or rule) and any(one.strip() for one in held):
                count += 1
                yield _record(file, count, start, held, section, trial)
                held = []
            if match := _SECTION.match(line):
                section = match["name"]
            elif match := _TRIAL.match(line):
                trial = match["number"]
            if begins:
                start = number
            if not rule and (held or line.strip()):
                held.append(line)
        if any(one.strip() for one in held):
            yield _record(file, count + 1, start, held, section, trial)

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = mapping(record.value, "record")
        text = optional_text(value.get("text")) or ""
        section = optional_text(value.get("section")) or ""
        transcript = Transcript(record.flags)
        if not add_react(transcript, text):
            raise RecordError("it holds no Thought and no Action")
        success, cut = SECTIONS.get(section, (None, None))
        question = next((match["text"] for line in text.split("\n") if (match := _QUESTION.match(line))), "")
        answer = _CORRECT.search(text)
        if answer is None and section in SECTIONS:
            transcript.flags.append("it ends without the line of the right answer: the file may be cut there")
        facts = Facts(
            id=f"trial {value['trial']}/{record.number}" if value.get("trial") else "",
            task={"id": question, "question": question} if question else {},
            success=success,
            cut=cut,
            grader={"places": ["Correct answer"], "answer": answer["answer"]} if answer else {},
            more={"section": section},
        )
        yield transcript.trajectory(record, self.name, facts)


def _record(file: str, count: int, line: int, held: list[str], section: str, trial: str) -> LogRecord:
    value: dict[str, Any] = {"text": "\n".join(held).rstrip("\n"), "section": section, "trial": trial}
    return LogRecord(file=file, number=count, line=line, value=value)
