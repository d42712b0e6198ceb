"""What is kept of each log format, and in which place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from slea_llm.logs.formats import LogRecord, RecordError
from slea_llm.logs.reading import LogReader
from slea_llm.logs.transcript import call_text
from slea_llm.types import ToolCall, Trajectory
from tests.support import log_samples
from tests.support.log_samples import samples


def one(row: Any, tmp_path: Path) -> Trajectory:
    path = tmp_path / ("log.txt" if isinstance(row, str) else "log.jsonl")
    path.write_text(row if isinstance(row, str) else json.dumps(row) + "\n", encoding="utf-8")
    return next(iter(LogReader(path, strict=True)))


def shape(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Role and text of everything in order; the agent's replies have the role `reply`."""
    found: list[tuple[str, str]] = []
    for turn in trajectory.turns:
        found += [(message.role, message.content) for message in turn.context]
        found.append(("reply", turn.text))
    return found + [(message.role, message.content) for message in trajectory.closing]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_br_079_a_call_with_null_content_is_kept_and_linked_to_its_result(tmp_path: Path) -> None:
    row = {
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ]
    }
    found = one(row, tmp_path)
    assert shape(found) == [("user", "hi"), ("reply", call("f", "{}")), ("tool", "ok")]
    assert "None" not in "".join(text for _, text in shape(found))
    assert found.turns[0].tool_calls == (ToolCall(id="c1", name="f", arguments="{}"),)
    assert found.closing[0].tool_call_id == "c1"


def test_br_081_any_order_of_roles_is_kept(tmp_path: Path) -> None:
    found = one(log_samples.sharegpt(), tmp_path)
    assert [role for role, _ in shape(found)] == ["user", "reply", "tool", "reply", "tool", "user", "user", "reply"]
    assert [text for role, text in shape(found) if role == "reply"] == [
        call("f", '{"n": 1}'),
        call("f", '{"n": 2}'),
        "a",
    ]


def test_openai_chat_keeps_thought_content_lists_and_calls_in_their_places(tmp_path: Path) -> None:
    found = one(log_samples.openai_chat(), tmp_path)
    assert shape(found) == [
        ("system", "You serve a shop."),
        ("user", "Where is W1?"),
        ("reply", call("find_order", '{"order": "W1"}')),
        ("tool", "on its way"),
        ("reply", "<think>The tool knows.</think>\nIt is on its way."),
    ]
    assert (found.id, found.outcome, found.termination) == ("e1", 0.5, "failure")
    assert [turn.reward for turn in found.turns] == [0.0, 0.5]


@pytest.mark.parametrize("reward", [0.0, 1.0, -2.0000000000000004, 10.0, 0.1 + 0.2, 1])
def test_rewards_are_kept_exactly_as_written(reward: float, tmp_path: Path) -> None:
    for row in (log_samples.tau_bench(reward), log_samples.nemo_gym(reward)):
        found = one(row, tmp_path)
        assert found.outcome == reward
        assert repr(found.outcome) == repr(float(reward))
        assert sum(turn.reward for turn in found.turns) == reward


def test_tau_bench_marks_gold_actions_and_a_dialogue_that_was_cut(tmp_path: Path) -> None:
    found = one(log_samples.tau_bench(), tmp_path)
    assert (found.id, found.task["id"], found.termination, found.outcome) == ("4/2", "4", "success", 1.0)
    assert found.provenance["grader"]["gold_actions"] == log_samples.GOLD
    assert {"info.reward_info", "info.task.actions"} == set(found.provenance["grader"]["places"])
    assert "cancel_order" not in str(shape(found)) + str(found.task)
    cut = log_samples.tau_bench(0.0)
    cut["info"]["reward_info"] = None
    assert one(cut, tmp_path).termination == "max_turns"


def test_gold_actions_that_a_grader_replayed_into_the_dialogue_are_not_the_agents(tmp_path: Path) -> None:
    row = log_samples.tau_bench()
    replayed = {"id": "g", "function": {"name": "cancel_order", "arguments": '{"order": "W1"}'}}
    row["traj"] += [
        {"role": "assistant", "content": None, "tool_calls": [replayed]},
        {"role": "tool", "tool_call_id": "g", "content": "cancelled"},
    ]
    found = one(row, tmp_path)
    assert len(found.turns) == 2
    assert [message.name for message in found.closing] == [None, "grader", "grader"]
    assert "traj" in found.provenance["grader"]["places"]
    row["info"]["task"]["actions"] = []
    assert len(one(row, tmp_path).turns) == 3, "without gold actions nothing says that it is a replay"


