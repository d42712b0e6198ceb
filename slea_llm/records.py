"""Trajectories and scored trajectories as JSON values, and back to equal records.

Field names are those of `slea_llm.types`; spans are `[start, end]`, token spans `[row, start, end]`, masks 0 and 1. The
free values of a record (task, provenance, states) must be JSON values: text keys, lists and no tuples. Decoding raises
KeyError, TypeError or ValueError for a missing key, an unknown key or a wrong value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slea_llm.types import (
    Message,
    ScoredStep,
    ScoredTrajectory,
    Span,
    Step,
    TokenSpan,
    TokenTrace,
    ToolCall,
    Trajectory,
    Turn,
)

Json = dict[str, Any]


def encode_message(message: Message) -> Json:
    """Fields that are at their default are left out: most messages are a role and a text."""
    value: Json = {"role": message.role, "content": message.content}
    if message.tool_calls:
        value["tool_calls"] = _encode_calls(message.tool_calls)
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        value["name"] = message.name
    return value


def decode_message(value: Mapping[str, Any]) -> Message:
    return Message(**{**value, "tool_calls": _decode_calls(value)})


def _encode_calls(calls: Sequence[ToolCall]) -> list[Json]:
    return [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]


def _decode_calls(value: Mapping[str, Any]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(**call) for call in value.get("tool_calls", ()))


def _encode_tokens(span: TokenSpan | None) -> list[int] | None:
    return None if span is None else [span.row, span.start, span.end]


def _decode_tokens(value: list[int] | None) -> TokenSpan | None:
    return None if value is None else TokenSpan(*value)


def _encode_turn(turn: Turn) -> Json:
    value: Json = {
        "index": turn.index,
        "context": [encode_message(message) for message in turn.context],
        "text": turn.text,
        "span": _encode_tokens(turn.span),
        "finish_reason": turn.finish_reason,
        "reward": turn.reward,
        "state_before": turn.state_before,
        "state_after": turn.state_after,
    }
    if turn.tool_calls:
        value["tool_calls"] = _encode_calls(turn.tool_calls)
    return value


def _decode_turn(value: Mapping[str, Any]) -> Turn:
    decoded = {
        "context": tuple(decode_message(message) for message in value["context"]),
        "span": _decode_tokens(value["span"]),
        "reward": float(value["reward"]),
        "tool_calls": _decode_calls(value),
    }
    return Turn(**{**value, **decoded})


def _encode_trace(trace: TokenTrace) -> Json:
    return {
        "token_ids": trace.token_ids,
        "sampled_mask": [int(sampled) for sampled in trace.sampled_mask],
        "logprobs": trace.logprobs,
    }


def _decode_trace(value: Mapping[str, Any]) -> TokenTrace:
    decoded = {
        "token_ids": tuple(map(int, value["token_ids"])),
        "sampled_mask": tuple(map(bool, value["sampled_mask"])),
        "logprobs": tuple(map(float, value["logprobs"])),
    }
    return TokenTrace(**{**value, **decoded})


def encode_trajectory(trajectory: Trajectory) -> Json:
    value: Json = {
        "id": trajectory.id,
        "task": trajectory.task,
        "environment": trajectory.environment,
        "seed": trajectory.seed,
        "policy_version": trajectory.policy_version,
        "outcome": trajectory.outcome,
        "termination": trajectory.termination,
        "error": trajectory.error,
        "provenance": trajectory.provenance,
        "turns": [_encode_turn(turn) for turn in trajectory.turns],
        "traces": [_encode_trace(trace) for trace in trajectory.traces],
    }
    if trajectory.closing:
        value["closing"] = [encode_message(message) for message in trajectory.closing]
    return value


def decode_trajectory(value: Mapping[str, Any]) -> Trajectory:
    decoded = {
        "turns": tuple(_decode_turn(turn) for turn in value["turns"]),
        "traces": tuple(_decode_trace(trace) for trace in value["traces"]),
        "closing": tuple(decode_message(message) for message in value.get("closing", ())),
    }
    return Trajectory(**{**value, **decoded})


def _encode_step(step: Step) -> Json:
    """The trajectory id is left out: it is the one of the trajectory beside the steps."""
    return {
        "turn": step.turn,
        "index": step.index,
        "kind": step.kind,
        "text": step.text,
        "span": [step.span.start, step.span.end],
        "tokens": _encode_tokens(step.tokens),
        "parent": step.parent,
        "label": step.label,
    }


def _decode_step(value: Mapping[str, Any], trajectory_id: str) -> Step:
    decoded = {"span": Span(*value["span"]), "tokens": _decode_tokens(value["tokens"])}
    return Step(**{**value, **decoded, "trajectory_id": trajectory_id})


def _encode_score(score: ScoredStep) -> Json:
    return {
        "turn": score.turn,
        "step": score.step,
        "evaluator": score.evaluator,
        "version": score.version,
        "score": score.score,
        "reason": score.reason,
        "parts": score.parts,
        "rationale": score.rationale,
    }


def _decode_score(value: Mapping[str, Any]) -> ScoredStep:
    return ScoredStep(**{**value, "parts": {name: float(part) for name, part in value["parts"].items()}})


def encode_scored(scored: ScoredTrajectory) -> Json:
    """Raises ValueError when a step is of another trajectory."""
    strangers = {step.trajectory_id for step in scored.steps} - {scored.trajectory.id}
    if strangers:
        raise ValueError(f"steps of {sorted(strangers)} under trajectory {scored.trajectory.id!r}")
    value: Json = {
        "trajectory": encode_trajectory(scored.trajectory),
        "steps": [_encode_step(step) for step in scored.steps],
        "scores": [_encode_score(score) for score in scored.scores],
        "parser": scored.parser,
        "evaluator_versions": scored.evaluator_versions,
    }
    if scored.shut:
        value["shut"] = list(scored.shut)
    return value


def decode_scored(value: Mapping[str, Any]) -> ScoredTrajectory:
    trajectory = decode_trajectory(value["trajectory"])
    decoded = {
        "trajectory": trajectory,
        "steps": tuple(_decode_step(step, trajectory.id) for step in value["steps"]),
        "scores": tuple(_decode_score(score) for score in value["scores"]),
        "shut": tuple(value.get("shut", ())),
    }
    return ScoredTrajectory(**{**value, **decoded})
