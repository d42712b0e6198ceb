"""Score steps by asking a language model for a verdict on each, with its rationale."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from slea_llm import prompts
from slea_llm.checks import check_choices, check_least
from slea_llm.endpoints import Endpoint, chat_model_of, whole_characters
from slea_llm.questions import Answer, ChatModel, Question, Usage
from slea_llm.types import Message, ScoredStep, Step, Trajectory, Turn, leaf_steps

FEATURES = ("specific", "ignores_feedback", "repeats", "coherent")
"""What a verdict says of a step beside its score; each is a part of the ScoredStep, 1.0 for true."""
LOWEST, HIGHEST = 1, 5
LONGEST_RATIONALE = 400
"""Characters; a bound in the schema keeps a small model from talking until its tokens end."""
FIELDS = frozenset({"history", "after", "reply", "number", "step"})
HINDSIGHT = ("none", "feedback", "outcome")

SCHEMA: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "properties": {
            "rationale": {"type": "string", "minLength": 1, "maxLength": LONGEST_RATIONALE},
            **{name: {"type": "boolean"} for name in FEATURES},
            "score": {"type": "integer", "enum": list(range(LOWEST, HIGHEST + 1))},
        },
        "required": ["rationale", *FEATURES, "score"],
        "additionalProperties": False,
    }
)


class Judgement(NamedTuple):
    """What the model said of a step; `score` in [-1, 1]."""

    score: float
    rationale: str
    parts: Mapping[str, float]


class LlmJudge:
    """One question a leaf step to a chat model, answered by a JSON verdict: rationale, four features, a score, 1 to 5.

    The score is moved to [-1, 1]: (score - 3) / 2. The four features (did the step ask for something specific, ignore
    feedback, repeat, keep coherence) are `parts`, 0.0 or 1.0. A question that gets no usable answer within its
    deadline leaves its step unscored, with the reason. All steps of a trajectory, and with `score_many` those of many
    trajectories, are asked about at once, `endpoint.concurrency` at a time.
    """

    name: ClassVar[str] = "llm_judge"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        endpoint: Endpoint = field(default_factory=Endpoint)
        """Who is asked, and how long and how often."""
        prompt: str = "judge/step"
        """Prompt of prompts/ with the fields history, after, reply, number and step."""
        hindsight: Literal["none", "feedback", "outcome"] = "feedback"
        """What the judge sees of the time after the reply: nothing, what was answered to it, or the whole rest and how
        the dialogue ended. With `outcome` a score leans on the ending: to explain, not beside an outcome reward."""
        history_chars: int = 12_000
        """Most characters of the dialogue before the reply; older messages are left out, and the judge is told."""

        def __post_init__(self) -> None:
            check_choices(self, hindsight=HINDSIGHT)
            check_least(self, history_chars=1)

    def __init__(self, config: Config, *, chat_model: ChatModel | None = None) -> None:
        """`chat_model` answers instead of an HTTP endpoint; one whose url is `engine` needs it.

        Raises ConfigError for a prompt with other fields and for a key variable that is not set.
        """
        self.config = config
        self._prompt = prompts.load(config.prompt, fields=FIELDS)
        self._model = chat_model_of(config.endpoint, chat_model)
        settings = {
            "endpoint": config.endpoint.identity(),
            "hindsight": config.hindsight,
            "history_chars": config.history_chars,
            "prompt": self._prompt.digest,
            "schema": dict(SCHEMA),
        }
        self._version = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def version(self) -> str:
        """Changes when the prompt, the model's name or a setting does that can change an answer."""
        return self._version

    @property
    def usage(self) -> Usage:
        """What the questions have cost so far."""
        return self._model.usage

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """A word on every leaf step, each score in [-1, 1]."""
        return self.score_many([(trajectory, steps)])[0]

    def score_many(self, trajectories: Sequence[tuple[Trajectory, Sequence[Step]]]) -> list[tuple[ScoredStep, ...]]:
        """The same for many trajectories, whose questions are all in flight together."""
        asked = [list(self._questions(trajectory, leaf_steps(steps))) for trajectory, steps in trajectories]
        answers = iter(self._model.ask([question for one in asked for _, question in one]))
        return [tuple(self._word(step, next(answers)) for step, _ in one) for one in asked]

    def _questions(self, trajectory: Trajectory, leaves: Sequence[Step]) -> Iterator[tuple[Step, Question]]:
        messages: list[Message] = []
        read = partial(read_judgement, prompt=self._prompt.text)
        for place, turn in enumerate(trajectory.turns):
            messages += turn.context
            own = [step for step in leaves if step.turn == turn.index]
            history, after = self._history(messages), self._after(trajectory, place)
            reply = _json([{"step": number, "text": step.text} for number, step in enumerate(own, start=1)])
            for number, step in enumerate(own, start=1):
                text = self._prompt.render(
                    history=history, after=after, reply=reply, number=str(number), step=_json(step.text)
                )
                asked = (Message(role="user", content=text),)
                yield step, Question(name="verdict", messages=asked, schema=SCHEMA, read=read)
            messages.append(Message(role="assistant", content=turn.text))

    def _history(self, messages: Sequence[Message]) -> str:
        """The messages as JSON, the newest that fit."""
        lines: list[str] = []
        room = self.config.history_chars
        for message in reversed(messages):
            line = _json({"role": message.role, "text": message.content})
            if len(line) > room and lines:
                break
            room -= len(line)
            lines.append(line)
        if left_out := len(messages) - len(lines):
            lines.append(_json({"left_out": f"{left_out} older messages"}))
        return "\n".join(reversed(lines)) or "(nothing)"

    def _after(self, trajectory: Trajectory, place: int) -> str:
        if self.config.hindsight == "none":
            return "(not shown)"
        later = trajectory.turns[place + 1 :]
        shown = _told(later[:1]) if self.config.hindsight == "feedback" else _told(later, replies=True)
        if self.config.hindsight == "outcome":
            shown.append(_json({"ended": trajectory.termination, "outcome": trajectory.outcome}))
        elif not later:
            shown.append("(nothing: it was the last reply)")
        return "\n".join(shown)

    def _word(self, step: Step, answer: Answer) -> ScoredStep:
        verdict: Judgement | None = answer.value
        return ScoredStep(
            turn=step.turn,
            step=step.index,
            evaluator=self.name,
            version=self._version,
            score=None if verdict is None else verdict.score,
            reason=answer.reason,
            rationale="" if verdict is None else verdict.rationale,
            parts={} if verdict is None else verdict.parts,
        )