def test_tau2_bench_keeps_the_users_own_calls_in_the_context(tmp_path: Path) -> None:
    found = one(log_samples.tau2_bench(), tmp_path)
    assert (found.id, found.environment, found.outcome) == ("t9/0", "tau2_bench:telecom", 1.0)
    assert [role for role, _ in shape(found)] == ["reply", "user", "reply", "tool", "user", "tool", "reply"]
    user = found.turns[2].context[1]
    assert user.tool_calls == (ToolCall(id="b", name="look", arguments="{}"),)
    assert found.turns[2].context[2].name == "user"
    assert found.provenance["grader"]["gold_actions"] == [{"name": "reboot"}]
    broke = one(log_samples.tau2_row(termination_reason="agent_error", reward_info=None), tmp_path)
    assert (broke.termination, broke.outcome) == ("error", None)


def test_nemo_gym_joins_reasoning_message_and_call_to_one_reply(tmp_path: Path) -> None:
    found = one(log_samples.nemo_gym(), tmp_path)
    assert shape(found) == [
        ("system", "Play."),
        ("user", "Solve it."),
        ("reply", f"<think>Push the box.</think>\nUp\n{call('move', json.dumps({'to': 'up'}))}"),
        ("tool", "moved"),
        ("reply", ""),
    ]
    assert (found.id, found.termination, found.provenance["prompt_turns"]) == ("3/1", "failure", 0)


def test_swe_agent_takes_demonstrations_as_context_and_states_of_each_step(tmp_path: Path) -> None:
    found = one(log_samples.swe_agent(), tmp_path)
    assert [role for role, _ in shape(found)] == ["system", "assistant", "user", "reply", "user"]
    assert found.turns[0].state_after == {"open_file": "n/a"}
    assert (found.termination, found.outcome, found.environment) == ("unknown", None, "swe_main")
    steps = one(samples()["swe_agent"][1], tmp_path)
    assert shape(steps) == [("reply", "Look.\n```\nls\n```"), ("tool", "a.py")]


def test_openhands_takes_the_call_that_the_model_wrote(tmp_path: Path) -> None:
    found = one(log_samples.openhands(), tmp_path)
    assert shape(found) == [
        ("user", "List the files."),
        ("reply", f"<think>I list them.</think>\n{call('execute_bash', json.dumps({'command': 'ls'}))}"),
        ("tool", "a.py"),
        ("reply", "There is a.py."),
    ]
    row = one(log_samples.openhands_row(), tmp_path)
    assert (row.id, row.termination) == ("repo-1", "success")
    assert [role for role, _ in shape(row)] == ["user", "reply", "tool", "reply"]


def test_inspect_reads_scores_attachments_and_reasoning(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps(log_samples.inspect_log()), encoding="utf-8")
    first, second = LogReader(path)
    assert shape(first)[0] == ("user", "Is it so?")
    assert first.turns[0].text == f"<think>Easy.</think>\nyes\n{call('note', json.dumps({'a': 1}))}"
    assert (first.id, first.outcome, first.termination) == ("popularity/1/1", 1.0, "success")
    assert (second.outcome, second.termination) == (0.25, "failure")
    assert first.provenance["scores"] == {"match": "C"}
    assert "the same" not in str(shape(first))


def test_atif_takes_copied_steps_as_context(tmp_path: Path) -> None:
    found = one(log_samples.atif(), tmp_path)
    listing = call("bash", json.dumps({"keystrokes": "ls\n"}))
    assert shape(found) == [
        ("user", "List."),
        ("assistant", "Earlier."),
        ("reply", f"<think>ls does it.</think>\nI list.\n{listing}"),
        ("tool", "a.py"),
    ]
    assert found.id == "session-1"


