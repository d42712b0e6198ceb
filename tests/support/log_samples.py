"""Small records of every log format, made up in the form of the real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slea_llm.records import encode_trajectory
from slea_llm.types import Message, Trajectory, Turn

CALL = {"id": "c1", "type": "function", "function": {"name": "find_order", "arguments": '{"order": "W1"}'}}
CHAT = [
    {"role": "system", "content": "You serve a shop."},
    {"role": "user", "content": [{"type": "text", "text": "Where is W1?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "find_order", "content": "on its way"},
    {"role": "assistant", "content": "It is on its way.", "reasoning_content": "The tool knows."},
]
GOLD = [{"name": "cancel_order", "kwargs": {"order": "W1"}}]
REACT = """Question: Which is longer, the Rhine or the Elbe?
Thought 1: I need both lengths.
Action 1: Search[Rhine]
Observation 1: The Rhine is 1,233 km long.
Thought 2: The Rhine is longer.
Action 2: Finish[Rhine]
Observation 2: Answer is CORRECT
Correct answer: the Rhine"""
ALFWORLD = (
    "You are in a room.\nYour task is to: put a cup on the desk.\n> think: Find a cup.\nOK.\n> take cup 1\nTaken."
)
REFLEXION = f"""########
BEGIN TRIAL 1
Trial summary: Correct: 1, Incorrect: 1, Halted: 1
########
------------- BEGIN CORRECT AGENTS -------------

{REACT}

------------- BEGIN INCORRECT AGENTS -----------

Question: Who wrote Emma?
Thought 1: I guess.
Action 1: Finish[Dickens]
Observation 1: Answer is INCORRECT
Correct answer: Jane Austen

------------- BEGIN HALTED AGENTS -----------

