"""Our own logs: trajectories and scored trajectories, each line with its checksum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from slea_llm import records
from slea_llm.errors import StorageError
from slea_llm.logs.fields import shown
from slea_llm.logs.formats import JsonFormat, LogRecord, RecordError
from slea_llm.storage import SCORED, TRAJECTORIES
from slea_llm.types import Trajectory

_FORMS = (TRAJECTORIES, SCORED)
_TRAJECTORY_KEYS = frozenset({"id", "environment", "turns", "traces", "termination"})
_SCORED_KEYS = frozenset({"trajectory", "steps", "scores", "parser"})


class OwnLog(JsonFormat):
    """Logs that `slea` wrote. What an earlier scoring said is left behind; a wrong checksum is a fault."""

    name: ClassVar[str] = "slea"

    def recognises(self, value: Any) -> bool:
        return isinstance(value, dict) and (
            value.keys() >= _TRAJECTORY_KEYS or value.keys() >= _SCORED_KEYS or _is_header(value)
        )

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = record.value
        if _is_header(value):
            known = {form.name: form.version for form in _FORMS}
            if known.get(value["format"]) != value["version"]:
                raise RecordError(
                    f"version {value['version']!r} of {value['format']} is not {known.get(value['format'])}; read it "
                    "with the slea_llm that wrote it"
                )
            return ()
        scored = "trajectory" in value
        try:
            if record.raw is not None and "crc32" in value:
                form = SCORED if scored else TRAJECTORIES
                found = form.read_line(record.file, record.line, record.raw)
                return (found if isinstance(found, Trajectory) else found.trajectory,)
            plain = {key: item for key, item in value.items() if key not in ("crc32", "flags")}
            return (_typed(records.decode_scored(plain).trajectory if scored else records.decode_trajectory(plain)),)
        except StorageError as error:
            raise RecordError(str(error).partition(": ")[2] or str(error)) from error
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise RecordError(f"not a record of slea: {type(error).__name__}: {error}") from error


def _typed(trajectory: Trajectory) -> Trajectory:
    """The trajectory of a record without a checksum, which anybody may have written. Raises TypeError if it is odd."""
    texts = [trajectory.id, trajectory.environment, trajectory.error or ""]
    objects: list[Any] = [trajectory.task, trajectory.provenance]
    numbers: list[Any] = [trajectory.seed, trajectory.policy_version]
    for turn in trajectory.turns:
        texts.append(turn.text)
        objects += [turn.state_before, turn.state_after]
        numbers.append(turn.index)
        texts += [message.content for message in turn.context]
        texts += [text for call in turn.tool_calls for text in (call.id, call.name, call.arguments)]
    texts += [message.content for message in trajectory.closing]
    for kind, values in ((str, texts), (Mapping, objects), (int, numbers)):
        for value in values:
            if not isinstance(value, kind):
                raise TypeError(f"{shown(value)} stands where {kind.__name__} must")
    if trajectory.outcome is not None and not isinstance(trajectory.outcome, int | float):
        raise TypeError(f"outcome {shown(trajectory.outcome)} is no number")
    return trajectory


def _is_header(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("format"), str) and value["format"].startswith("slea.") and "version" in value
