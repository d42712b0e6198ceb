"""What a grader leaves in a log: gold actions, checks and answers. It is named, kept apart, and never the agent's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slea_llm.logs.chat import add_message
from slea_llm.logs.fields import mapping, name_text, optional_list, optional_mapping
from slea_llm.logs.transcript import Transcript

GRADER_KEYS = frozenset(
    {
        "action_checks",
        "answer_key",
        "env_assertions",
        "evaluation_criteria",
        "expected_actions",
        "expected_calls",
        "gold",
        "gold_actions",
        "gold_answer",
        "ground_truth",
        "gt_data_hash",
        "nl_assertions",
        "reward_info",
        "test_result",
        "verifier_result",
    }
)
STOP = "###STOP###"
"""What the simulated users of tau-bench end a dialogue with."""
DEPTH = 4


def grader_places(value: Any, place: str = "", depth: int = DEPTH) -> Iterator[str]:
    """The dotted places within a record where a grader's word stands."""
    if not isinstance(value, Mapping) or depth == 0:
        return
    for key, item in value.items():
        here = f"{place}.{key}" if place else str(key)
        if key in GRADER_KEYS:
            if item not in (None, {}, []):
                yield here
        else:
            yield from grader_places(item, here, depth - 1)


def residue(value: Any, gold: Sequence[Any] = (), *, also: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    """What the provenance says under `grader`: places found in a record, `also` these, gold actions, and more."""
    found = {"places": [*grader_places(value), *also], "gold_actions": list(gold), **more}
    return {key: item for key, item in found.items() if item not in (None, {}, [], "")}


def split_replay(messages: Sequence[Any], gold: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The dialogue, and the gold actions that a grader replayed into its log after the user had ended it."""
    names = {name_text(optional_mapping(action).get("name")) for action in gold} - {""}
    for index, message in enumerate(messages):
        one = optional_mapping(message)
        content = one.get("content")
        if one.get("role") == "user" and isinstance(content, str) and STOP in content:
            after = messages[index + 1 :]
            called = [call for later in after for call in _called(later)]
            if called and all(name in names for name in called):
                return messages[: index + 1], after
    return messages, ()


def _called(message: Any) -> list[str]:
    calls = optional_list(optional_mapping(message).get("tool_calls"))
    return [name_text(optional_mapping(optional_mapping(call).get("function", call)).get("name")) for call in calls]


def add_replay(transcript: Transcript, replay: Sequence[Any]) -> None:
    """Keep a replay after the dialogue, as messages of the grader and not as replies."""
    for index, message in enumerate(replay):
        what = f"replayed[{index}]"
        one = dict(mapping(message, what))
        role = "system" if one.get("role") == "assistant" else one.get("role")
        add_message(transcript, {**one, "role": role, "name": "grader"}, what)