Question: Who?
Thought 1: I look.
Action 1: Search[who]
Observation 1: nothing
Correct answer: nobody
"""


def own() -> dict[str, Any]:
    turn = Turn(index=0, context=(Message(role="user", content="hi"),), text="<think>Greet.</think>hello", reward=1.0)
    return encode_trajectory(
        Trajectory(
            id="own/1",
            task={"id": "t"},
            environment="order_taking",
            seed=7,
            policy_version=3,
            turns=(turn,),
            traces=(),
            outcome=1.0,
            termination="success",
        )
    )


def tau_bench(reward: Any = 1.0, **more: Any) -> dict[str, Any]:
    info = {
        "task": {"user_id": "u1", "instruction": "Cancel W1.", "actions": GOLD, "outputs": []},
        "source": "user",
        "user_cost": 0.01,
        "reward_info": {"reward": reward, "info": {"r_actions": reward}, "actions": GOLD},
    }
    messages = [*CHAT, {"role": "user", "content": "Thanks. ###STOP###"}]
    return {"task_id": 4, "trial": 2, "reward": reward, "info": info, "traj": messages, **more}


def tau2_row(**more: Any) -> dict[str, Any]:
    messages = [
        {"role": "assistant", "content": "Hi, how can I help?", "tool_calls": None},
        {"role": "user", "content": "My phone is offline.", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "name": "reboot", "arguments": {"n": 1}}]},
        {"role": "tool", "id": "a", "content": "done", "requestor": "assistant", "error": False},
        {"role": "user", "content": None, "tool_calls": [{"id": "b", "name": "look", "arguments": {}}]},
        {"role": "tool", "tool_messages": [{"role": "tool", "id": "b", "content": "on", "requestor": "user"}]},
        {"role": "assistant", "content": "It works."},
    ]
    return {
        "id": "s1",
        "task_id": "t9",
        "trial": 0,
        "termination_reason": "user_stop",
        "reward_info": {"reward": 1.0, "db_check": {"db_match": True}, "action_checks": [{"action_match": True}]},
        "messages": messages,
        **more,
    }


def tau2_bench() -> dict[str, Any]:
    task = {"id": "t9", "user_scenario": {"persona": "calm"}, "evaluation_criteria": {"actions": [{"name": "reboot"}]}}
    info = {"environment_info": {"domain_name": "telecom"}}
    return {"timestamp": "2026", "info": info, "tasks": [task], "simulations": [tau2_row()]}


def nemo_gym(reward: Any = -2.0000000000000004) -> dict[str, Any]:
    output = [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Push the box."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Up", "annotations": []}],
        },
        [{"type": "function_call", "call_id": "k1", "name": "move", "arguments": '{"to": "up"}'}],
        {"type": "function_call_output", "call_id": "k1", "output": "moved"},
        {"type": "message", "role": "assistant", "content": []},
    ]
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Solve it."}], "instructions": "Play."},
        "response": {"id": "resp_1", "object": "response", "model": "m", "output": output},
        "reward": reward,
        "truncated": False,
        "info": {"success": False},
        "_ng_task_index": 3,
        "_ng_rollout_index": 1,
    }


def swe_agent() -> dict[str, Any]:
    return {
        "environment": "swe_main",
        "trajectory": [
            {"action": "ls", "observation": "a.py", "response": "Look.\n```\nls\n```", "state": '{"open_file": "n/a"}'}
        ],
        "history": [
            {"role": "system", "content": "SETTING", "agent": "primary", "message_type": "system_prompt"},
            {"role": "assistant", "content": "demo", "agent": "primary", "is_demo": True},
            {"role": "user", "content": "Fix it.", "agent": "primary", "message_type": "observation"},
            {
                "role": "assistant",
                "content": "Look.\n```\nls\n```",
                "thought": "Look.",
                "action": "ls",
                "agent": "primary",
            },
            {"role": "user", "content": "a.py", "agent": "primary", "message_type": "observation"},
        ],
        "info": {"exit_status": "submitted", "submission": "diff"},
    }


def openhands() -> list[dict[str, Any]]:
    call = {"id": "t1", "type": "function", "function": {"name": "execute_bash", "arguments": '{"command": "ls"}'}}
    metadata = {
        "function_name": "execute_bash",
        "tool_call_id": "t1",
        "total_calls_in_response": 1,
        "model_response": {"id": "m1", "choices": [{"message": {"role": "assistant", "tool_calls": [call]}}]},
    }
    return [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "List the files."}},
        {"id": 1, "source": "agent", "action": "change_agent_state", "args": {"agent_state": "running"}},
        {
            "id": 2,
            "source": "agent",
            "action": "run",
            "args": {"command": "ls", "thought": "I list them."},
            "tool_call_metadata": metadata,
        },
        {
            "id": 3,
            "source": "agent",
            "observation": "run",
            "content": "a.py",
            "cause": 2,
            "tool_call_metadata": metadata,
        },
        {"id": 4, "source": "agent", "action": "finish", "args": {"thought": "There is a.py.", "outputs": {}}},
    ]


def openhands_row() -> dict[str, Any]:
    history = [
        [{"action": "message", "content": "Fix it."}, {"observation": "null", "content": ""}],
        [{"action": "run", "command": "ls", "thought": "I look."}, {"observation": "run", "content": "a.py"}],
        [{"action": "finish", "thought": "Done.", "outputs": {}}],
    ]
    return {"instance_id": "repo-1", "history": history, "test_result": {"report": {"resolved": True}}, "error": None}


def inspect_sample(value: Any = "C") -> dict[str, Any]:
    return {
        "id": 1,
        "epoch": 1,
        "input": "attachment://f00",
        "target": "yes",
        "messages": [
            {"role": "user", "content": "attachment://f00", "source": "input"},
            {
                "role": "assistant",
                "content": [{"type": "reasoning", "reasoning": "Easy."}, {"type": "text", "text": "yes"}],
                "tool_calls": [{"id": "i1", "function": "note", "arguments": {"a": 1}, "type": "function"}],
            },
            {"role": "tool", "content": "noted", "tool_call_id": "i1", "function": "note"},
        ],
        "scores": {"match": {"value": value, "answer": "yes", "explanation": "the same"}},
        "attachments": {"f00": "Is it so?"},
        "metadata": {"part": 1},
    }


def inspect_log() -> dict[str, Any]:
    header = {"task": "popularity", "model": "openai/m", "task_id": "x"}
    return {"version": 2, "status": "success", "eval": header, "samples": [inspect_sample(), inspect_sample(0.25)]}


def atif() -> dict[str, Any]:
    call = {"tool_call_id": "c", "function_name": "bash", "arguments": {"keystrokes": "ls\n"}}
    return {
        "schema_version": "ATIF-v1.6",
        "session_id": "session-1",
        "agent": {"name": "terminus-2", "version": "2.0.0", "model_name": "openai/m"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "List."},
            {"step_id": 2, "source": "agent", "message": "Earlier.", "is_copied_context": True},
            {
                "step_id": 3,
                "source": "agent",
                "message": "I list.",
                "reasoning_content": "ls does it.",
                "tool_calls": [call],
                "observation": {"results": [{"source_call_id": "c", "content": "a.py"}]},
            },
        ],
        "final_metrics": {"total_cost_usd": 0.1},
    }


def toolbench() -> dict[str, Any]:
    def node(kind: str, text: str, *children: Any, **more: Any) -> dict[str, Any]:
        return {"node_type": kind, "description": text, "children": list(children), **more}

    end = node("Action", "Finish", node("Action Input", '{"return_type": "give_answer"}', is_terminal=True))
    failed = node("Action Input", '{"id": 1}', observation="no such id", pruned=True)
    good = node("Action Input", '{"id": 2}', end, observation='{"state": "sent"}')
    root = node(
        "Action Input", "", node("Action", "track", failed), node("Thought", "Try 2.", node("Action", "track", good))
    )
    opening = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "Where is it?"}]
    answer = {
        "query": "Where is it?",
        "train_messages": [opening],
        "finish_type": "give_answer",
        "final_answer": "sent",
    }
    return {"win": True, "tree": {"size": 6, "tree": root}, "answer_generation": answer}


def otel_genai() -> dict[str, Any]:
    user = {"role": "user", "parts": [{"type": "text", "content": "Weather in Bern?"}]}
    call = {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "w", "name": "weather", "arguments": {"at": "Bern"}}],
    }
    result = {"role": "tool", "parts": [{"type": "tool_call_response", "id": "w", "response": "sunny"}]}
    end = {
        "role": "assistant",
        "parts": [{"type": "reasoning", "content": "Nice."}, {"type": "text", "content": "Sunny."}],
    }

    def span(given: list[Any], answer: list[Any], start: str) -> dict[str, Any]:
        attributes = [
            {"key": "gen_ai.request.model", "value": {"stringValue": "m"}},
            {"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(given)}},
            {"key": "gen_ai.output.messages", "value": {"stringValue": json.dumps(answer)}},
        ]
        return {"traceId": "aa", "name": "chat m", "startTimeUnixNano": start, "attributes": attributes}

    spans = [span([user, call, result], [end], "20"), span([user], [call], "10")]
    return {"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}


def sharegpt() -> dict[str, Any]:
    pairs = [
        ("human", "q"),
        ("function_call", '{"name": "f", "arguments": {"n": 1}}'),
        ("observation", "o1"),
        ("function_call", '[{"name": "f", "arguments": {"n": 2}}]'),
        ("observation", "o2"),
        ("human", "and?"),
        ("human", "hello?"),
        ("gpt", "a"),
    ]
    return {"conversations": [{"from": role, "value": text} for role, text in pairs], "tools": "[]"}


def sharegpt_blocks() -> dict[str, Any]:
    reply = [
        {"type": "reasoning", "value": "I need f."},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"n": 1}}'},
    ]
    return {
        "messages": [
            {"role": "user", "content": [{"type": "text", "value": "go"}]},
            {"role": "assistant", "content": reply},
        ]
    }


def anthropic() -> dict[str, Any]:
    reply = [
        {"type": "thinking", "thinking": "I need the tool.", "signature": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "u1", "name": "look", "input": {"at": "W1"}},
    ]
    result = [{"type": "tool_result", "tool_use_id": "u1", "content": [{"type": "text", "text": "sent"}]}]
    return {
        "model": "m",
        "system": [{"type": "text", "text": "Be kind."}],
        "messages": [
            {"role": "user", "content": "Where is W1?"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": [*result, {"type": "text", "text": "well?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Sent."}]},
        ],
    }


def anthropic_response() -> dict[str, Any]:
    return {"id": "msg_1", "type": "message", "role": "assistant", "content": [{"type": "text", "text": "Hi"}]}


def openai_chat() -> dict[str, Any]:
    return {"id": "e1", "messages": CHAT, "reward": 0.5}


def samples() -> Mapping[str, list[Any]]:
    """Format -> records of it, as JSON values; those of `reflexion` are whole texts."""
    return {
        "slea": [own()],
        "tau_bench": [tau_bench()],
        "tau2_bench": [tau2_bench(), tau2_row()],
        "nemo_gym": [nemo_gym()],
        "swe_agent": [swe_agent(), {"trajectory": swe_agent()["trajectory"]}],
        "openhands": [openhands(), openhands_row()],
        "inspect": [inspect_log(), inspect_sample()],
        "atif": [atif()],
        "toolbench": [toolbench()],
        "otel_genai": [otel_genai()],
        "sharegpt": [sharegpt(), sharegpt_blocks()],
        "anthropic": [anthropic(), anthropic_response()],
        "reflexion": [REFLEXION],
        "react": [{"react_put_0": ALFWORLD, "act_1": ALFWORLD}, {"id": "r", "text": REACT}],
        "openai_chat": [
            openai_chat(),
            CHAT,
            {"request": {"messages": CHAT[:2]}, "response": {"choices": [{"message": CHAT[2]}]}},
        ],
    }
