"""Logs of Inspect: `.json` documents and `.eval` archives; one trajectory a sample."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from slea_llm.errors import StorageError
from slea_llm.logs.chat import add_messages
from slea_llm.logs.facts import Facts, facts_of
from slea_llm.logs.fields import (
    content_text,
    has_list,
    mapping,
    name_text,
    number,
    optional_list,
    optional_mapping,
    sequence,
)
from slea_llm.logs.formats import Fault, JsonFormat, LogRecord, RecordError
from slea_llm.logs.sources import damage
from slea_llm.logs.transcript import Transcript
from slea_llm.storage import parse_json
from slea_llm.types import Termination, Trajectory

LETTERS: Mapping[str, float] = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""What Inspect counts its letters as: correct, partial, incorrect, no answer."""
LIMITS: Mapping[str, Termination] = {"message": "max_turns", "turn": "max_turns"}
HEADERS = ("header.json", "_journal/start.json")
LARGEST_MEMBER = 1 << 31
"""Bytes of a sample above which it is not unpacked."""

_NUMBER = re.compile(r"(\d+)")


class InspectLog(JsonFormat):
    """The first scorer's value is the outcome; all scores, as written, are in `provenance.scores`."""

    name: ClassVar[str] = "inspect"
    rows: ClassVar[str] = "samples"

    def recognises(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        return self.opens(value) or (has_list(value, "messages") and "epoch" in value and "scores" in value)

    def opens(self, header: Mapping[str, Any]) -> bool:
        return isinstance(header.get("eval"), dict) and "version" in header

    def opens_archive(self, names: Sequence[str]) -> bool:
        return any(name in names for name in HEADERS)

    def archive_records(self, file: str, archive: zipfile.ZipFile) -> Iterator[LogRecord | Fault]:
        names = archive.namelist()
        header = next(
            (
                found
                for name in HEADERS
                if name in names and isinstance(found := self._member(file, archive, name), Mapping)
            ),
            {},
        )
        samples = sorted(
            (name for name in names if name.startswith("samples/") and name.endswith(".json")), key=_natural
        )
        if not samples:
            yield Fault(file=file, line=None, record=None, reason="the archive holds no sample")
        for count, name in enumerate(samples, start=1):
            value = self._member(file, archive, name)
            if isinstance(value, StorageError):
                yield Fault(file=f"{file}/{name}", line=None, record=count, reason=str(value))
            else:
                short = file.replace("\\", "/").rpartition("/")[2]
                yield LogRecord(file=short, number=count, line=1, value=value, header=header)

    def _member(self, file: str, archive: zipfile.ZipFile, name: str) -> Any:
        """The JSON of a member, or the StorageError that says why it could not be read."""
        try:
            if archive.getinfo(name).file_size > LARGEST_MEMBER:
                return StorageError(f"{name} is larger than {LARGEST_MEMBER} bytes")
            return parse_json(f"{file}/{name}", 1, archive.read(name)).value
        except StorageError as error:
            return error
        except damage(RuntimeError, NotImplementedError, ValueError) as error:
            # a wrong password, a method of packing or a header that zipfile does not know
            return StorageError(f"{name} could not be unpacked: {error}")

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = mapping(record.value, "sample")
        if "samples" not in value and "eval" not in value:
            yield self._sample(record, value, record.header)
            return
        samples = optional_list(value.get("samples"))
        if not samples:
            raise RecordError("it holds no sample")
        for sample in samples:
            yield self._sample(replace(record, value=sample), mapping(sample, "sample"), value)

    def _sample(self, record: LogRecord, sample: Mapping[str, Any], header: Mapping[str, Any]) -> Trajectory:
        attachments = optional_mapping(sample.get("attachments"))
        transcript = Transcript(record.flags)
        messages = _attached(sequence(sample.get("messages"), "messages"), attachments)
        add_messages(transcript, messages)
        return transcript.trajectory(record, self.name, self._facts(sample, header, transcript))

    def _facts(self, sample: Mapping[str, Any], header: Mapping[str, Any], transcript: Transcript) -> Facts:
        run = optional_mapping(header.get("eval"))
        scores = optional_mapping(sample.get("scores") or sample.get("score"))
        values = {name: optional_mapping(score).get("value") for name, score in scores.items()}
        first = next(iter(values.values()), None)
        reward = LETTERS.get(first) if isinstance(first, str) else None
        if reward is None and first is not None and not isinstance(first, Mapping | list):
            reward = number(first, "score", transcript.flags)
        limit = optional_mapping(sample.get("limit"))
        error = sample.get("error")
        broke = (
            content_text(optional_mapping(error).get("message", error), "error", transcript.flags) if error else None
        )
        task = name_text(run.get("task"))
        target = sample.get("target")
        return facts_of(
            sample,
            ("messages", "events", "attachments", "output", "input", "scores", "target", "store", "error", "epoch"),
            transcript.flags,
            id="/".join(part for part in (task, name_text(sample.get("id")), name_text(sample.get("epoch"))) if part),
            task={"id": name_text(sample.get("id")), **({"name": task} if task else {})},
            environment=f"{self.name}:{task}" if task else "",
            reward=reward,
            cut=LIMITS.get(name_text(limit.get("type")), "budget") if limit else None,
            error=broke or None,
            grader={"places": ["target"], "target": target} if target else {},
            more={"scores": values, "model": name_text(run.get("model"))},
        )


def _attached(value: Any, attachments: Mapping[str, Any]) -> Any:
    """The value with every reference to an attachment replaced by it."""
    if isinstance(value, str):
        name = value.removeprefix("attachment://")
        return attachments.get(name, value) if name != value else value
    if isinstance(value, list):
        return [_attached(item, attachments) for item in value]
    if isinstance(value, dict):
        return {key: _attached(item, attachments) for key, item in value.items()}
    return value


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts sample 2 before sample 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in _NUMBER.split(name)]
