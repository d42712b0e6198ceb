"""Dialogues for tests of augmenters: turns with rewards, states and texts; and credit with a part that pays as told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.interfaces import LocalReducer
from slea_llm.settings import StreamSettings
from slea_llm.types import (
    Message,
    ScoredStep,
    ScoredTrajectory,
    Span,
    Step,
    StepKind,
    Termination,
    TokenSpan,
    TokenTrace,
    Trajectory,
    Turn,
)
from tests.support.experience import stats_of

Steps = Sequence[tuple[StepKind, str]]
REPLY: Steps = (("reply", "a"),)


def talk(
    turns: Sequence[Steps],
    *,
    rewards: Sequence[float] | None = None,
    states: Sequence[Mapping[str, Any]] | None = None,
    users: Sequence[str] | None = None,
    termination: Termination = "success",
    scores: Sequence[ScoredStep] = (),
    name: str = "t",
) -> ScoredTrajectory:
    """A dialogue of these steps, a token a character. `states`: before every turn and after the last one; `users`: what
    the user said before every turn."""
    paid = list(rewards) if rewards is not None else [0.0] * len(turns)
    known = list(states) if states is not None else [{}] * (len(turns) + 1)
    mask: list[bool] = []
    made: list[Turn] = []
    steps: list[Step] = []
    for number, spoken in enumerate(turns):
        mask += [False] * 2
        start = at = len(mask)
        for index, (kind, text) in enumerate(spoken):
            span, tokens = Span(at - start, at - start + len(text)), TokenSpan(0, at, at + len(text))
            steps.append(
                Step(trajectory_id=name, turn=number, index=index, kind=kind, text=text, span=span, tokens=tokens)
            )
            at += len(text)
        mask += [True] * (at - start)
        said = (Message(role="user", content=users[number]),) if users is not None else ()
        made.append(
            Turn(
                index=number,
                context=said,
                text="".join(text for _, text in spoken),
                span=TokenSpan(0, start, at),
                reward=paid[number],
                state_before=known[number],
                state_after=known[number + 1],
            )
        )
    broken = termination == "error"
    trace = TokenTrace(
        token_ids=(1,) * len(mask), sampled_mask=tuple(mask), logprobs=tuple(-1.0 if one else 0.0 for one in mask)
    )
    trajectory = Trajectory(
        id=name,
        task={},
        environment="test",
        seed=0,
        policy_version=0,
        turns=tuple(made),
        traces=(trace,) if made else (),
        outcome=None if broken else float(sum(paid)),
        termination=termination,
        error="broke" if broken else None,
    )
    versions = {one.evaluator: one.version for one in scores}
    return ScoredTrajectory(
        trajectory=trajectory, steps=tuple(steps), scores=tuple(scores), parser="test", evaluator_versions=versions
    )


class Pays:
    """An augmenter that pays what it is told of each dialogue, by the dialogue's id."""

    name: ClassVar[str] = "pays"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, paid: Mapping[str, Mapping[tuple[int, int], float]]) -> None:
        self._paid = paid

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:  # noqa: ARG002
        return self._paid[scored.trajectory.id]


def advantages(
    scored: ScoredTrajectory,
    paid: Mapping[tuple[int, int], float],
    values: Sequence[float],
    *,
    after: float = 0.0,
    sources: tuple[str, ...] = ("outcome", "pays"),
    **stream: Any,
) -> NDArray[np.float64]:
    """Advantages (tokens,) of one dialogue whose outcome and paid part meet in one stream, before any whitening."""
    streams = {"s": StreamSettings(sources=sources, whiten=False, **stream)}
    method = NestedGae(NestedGae.Config(whiten_final=False), streams=streams)
    crediting = Crediting(streams, [Pays({scored.trajectory.id: paid})], method, evaluators=())
    stats = stats_of(scored, {"s": values}, after=after)
    (got,) = crediting.credit([scored], [stats], progress=0.0, reducer=LocalReducer())
    return got.advantages
