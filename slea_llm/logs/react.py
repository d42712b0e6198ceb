"""ReAct as text: Thought, Action and Observation lines, numbered or not, and the prompts of ALFWorld with `> `."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from slea_llm.logs.facts import Facts
from slea_llm.logs.fields import optional_text
from slea_llm.logs.formats import LogRecord, RecordError, TextFormat
from slea_llm.logs.react_text import add_react, is_react
from slea_llm.logs.transcript import Transcript
from slea_llm.types import Trajectory

_QUESTION = re.compile(r"\s*Question\s*\d*\s*:")


class ReactLog(TextFormat):
    """A text file with one dialogue from each `Question:` on, or JSON that holds such texts by name or in a list."""

    name: ClassVar[str] = "react"

    def recognises_text(self, head: str) -> bool:
        return is_react(head)

    def recognises(self, value: Any) -> bool:
        texts = _texts(value)
        return bool(texts) and all(is_react(text) for _, text in texts[:3])

    def records(self, file: str, lines: Iterable[tuple[int, str]]) -> Iterator[LogRecord]:
        start, count = 1, 0
        held: list[str] = []
        for number, line in lines:
            if _QUESTION.match(line) and any(one.strip() for one in held):
                count += 1
                yield LogRecord(file=file, number=count, line=start, value="\n".join(held))
                held = []
            if not held:
                start = number
            held.append(line)
        if any(one.strip() for one in held):
            yield LogRecord(file=file, number=count + 1, line=start, value="\n".join(held))

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        texts = _texts(record.value)
        if not texts:
            raise RecordError("it holds no text")
        for name, text in texts:
            transcript = Transcript(record.flags)
            if not add_react(transcript, text):
                raise RecordError("it holds no Thought, no Action and no line that begins with >")
            yield transcript.trajectory(record, self.name, Facts(id=name))


def _texts(value: Any) -> list[tuple[str, str]]:
    """Name and text of each dialogue: of a text, an object with `text` or `prompt`, or an object of texts by name."""
    if isinstance(value, str):
        return [("", value)]
    if not isinstance(value, dict) or not value:
        return []
    for key in ("text", "prompt", "trajectory", "log"):
        if isinstance(value.get(key), str):
            return [(optional_text(value.get("id")) or "", value[key])]
    if all(isinstance(text, str) for text in value.values()):
        return list(value.items())
    return []
