"""Trajectories as OpenAI chat rows, with scores and weights on the replies, for those who filter or fine-tune."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from slea_llm.errors import ConfigError, nearest
from slea_llm.logs.transcript import call_text
from slea_llm.types import Message, ScoredStep, ScoredTrajectory, ToolCall, Turn

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """A reply weighs 1 when the mean score of its steps by `evaluator` is at least `threshold`, else 0.

    A reply that has no score weighs 0: it is not known to be good.
    """

    evaluator: str
    threshold: float = 0.0

    def check(self, scored: ScoredTrajectory) -> None:
        """Raises ConfigError when this evaluator has not scored the trajectory."""
        known = sorted({word.evaluator for word in scored.scores})
        if self.evaluator not in known:
            raise ConfigError(
                f"evaluator {self.evaluator!r} has not scored trajectory {scored.trajectory.id!r}; "
                f"{', '.join(known) or 'nothing'} has{nearest(self.evaluator, known)}"
            )


def openai_row(scored: ScoredTrajectory, weighting: Weighting | None = None, *, plain: bool = False) -> Json:
    """One row: `{id, messages, outcome, termination, success, task}`; with `plain` its messages alone, as OpenAI's API
    takes it.

    Raises ConfigError when the evaluator that gives weights has not scored the trajectory.
    """
    if weighting is not None and scored.trajectory.turns:
        weighting.check(scored)
    trajectory = scored.trajectory
    messages = list(messages_of(scored, weighting, plain=plain))
    if plain:
        return {"messages": messages}
    row = {
        "id": trajectory.id,
        "messages": messages,
        "outcome": trajectory.outcome,
        "termination": trajectory.termination,
        "success": None if trajectory.termination in ("error", "unknown") else trajectory.success,
        "error": trajectory.error,
        "task": dict(trajectory.task),
    }
    return {key: value for key, value in row.items() if value not in (None, {})}


def messages_of(scored: ScoredTrajectory, weighting: Weighting | None, *, plain: bool) -> Iterator[Json]:
    """The messages in order. A reply has `weight`, and unless `plain` a list `scores` with a word on each step."""
    words: dict[int, list[ScoredStep]] = {}
    for word in scored.scores:
        words.setdefault(word.turn, []).append(word)
    for turn in scored.trajectory.turns:
        yield from (_given(message, weighting) for message in turn.context)
        reply = _reply(turn)
        own = words.get(turn.index, [])
        if weighting is not None:
            reply["weight"] = weight_of(own, weighting)
        if own and not plain:
            reply["scores"] = [_word(word) for word in own]
        yield reply
    yield from (_given(message, weighting) for message in scored.trajectory.closing)


def mean_score(words: list[ScoredStep], evaluator: str) -> float | None:
    """Mean score of one reply's steps by one evaluator; None when it scored none of them."""
    scores = [word.score for word in words if word.evaluator == evaluator and word.score is not None]
    return fmean(scores) if scores else None


def weight_of(words: list[ScoredStep], weighting: Weighting) -> int:
    """1 or 0 for a reply with these scores."""
    mean = mean_score(words, weighting.evaluator)
    return int(mean is not None and mean >= weighting.threshold)


def _word(word: ScoredStep) -> Json:
    return {
        "step": word.step,
        "evaluator": word.evaluator,
        "version": word.version,
        "score": word.score,
        **({"reason": word.reason} if word.reason is not None else {}),
        **({"rationale": word.rationale} if word.rationale else {}),
    }


def _given(message: Message, weighting: Weighting | None) -> Json:
    """A message that the agent was given; a reply among them (a demonstration, a copy) weighs 0."""
    value: Json = {"role": message.role, "content": message.content}
    if message.role == "assistant" and weighting is not None:
        value["weight"] = 0
    if message.tool_calls:
        value["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        value["name"] = message.name
    return value


def _reply(turn: Turn) -> Json:
    """Content and calls apart where the calls end the text, as they do in most logs; else the text as it is."""
    content, calls = split_calls(turn)
    value: Json = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        value["tool_calls"] = [_call(call) for call in calls]
    return value


def split_calls(turn: Turn) -> tuple[str, tuple[ToolCall, ...]]:
    """The text of a reply before its structured calls, and these; no calls when other text stands between or after."""
    if not turn.tool_calls:
        return turn.text, ()
    ending = "\n".join(call_text(call) for call in turn.tool_calls)
    if turn.text == ending:
        return "", turn.tool_calls
    if turn.text.endswith(f"\n{ending}"):
        return turn.text[: -len(ending) - 1], turn.tool_calls
    return turn.text, ()


def _call(call: ToolCall) -> Mapping[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
