"""A weighted mean of what other evaluators say of a step."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from slea_llm.errors import ConfigError
from slea_llm.evaluators.words import word_on, words_on_many
from slea_llm.interfaces import Remembering, StepEvaluator
from slea_llm.types import ScoredStep, Step, Trajectory, Verdict, leaf_steps

BuildEvaluator: TypeAlias = Callable[[str, Mapping[str, Any]], StepEvaluator]
"""Name and options of an evaluator -> the evaluator, with whatever it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One evaluator of a blend, by registry name."""

    name: str
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    """The options of its own `Config`."""


class Blend:
    """Scores a step by sum_i w_i s_i / sum_i w_i over its parts; `parts` of the score holds each s_i as it was.

    The parts keep their own scales: blend what is in one unit (differences of success probability), or weigh it down.
    With `missing: unscored` a step that one part left without a score has none here either, with that part's reason;
    with `missing: renormalise` the mean is over the parts that spoke, and the rationale says who did not.
    """

    name: ClassVar[str] = "blend"
    needs: ClassVar[frozenset[str]] = frozenset({"build_evaluator"})

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        evaluators: tuple[Part, ...]
        """Two or more, each once: `{name: hindsight, weight: 0.5, options: {folder: ...}}`."""
        missing: Literal["unscored", "renormalise"] = "unscored"

        def __post_init__(self) -> None:
            names = [part.name for part in self.evaluators]
            if len(names) < 2:
                raise ConfigError(f"a blend of {len(names)} evaluator(s); give two or more")
            if twice := sorted(name for name, count in Counter(names).items() if count > 1):
                raise ConfigError(f"the blend names {', '.join(twice)} twice; give each once, with one weight")
            if "blend" in names:
                raise ConfigError("a blend cannot be a part of a blend; give its evaluators and weights here")
            for part in self.evaluators:
                if not (math.isfinite(part.weight) and part.weight > 0):
                    raise ConfigError(f"the weight {part.weight} of {part.name!r} is not above 0")

    def __init__(self, config: Config, *, build_evaluator: BuildEvaluator) -> None:
        self.config = config
        self._parts = tuple((build_evaluator(part.name, part.options), part.weight) for part in config.evaluators)

    @property
    def version(self) -> str:
        """Changes when a weight, the rule for what is missing, or the version of a part does."""
        facts = [[one.name, one.version, weight] for one, weight in self._parts]
        return hashlib.sha256(json.dumps([self.config.missing, facts]).encode()).hexdigest()[:16]

    @property
    def gate(self) -> Verdict:
        """Open while that of every learnt part is: a part that proved nothing must not move training in disguise."""
        verdicts = [one.gate for one, _ in self._parts if hasattr(one, "gate")]
        shut = [verdict.line for verdict in verdicts if not verdict.open]
        if shut:
            return Verdict(open=False, line=f"{self.name}: gate shut, weight 0: {'; '.join(shut)}")
        return Verdict(
            open=True, line=f"{self.name}: gate open, {len(verdicts)} of {len(self._parts)} parts are learnt"
        )

    @property
    def evaluators(self) -> tuple[StepEvaluator, ...]:
        return tuple(one for one, _ in self._parts)

    def state(self) -> Mapping[str, Any]:
        """What its parts remember, by name."""
        return {one.name: dict(one.state()) for one, _ in self._parts if isinstance(one, Remembering)}

    def restore(self, state: Mapping[str, Any]) -> None:
        for one, _ in self._parts:
            if isinstance(one, Remembering):
                one.restore(state[one.name])

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """One word for every leaf step. What a part raises is passed on."""
        return self.score_many([(trajectory, steps)])[0]

    def score_many(self, trajectories: Sequence[tuple[Trajectory, Sequence[Step]]]) -> list[tuple[ScoredStep, ...]]:
        """The same of several trajectories; a part that can is asked about all of them at once."""
        columns = [words_on_many(one, trajectories) for one, _ in self._parts]
        return [
            self._mix_all(steps, [column[place] for column in columns]) for place, (_, steps) in enumerate(trajectories)
        ]

    def _mix_all(self, steps: Sequence[Step], words: Sequence[Sequence[ScoredStep]]) -> tuple[ScoredStep, ...]:
        heard = [
            (one.name, weight, {(word.turn, word.step): word for word in said})
            for (one, weight), said in zip(self._parts, words, strict=True)
        ]
        version = self.version
        return tuple(
            self._mix(
                step, [(name, weight, words.get((step.turn, step.index))) for name, weight, words in heard], version
            )
            for step in leaf_steps(steps)
        )

    def _mix(self, step: Step, words: Sequence[tuple[str, float, ScoredStep | None]], version: str) -> ScoredStep:
        spoken: dict[str, tuple[float, float]] = {}
        silent: dict[str, str] = {}
        said = []
        for name, weight, word in words:
            if word is None or word.score is None:
                silent[name] = "gave no answer" if word is None else str(word.reason)
                continue
            spoken[name] = (weight, word.score)
            if word.rationale:
                said.append(f"{name} {word.score:+.2f}: {word.rationale}")
        if not spoken or (silent and self.config.missing == "unscored"):
            reason = "; ".join(f"{name}: {why}" for name, why in silent.items())
            return word_on(step, self.name, version, score=None, reason=reason)
        total = sum(weight for weight, _ in spoken.values())
        if silent:
            said.append(f"without {', '.join(silent)}")
        return word_on(
            step,
            self.name,
            version,
            score=sum(weight * score for weight, score in spoken.values()) / total,
            parts={name: score for name, (_, score) in spoken.items()},
            rationale="; ".join(said),
        )
