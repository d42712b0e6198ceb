"""Rules about environment, scorer and machinery: what failed although agent and user did their part."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slea_llm.blame.faults import Fault, Weight
from slea_llm.blame.view import Line, View, cues

_PROGRAM = re.compile(r'<tool_call>.*?"(?:\w*code|script|program|command|cmd|python|bash)"\s*:', re.DOTALL)
"""A call that hands over something to run: what its answer says of errors is the agent's program's doing."""
_STAGE = re.compile(r"\[turn (?P<turn>\d+), (?P<stage>[a-z ]+)\]\s*\Z")


def other_faults(seen: View) -> Iterator[Fault]:
    """Faults of the environment, the scorer and the simulator's machinery."""
    trajectory = seen.trajectory
    if trajectory.failed:
        yield _broke(str(trajectory.error))
        return
    yield from _verdict(seen)
    yield from _state(seen)
    for line in seen.lines:
        if line.side == "tool" and not _ran_program(seen, line) and (found := _failure(seen, line)):
            yield Fault(party="environment", kind="tool_failed", turn=line.turn, quote=found, note=line.text[:200])
    if seen.pinned.get("name") == "recorded" and seen.pinned.get("left_at") is not None and not seen.success:
        left_at = int(seen.pinned["left_at"])
        quote = next((line.text for line in seen.lines if line.side == "agent" and line.turn == left_at), "")
        yield Fault(
            party="user", kind="off_path", turn=left_at, quote=quote[:300], note="no word was recorded for this"
        )


def _verdict(seen: View) -> Iterator[Fault]:
    """What is wrong with the outcome itself. A part of the full reward is none: a failure may pay one."""
    trajectory = seen.trajectory
    # What a log says of success is a verdict, with a number or without.
    if trajectory.outcome is None and trajectory.termination != "unknown" and "source" not in trajectory.provenance:
        yield Fault(party="scorer", kind="no_outcome", turn=len(trajectory.turns), quote="outcome: none")
    elif trajectory.outcome is not None and (
        (seen.success and trajectory.outcome < 0) or (trajectory.termination == "failure" and trajectory.outcome >= 1)
    ):
        quote = f"termination {trajectory.termination}, outcome {trajectory.outcome:g}"
        # Only where details are to be agreed on is 1 known to be the full reward: games count as they like.
        weight: Weight = "serious" if seen.wanted else "minor"
        yield Fault(party="scorer", kind="contradicts_outcome", turn=len(trajectory.turns), quote=quote, weight=weight)


def _ran_program(seen: View, answer: Line) -> bool:
    """Whether the reply before a tool's answer handed over a program."""
    return answer.turn > 0 and _PROGRAM.search(seen.trajectory.turns[answer.turn - 1].text) is not None


def _failure(seen: View, answer: Line) -> str:
    """The words by which a tool's answer says that it failed; empty when it only repeats what the user had said."""
    said = " ".join(line.plain for line in seen.user_lines if line.turn <= answer.turn)
    return next((found for found in cues("tool_failed", answer.plain) if found not in said), "")


def _broke(error: str) -> Fault:
    """Whose part raised: the record of a broken dialogue ends with the turn and the part that was at work."""
    found = _STAGE.search(error)
    turn, stage = (int(found["turn"]), found["stage"]) if found else (0, "")
    if stage == "user":
        return Fault(party="user", kind="broke", turn=turn, quote=error[:300])
    return Fault(party="environment", kind="crashed", turn=turn, quote=error[:300])


def _state(seen: View) -> Iterator[Fault]:
    """What the environment's own notes say against the outcome, or against the user's words."""
    turns = seen.trajectory.turns
    if not turns or not seen.wanted or seen.success:
        return
    filled = turns[-1].state_after.get("filled")
    if not isinstance(filled, Mapping):
        return
    for slot in seen.wanted:
        told = [line for line in seen.user_lines if slot.named_in(line.text)]
        if told and slot.slot not in filled and slot.slot in turns[-1].state_after.get("missing", ()):
            note = f"noted nothing for {slot.slot}"
            yield Fault(party="environment", kind="misheard", turn=told[-1].turn, quote=told[-1].text[:300], note=note)
    wrong = {
        slot: filled[slot.slot]
        for slot in seen.wanted
        if slot.slot in filled and not slot.is_noted(str(filled[slot.slot]))
    }
    whole = bool(filled) and all(slot.slot in filled for slot in seen.wanted)
    if turns[-1].state_after.get("placed") and not wrong and whole:
        quote = f"placed with {_short(filled)}"
        yield Fault(party="scorer", kind="contradicts_outcome", turn=len(turns), quote=quote, weight="suspect")
    for slot, value in wrong.items():
        said = [line for line in seen.user_lines if str(value).lower() in line.text.lower()]
        told = [line for line in seen.user_lines if slot.named_in(line.text)]
        if told and not said:
            note = f"noted {slot.slot} as {value!r}"
            yield Fault(party="environment", kind="misheard", turn=told[-1].turn, quote=told[-1].text[:300], note=note)


def _short(filled: Mapping[str, Any]) -> str:
    return ", ".join(f"{slot} {value}" for slot, value in filled.items())[:200]
