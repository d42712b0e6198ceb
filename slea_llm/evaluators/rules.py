"""Score steps by rules that hold for any agent: no file, no model, no state of an environment."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slea_llm.checks import check_scores
from slea_llm.evaluators.dialogue_features import Scene, normalised, pasts
from slea_llm.evaluators.knowledge_file import read_words
from slea_llm.evaluators.tool_results import answers, error_in
from slea_llm.evaluators.words import word_on
from slea_llm.types import ScoredStep, Step, Trajectory, leaf_steps

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

LONGEST_STEP = 2_000
"""Characters of a step that are compared with others: of a longer one its beginning and its end, half each."""


class Rules:
    """A first look at any log: what repeats, what fails, what passes over an answer; everything else is neutral.

    The rules see what was said, what was called and what came back, and nothing of the task: they find steps that are
    wasted or go wrong by the look of them, not steps that are wrong in the matter. Scores are in [-1, 1]. The first
    rule that applies decides: an empty step; a call that cannot be read; a call made before with the same answer; a
    call that was answered with an error; a step that repeats an earlier one; a reply that takes up nothing of what it
    was told; a call that brought a result.
    """

    name: ClassVar[str] = "rules"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        empty: float = -0.5
        broken_call: float = -0.5
        """A call block that is no JSON object with a name."""
        same_call: float = -0.5
        """The same call as before, unless it was answered otherwise this time."""
        tool_error: float = -0.4
        repeats: float = -0.5
        """A reply or thought that shares 0.6 of its content words with one of an earlier turn."""
        ignores: float = -0.3
        """A reply none of whose steps takes up a content word of what user and tools said since the last one."""
        result: float = 0.2
        """A call that was answered without an error."""

        def __post_init__(self) -> None:
            check_scores(self)

    def __init__(self, config: Config) -> None:
        self.config = config
        self._words = read_words()
        settings = json.dumps(dataclasses.asdict(config), sort_keys=True)
        self._version = hashlib.sha256(f"1 {settings}".encode()).hexdigest()[:16]

    @property
    def version(self) -> str:
        """Changes when the settings or the rules do."""
        return self._version

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """A word on every leaf step, each score in [-1, 1] with the rule that decided as its only part."""
        leaves = leaf_steps(steps)
        texts = [normalised(step.text, LONGEST_STEP) for step in leaves]
        past = pasts(trajectory, [(leaf.turn, text) for leaf, text in zip(leaves, texts, strict=True)], self._words, {})
        answered = answers(trajectory, steps)
        calls: dict[str, str | None] = {}
        spoken: dict[int, set[str]] = {}
        scenes = [Scene(text, past(leaf.turn), self._words) for leaf, text in zip(leaves, texts, strict=True)]
        for leaf, scene in zip(leaves, scenes, strict=True):
            spoken.setdefault(leaf.turn, set()).update(scene.content)
        said = []
        for leaf, text, scene in zip(leaves, texts, scenes, strict=True):
            taken_up = bool(spoken[leaf.turn] & scene.past.content_now)
            rule, score, why = self._judge(leaf, text, scene, answered, calls, taken_up=taken_up)
            said.append(word_on(leaf, self.name, self._version, score=score, rationale=why, parts={rule: score}))
        return tuple(said)

    def _judge(
        self,
        step: Step,
        text: str,
        scene: Scene,
        answered: dict[tuple[int, int], str | None],
        calls: dict[str, str | None],
        *,
        taken_up: bool,
    ) -> tuple[str, float, str]:
        """Rule, score and rationale of one step; notes the call that it makes in `calls`.

        `taken_up`: whether the whole reply that it is part of shares a content word with what came before it.
        """
        if not text:
            return "empty", self.config.empty, "says nothing"
        if step.kind == "tool_call":
            return self._call(step, text, answered.get((step.turn, step.index)), calls)
        if scene.repeats:
            return "repeats", self.config.repeats, "says again what it has said before"
        if step.kind == "reply" and scene.past.answered and scene.past.content_now and not taken_up:
            return "ignores", self.config.ignores, "the reply takes up no word of what it was just told"
        return "neutral", 0.0, "a thought" if step.kind == "thought" else "no rule speaks for or against it"

    def _call(self, step: Step, text: str, answer: str | None, calls: dict[str, str | None]) -> tuple[str, float, str]:
        known, before = text in calls, calls.get(text)
        calls[text] = answer
        if fault := _fault(step.text):
            return "broken_call", self.config.broken_call, fault
        if known and (answer is None or answer == before):
            return "same_call", self.config.same_call, "makes the same call again and learns nothing new"
        if answer is None:
            return "unanswered", 0.0, "a call without an answer in the log"
        if error := error_in(answer):
            return "tool_error", self.config.tool_error, f"the tool answered with an error: {error}"
        return "result", self.config.result, "the call brought a result"


def _fault(text: str) -> str | None:
    """What is wrong with a call block, each of its calls being a JSON object with a name."""
    for block in _BLOCK.findall(text):
        try:
            call = json.loads(block)
        except (ValueError, RecursionError):
            return "the call is no JSON"
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return "the call is no JSON object with a name"
    return None