def read_judgement(answer: Mapping[str, Any], prompt: str = "") -> Judgement:
    """The verdict in an answer; raises ValueError that names what is missing or out of range.

    A rationale that stands word for word in the prompt is none: small models hand the instruction back.
    """
    if missing := [name for name in ("rationale", *FEATURES, "score") if name not in answer]:
        raise ValueError(f"{missing[0]!r} is missing")
    rationale, score = answer["rationale"], answer["score"]
    if not isinstance(rationale, str) or not rationale.strip():
        raise ValueError(f"rationale {rationale!r} is not a text")
    if prompt and " ".join(rationale.split()).strip(".") in " ".join(prompt.split()):
        raise ValueError(f"rationale {rationale[:60]!r} is copied from the instructions")
    if unclear := [name for name in FEATURES if not isinstance(answer[name], bool)]:
        raise ValueError(f"{unclear[0]} {answer[unclear[0]]!r} is not true or false")
    if isinstance(score, bool) or not isinstance(score, int) or not LOWEST <= score <= HIGHEST:
        raise ValueError(f"score {score!r} is not a whole number from {LOWEST} to {HIGHEST}")
    middle = (LOWEST + HIGHEST) / 2
    return Judgement(
        score=(score - middle) / (HIGHEST - middle),
        rationale=" ".join(rationale.split())[:LONGEST_RATIONALE],
        parts={name: float(answer[name]) for name in FEATURES},
    )


def _told(turns: Sequence[Turn], *, replies: bool = False) -> list[str]:
    """What was said before each of these turns, and with `replies` the turns themselves, as JSON lines."""
    lines = []
    for turn in turns:
        lines += [_json({"role": message.role, "text": message.content}) for message in turn.context]
        if replies:
            lines.append(_json({"role": "assistant", "text": turn.text}))
    return lines


def _json(value: Any) -> str:
    return whole_characters(json.dumps(value, ensure_ascii=False))
