"""Score steps by patterns that a developer wrote for the task: words, examples, step kinds, what was said and known."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from slea_llm import assets
from slea_llm.checks import check_choices
from slea_llm.errors import ConfigError
from slea_llm.evaluators.dialogue_features import Scene, normalised, pasts, said_twice
from slea_llm.evaluators.knowledge_file import (
    NAMED_SLOTS,
    Likeness,
    NoStateError,
    file_for,
    read_knowledge,
    read_words,
)
from slea_llm.evaluators.words import word_on
from slea_llm.types import ScoredStep, State, Step, Trajectory, leaf_steps

SHOWN = 5
"""Environments that are named in a note."""
LONGEST_STEP = 2_000
"""Characters of a step that are read: of a longer one its beginning and its end, half each. Patterns such as
`[^.!?]*\\?` take time that grows with the square of a text without an end."""


class TextEncoder(Protocol):
    """The part of a sentence encoder that examples need."""

    def encode(self, texts: Sequence[str]) -> Any:
        """(n, dimension): one vector of length 1 a text."""
        ...


class KnowledgeBase:
    """The first pattern of the file that matches a step, and in it the first case whose conditions hold, decides.

    A pattern applies to some kinds of step and matches by a regular expression of any language, by likeness to an
    example, by the label that the parser gave, or by the tool that is called; one with none of them matches every step
    of its kinds. Its cases look at the state before the turn or at what was said before, so that the same question is
    worth a reward while its answer is missing and a penalty once it was given. A step whose state lacks what a
    condition needs is not scored and says so; docs/steps-and-scores.md describes the file.
    """

    name: ClassVar[str] = "knowledge_base"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        file: str = "knowledge/order.yaml"
        """A file of data/, or the path of a file of your own."""
        unmatched: Literal["neutral", "unscored"] = "neutral"
        """A step that no pattern matches gets `default` with the rationale "no pattern", or no score at all."""
        default: float = 0.0
        """In [-1, 1]."""
        said_twice: float = -0.5
        """A step that says a sentence again which its own thought or reply has said scores this at most. In [-1, 1]; 1:
        as any other. Without it a policy earns what it likes by saying one right thought over and over."""
        encoder: str = "use-multilingual"
        """Sentence encoder for patterns with examples (`similar`); not loaded when the file has none."""
        features: bool = False
        """Add the four features of a step (specific, ignores_feedback, repeats, coherent) to its parts, 0.0 or 1.0."""

        def __post_init__(self) -> None:
            for name in ("default", "said_twice"):
                value = getattr(self, name)
                if not (math.isfinite(value) and abs(value) <= 1):
                    raise ConfigError(f"{name} {value} is not in [-1, 1]")
            check_choices(self, unmatched=("neutral", "unscored"))

    def __init__(self, config: Config, *, encoder: TextEncoder | None = None) -> None:
        """Read the file; `encoder` is used in place of the one that the settings name.

        Raises ConfigError that names the pattern and the fault, and what loading an encoder raises.
        """
        self.config = config
        content = _content(config.file)
        self._knowledge = read_knowledge(config.file, content)
        self._words = read_words()
        self._examples: Any = None
        self._encoder = encoder
        if self._knowledge.examples:
            # By name: an encoder brings numpy and weights, which a file without examples is spared.
            self._encoder = encoder or importlib.import_module("slea_llm.encoders").load_encoder(config.encoder)
        settings = json.dumps(dataclasses.asdict(config), sort_keys=True).encode()
        self._version = hashlib.sha256(content + settings).hexdigest()[:16]

    @property
    def version(self) -> str:
        """Changes when the file or the settings do."""
        return self._version

    @classmethod
    def misplaced(cls, config: Config, environments: Collection[str]) -> str | None:
        """Why its words say little of dialogues of these environments, with the mend; None when the file is for one of
        them, or does not say what it is for."""
        known = read_knowledge(config.file, _content(config.file)).environments
        if not known or not environments or set(known) & set(environments):
            return None
        fitting = next((name for one in sorted(environments) if (name := file_for(one))), None)
        about = f"{config.file} is knowledge of {', '.join(known)}, and these are dialogues of "
        about += ", ".join(sorted(environments)[:SHOWN])
        if fitting:
            return f"{about}: most of its scores mean nothing there; set {cls.name}'s file to {fitting}"
        return (
            f"{about}: where they are about something else, its scores mean nothing; set {cls.name}'s file to "
            "knowledge of your own (docs/evaluators.md says how to write it), or leave it out"
        )

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """A word on every leaf step, each score in [-1, 1]; `parts` names the pattern that decided."""
        states = {turn.index: turn.state_before for turn in trajectory.turns}
        leaves = leaf_steps(steps)
        last = {step.turn: step for step in leaves}
        texts = [normalised(step.text, LONGEST_STEP) for step in leaves]
        placed = [(step.turn, text) for step, text in zip(leaves, texts, strict=True)]
        past_of = pasts(trajectory, placed, self._words, self._knowledge.heard)
        slots = self._knowledge.slots
        scenes = [Scene(text, past_of(step.turn), self._words, slots) for step, text in zip(leaves, texts, strict=True)]
        likenesses = self._likenesses(texts)
        words = (
            self._judge(step, scene, states[step.turn], likeness, last=last[step.turn] is step)
            for step, scene, likeness in zip(leaves, scenes, likenesses, strict=True)
        )
        # A call is no speech: code and JSON repeat themselves. A reply may say what its thought had drafted.
        spoken = [
            ((step.turn, step.kind), "" if step.kind == "tool_call" else text)
            for step, text in zip(leaves, texts, strict=True)
        ]
        return tuple(self._once(one, twice) for one, twice in zip(words, said_twice(spoken), strict=True))

    def _once(self, word: ScoredStep, twice: bool) -> ScoredStep:
        """The word on a step, cut where it says the same again."""
        most = self.config.said_twice
        if not twice or word.score is None or word.score <= most:
            return word
        parts = {**word.parts, "said_twice": most}
        return dataclasses.replace(word, score=most, rationale=f"says the same twice; {word.rationale}", parts=parts)

    def _judge(self, step: Step, scene: Scene, state: State, likeness: Likeness, *, last: bool) -> ScoredStep:
        extra = {name: float(flag) for name, flag in scene.features.items()} if self.config.features else {}
        try:
            for pattern in self._knowledge.patterns:
                named = pattern.find(step, scene, likeness)
                if named is None:
                    continue
                case = next((case for case in pattern.cases if case.holds(state, scene, named, last=last)), None)
                if case is not None:
                    words = case.rationale.replace(NAMED_SLOTS, ", ".join(sorted(named)))
                    parts = {pattern.name: case.score, **extra}
                    return word_on(step, self.name, self._version, score=case.score, rationale=words, parts=parts)
        except NoStateError as error:
            return word_on(step, self.name, self._version, reason=str(error))
        if self.config.unmatched == "unscored":
            return word_on(step, self.name, self._version, reason="no pattern")
        return word_on(step, self.name, self._version, score=self.config.default, rationale="no pattern", parts=extra)

    def _likenesses(self, texts: Sequence[str]) -> list[Likeness]:
        """For each text, pattern -> cosine with the nearest of its examples; empty when the file has no examples."""
        examples = self._knowledge.examples
        if self._encoder is None or not examples or not texts:
            return [{} for _ in texts]
        if self._examples is None:
            self._examples = self._encoder.encode([normalised(text) for _, text in examples])
        cosines = self._encoder.encode(list(texts)) @ self._examples.T
        return [_nearest(row, [name for name, _ in examples]) for row in cosines]


def _content(file: str) -> bytes:
    """The bytes of a knowledge file. Raises ConfigError when it is neither a path nor a file of the package."""
    path = Path(file)
    if not path.is_file():
        if path.parts[:1] != ("knowledge",):
            raise ConfigError(
                f"knowledge file {file} is not there; give the path of your own, or a file of the package such as "
                "knowledge/order.yaml"
            )
        path = assets.find("data", file)
    return path.read_bytes()


def _nearest(cosines: Sequence[float], names: Sequence[str]) -> Likeness:
    """Pattern -> its highest cosine."""
    best: dict[str, float] = {}
    for name, cosine in zip(names, cosines, strict=True):
        best[name] = max(best.get(name, -1.0), float(cosine))
    return best