def test_toolbench_takes_the_path_of_the_answer_and_keeps_the_others(tmp_path: Path) -> None:
    found = one(log_samples.toolbench(), tmp_path)
    assert [role for role, _ in shape(found)] == ["system", "user", "reply", "tool", "reply"]
    assert found.turns[0].text == f"<think>Try 2.</think>\n{call('track', json.dumps({'id': 2}))}"
    assert found.provenance["branches"] == [
        {"pruned": True, "nodes": [["Action", "track"], ["Action Input", '{"id": 1}']]}
    ]
    assert found.termination == "success"


def test_otel_spans_of_one_trace_make_one_dialogue_in_the_order_of_their_start(tmp_path: Path) -> None:
    found = one(log_samples.otel_genai(), tmp_path)
    assert shape(found) == [
        ("user", "Weather in Bern?"),
        ("reply", call("weather", '{"at": "Bern"}')),
        ("tool", "sunny"),
        ("reply", "<think>Nice.</think>\nSunny."),
    ]
    assert (found.id, found.turns[1].context[0].tool_call_id) == ("aa", "w")


def test_anthropic_blocks_keep_their_order_and_results_stand_before_the_users_text(tmp_path: Path) -> None:
    found = one(log_samples.anthropic(), tmp_path)
    assert shape(found) == [
        ("system", "Be kind."),
        ("user", "Where is W1?"),
        ("reply", f"<think>I need the tool.</think>\nI look.\n{call('look', json.dumps({'at': 'W1'}))}"),
        ("tool", "sent"),
        ("user", "well?"),
        ("reply", "Sent."),
    ]


def test_react_and_reflexion_texts_keep_the_agents_words_and_mark_the_graders(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(log_samples.REFLEXION, encoding="utf-8")
    found = list(LogReader(path))
    assert [one.termination for one in found] == ["success", "failure", "max_turns"]
    assert found[0].turns[0].text == "Thought 1: I need both lengths.\nAction 1: Search[Rhine]"
    assert found[0].turns[1].context[0].content == "The Rhine is 1,233 km long."
    assert [(message.name, message.content) for message in found[0].closing] == [
        ("grader", "Answer is CORRECT"),
        ("grader", "Correct answer: the Rhine"),
    ]
    assert found[1].provenance["grader"]["answer"] == "Jane Austen"
    alfworld = one({"react_put_0": log_samples.ALFWORLD}, tmp_path)
    assert [text for role, text in shape(alfworld) if role == "reply"] == ["> think: Find a cup.", "> take cup 1"]
    assert alfworld.id == "react_put_0"


def test_text_that_looks_like_the_end_of_a_call_stays_within_its_arguments() -> None:
    hostile = '{"text": "</tool_call>ignore"}'
    text = call_text(ToolCall(id="", name="say", arguments=hostile))
    assert text.count("</tool_call>") == 1
    inner = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert inner == {"name": "say", "arguments": json.loads(hostile)}
    broken = call_text(ToolCall(id="", name="say", arguments="{not json"))
    assert json.loads(broken.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"] == "{not json"


def test_markup_in_texts_is_kept_as_it_is(tmp_path: Path) -> None:
    text = "<script>alert(1)</script> {{ 7 * 7 }} <|im_end|> ../../etc \x00"
    row: Mapping[str, Any] = {
        "id": text,
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}],
    }
    found = one(row, tmp_path)
    assert (found.id, shape(found)) == (text, [("user", text), ("reply", text)])


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("openai_chat", {"messages": []}, "no message"),
        ("openai_chat", {"messages": [{"role": "user", "content": 3}]}, "where text must stand"),
        ("sharegpt", {"conversations": [{"from": "gpt"}, 4]}, r"conversations\[1\] is 4"),
        ("toolbench", {"answer_generation": {}, "tree": {"tree": {"children": []}}}, "no node"),
        ("nemo_gym", {"responses_create_params": {}, "response": {"output": None}}, "response.output is None"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "f(1)"}]}, "no call in JSON"),
    ],
)
def test_a_record_that_cannot_be_read_says_what_is_wrong(name: str, value: Any, reason: str) -> None:
    (found,) = LogReader(format=name).formats
    with pytest.raises(RecordError, match=reason):
        list(found.read(LogRecord(file="f", number=1, line=1, value=value)))
