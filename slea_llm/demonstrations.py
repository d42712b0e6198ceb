"""Logged successes to be imitated: tokenised once, marked as such, and kept on disk with an index in memory.

Their tokens were never sampled by a policy of this run, so that they have no log-probability to weigh them by: what
carries the mark is refused by the replay buffer, by credit and by every batch that would put it into a ratio.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from slea_llm.errors import ConfigError, TemplateError, nearest
from slea_llm.storage import SCORED, Place, RecordLog, atomic_write, log_kind
from slea_llm.types import Message, ScoredTrajectory, Step, TokenSpan, TokenTrace, Trajectory, Turn

TOKENISED = "tokenised"
"""Key in the provenance of a trajectory whose tokens come from its text."""


class Encoder(Protocol):
    """The part of a chat tokenizer that turns logged text into rows."""

    def encode_rows(self, messages: Sequence[Message]) -> Sequence[tuple[Sequence[int], Sequence[bool]]]: ...

    def decode(self, ids: Sequence[int]) -> tuple[str, Sequence[int]]: ...


def is_tokenised(trajectory: Trajectory) -> bool:
    """True when its tokens were made from text, so that its log-probabilities are nobody's."""
    return TOKENISED in trajectory.provenance


def tokenise(scored: ScoredTrajectory, chat: Encoder) -> ScoredTrajectory:
    """The dialogue with the rows that a rollout of these texts would hold, and the mark.

    A dialogue that has tokens already is encoded anew: they may be of another model. Raises TemplateError when its text
    does not come back from its tokens, or nothing in it would be trained.
    """
    trajectory = scored.trajectory
    messages: list[Message] = []
    for turn in trajectory.turns:
        messages += [*turn.context, Message(role="assistant", content=turn.text)]
    rows = chat.encode_rows(messages)
    traces = tuple(
        TokenTrace(token_ids=tuple(ids), sampled_mask=tuple(mask), logprobs=(0.0,) * len(ids)) for ids, mask in rows
    )
    spans = [TokenSpan(row, *run) for row, trace in enumerate(traces) for run in _runs(trace.sampled_mask)]
    if len(spans) != len(trajectory.turns):
        raise TemplateError(f"trajectory {trajectory.id}: {len(trajectory.turns)} turns have {len(spans)} replies")
    turns, starts = [], {}
    for turn, span in zip(trajectory.turns, spans, strict=True):
        turns.append(replace(turn, span=span))
        starts[turn.index] = _starts(turn, traces[span.row].token_ids[span.start : span.end], chat, trajectory.id)
    marked = replace(
        trajectory,
        turns=tuple(turns),
        traces=traces,
        provenance={**trajectory.provenance, TOKENISED: "text of a log; never sampled by a policy of this run"},
    )
    placed = {turn.index: turn for turn in turns}
    # The end of turn is the last leaf's; a parent spans what its children do.
    inner = {(step.turn, step.parent) for step in scored.steps if step.parent is not None}
    last = {step.turn: step for step in scored.leaves()}
    steps = tuple(
        _place(
            step, placed[step.turn], starts[step.turn], last=step is last[step.turn] or (step.turn, step.index) in inner
        )
        for step in scored.steps
    )
    return replace(scored, trajectory=marked, steps=steps)


class Demonstrations:
    """The successes of a scored log, tokenised, in `folder`; drawn by position.

    `evaluator` names whose scores tell the steps that gained. This process keeps every `world_size`-th success from
    `rank` on. Raises ConfigError for a log that holds no scores of that evaluator, or no success.
    """

    def __init__(
        self, log: Path | str, folder: Path, chat: Encoder, *, evaluator: str, rank: int = 0, world_size: int = 1
    ) -> None:
        if (kind := log_kind(log)) != SCORED.name:
            raise ConfigError(
                f"{log} is a {kind} log without scores, so that no step in it is known to have gained anything; run "
                "slea score on it with the evaluator that `gain` names, and give its output"
            )
        self._path = folder / "demonstrations.jsonl"
        self._places: list[Place] = []
        self.skipped: list[str] = []
        """Why dialogues could not be tokenised."""
        with atomic_write(self._path, "wb") as file:
            file.write(SCORED.header())
        with RecordLog(self._path, SCORED) as out:
            for number, one in enumerate(_successes(log, evaluator)):
                if number % world_size == rank:
                    try:
                        self._places += out.put(tokenise(one, chat))
                    except TemplateError as error:
                        self.skipped.append(str(error))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> ScoredTrajectory:
        return SCORED.read_at(self._path, self._places[number])


def _successes(log: Path | str, evaluator: str) -> Iterator[ScoredTrajectory]:
    found = 0
    for one in SCORED.read(log):
        if evaluator not in one.evaluator_versions:
            known = sorted(one.evaluator_versions)
            raise ConfigError(
                f"{log}: trajectory {one.trajectory.id} has no scores of {evaluator!r}, only of "
                f"{', '.join(known) or 'nobody'}{nearest(evaluator, known)}"
            )
        if one.trajectory.success:
            found += 1
            yield one
    if not found:
        raise ConfigError(f"{log} holds no success; what failed is not imitated")


def _runs(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The half-open ranges in which a mask is true."""
    start = None
    for place, on in enumerate([*mask, False]):
        if on and start is None:
            start = place
        elif not on and start is not None:
            yield start, place
            start = None


def _starts(turn: Turn, ids: Sequence[int], chat: Encoder, name: str) -> Sequence[int]:
    """The character at which each token of the reply starts."""
    text, starts = chat.decode(ids)
    if text != turn.text:
        raise TemplateError(f"trajectory {name}: the tokens of turn {turn.index} read {text!r}, not {turn.text!r}")
    return starts


def _place(step: Step, turn: Turn, starts: Sequence[int], *, last: bool) -> Step:
    """A token belongs to the step in which its first character starts; the end of turn to the last one."""
    span = turn.span or TokenSpan(0, 0, 0)
    end = len(turn.text) + 1 if last and step.span.end == len(turn.text) else step.span.end
    before = sum(start < step.span.start for start in starts)
    return replace(
        step,
        tokens=TokenSpan(span.row, span.start + before, span.start + max(before, sum(start < end for start in starts))),
    )
