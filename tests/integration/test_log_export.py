"""Export of trajectories: chat rows with scores and weights, Hub datasets, our own logs; the command `slea convert`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slea_llm.cli import main
from slea_llm.errors import ConfigError, StorageError
from slea_llm.logs.hub_export import write_hub_dataset
from slea_llm.logs.openai_export import Weighting, openai_row, split_calls
from slea_llm.logs.reading import LogReader
from slea_llm.logs.transcript import reply_text
from slea_llm.scoring import Scorer
from slea_llm.storage import read_scored, write_scored
from slea_llm.types import ScoredStep, ScoredTrajectory, ToolCall, Trajectory, Turn
from tests.strategies import texts
from tests.support.components import build
from tests.support.log_samples import REFLEXION, openai_chat, samples


def trajectories(tmp_path: Path) -> list[Trajectory]:
    rows = [row for name, rows in samples().items() if name != "reflexion" for row in rows]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (tmp_path / "in.txt").write_text(REFLEXION, encoding="utf-8")
    return list(LogReader(tmp_path / "in.jsonl", tmp_path / "in.txt", strict=True))


def scored(trajectory: Trajectory, values: tuple[float | None, ...]) -> ScoredTrajectory:
    """The trajectory with one score (or none) a reply, by an evaluator named rules."""
    whole = Scorer(build("parser", "tagged"), []).score(trajectory)
    words = tuple(
        ScoredStep(
            turn=turn,
            step=next(step.index for step in whole.steps if step.turn == turn),
            evaluator="rules",
            version="1",
            score=value,
            reason="not known" if value is None else None,
            rationale="because",
        )
        for turn, value in enumerate(values)
    )
    return ScoredTrajectory(trajectory=trajectory, steps=whole.steps, scores=words, parser="tagged")


def chat_row(tmp_path: Path) -> Trajectory:
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(openai_chat()), encoding="utf-8")
    return next(iter(LogReader(path)))


def test_chat_rows_read_back_with_the_same_messages(tmp_path: Path) -> None:
    found = trajectories(tmp_path)
    path = tmp_path / "out.jsonl"
    rows = [openai_row(ScoredTrajectory(trajectory=one, steps=(), scores=(), parser="")) for one in found]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    again = list(LogReader(path, format="openai_chat", strict=True))
    for before, after in zip(found, again, strict=True):
        assert after.outcome == before.outcome
        assert after.success == before.success
        if before.termination != "error":
            assert (after.termination == "unknown") == (before.termination == "unknown")
        if not any(message.role == "assistant" for turn in before.turns for message in turn.context):
            assert [turn.text for turn in after.turns] == [turn.text for turn in before.turns]
            assert [turn.context for turn in after.turns] == [turn.context for turn in before.turns]
            assert after.closing == before.closing


def test_success_without_a_number_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    for success in (True, False):
        won = dataclasses.replace(chat_row(tmp_path), outcome=None, termination="success" if success else "failure")
        row = openai_row(ScoredTrajectory(trajectory=won, steps=(), scores=(), parser=""))
        path.write_text(json.dumps(row), encoding="utf-8")
        (again,) = LogReader(path)
        assert (again.outcome, again.termination) == (None, won.termination)


def test_a_reply_weighs_1_where_its_score_is_high_enough_and_0_where_it_is_not_known(tmp_path: Path) -> None:
    one = chat_row(tmp_path)
    replies = [
        message
        for message in openai_row(scored(one, (0.4, None)), Weighting(evaluator="rules", threshold=0.4))["messages"]
        if message["role"] == "assistant"
    ]
    assert [reply["weight"] for reply in replies] == [1, 0]
    assert replies[0]["scores"] == [
        {"step": 0, "evaluator": "rules", "version": "1", "score": 0.4, "rationale": "because"}
    ]
    assert replies[1]["scores"][0]["reason"] == "not known"
    assert replies[0]["content"] is None
    assert replies[0]["tool_calls"][0]["function"]["name"] == "find_order"
    plain = openai_row(scored(one, (0.3, 1.0)), Weighting(evaluator="rules", threshold=0.4), plain=True)
    assert plain.keys() == {"messages"}
    keys = {key for message in plain["messages"] for key in message}
    assert keys == {"role", "content", "tool_calls", "tool_call_id", "name", "weight"}
    with pytest.raises(ConfigError, match="did you mean 'rules'"):
        openai_row(scored(one, (1.0, 1.0)), Weighting(evaluator="rule"))


@given(
    text=texts(),
    calls=st.lists(
        st.builds(ToolCall, id=texts(3), name=texts(3), arguments=texts(6) | st.just('{"a": 1}')), max_size=3
    ),
)
def test_calls_at_the_end_of_a_reply_are_taken_off_and_leave_the_rest_as_it_was(
    text: str, calls: list[ToolCall]
) -> None:
    parts: list[Any] = [("text", text), *(("call", call) for call in calls)]
    turn = Turn(index=0, context=(), text=reply_text(parts), tool_calls=tuple(calls))
    assert split_calls(turn) == (text, tuple(calls))


def test_a_hub_dataset_holds_every_column_and_a_card_that_names_its_files(tmp_path: Path) -> None:
    found = trajectories(tmp_path)
    items = [scored(one, tuple(0.5 for _ in one.turns)) for one in found]
    count = write_hub_dataset(tmp_path / "hub", iter(items), Weighting(evaluator="rules"))
    table = pq.read_table(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    rows = table.to_pylist()
    assert count == len(rows) == len(found)
    assert [row["outcome"] for row in rows] == [one.outcome for one in found]
    assert [json.loads(row["task"]) for row in rows] == [one.task for one in found]
    assert [len([m for m in row["messages"] if m["turn"] is not None]) for row in rows] == [
        len(one.turns) for one in found
    ]
    assert {m["weight"] for row in rows for m in row["messages"] if m["turn"] is not None} == {1}
    assert rows[0]["steps"][0]["text"] == items[0].steps[0].text
    card = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")
    assert "path: data/train-*.parquet" in card
    assert f"{count} trajectories" in card
    with pytest.raises(StorageError, match="exists already"):
        write_hub_dataset(tmp_path / "hub", iter(items))


def test_convert_to_our_own_form_and_back_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trajectories(tmp_path)
    own, again = tmp_path / "own.jsonl", tmp_path / "again.jsonl"
    assert main(["convert", str(tmp_path / "in.jsonl"), "--to", "slea", "--output", str(own)]) == 0
    assert main(["convert", str(own), "--to", "slea", "--output", str(again)]) == 0
    assert own.read_bytes() == again.read_bytes()
    assert "written to" in capsys.readouterr().out
    assert main(["convert", str(own), "--to", "slea", "--output", str(again)]) == 2
    assert "exists already" in capsys.readouterr().err


def test_convert_keeps_the_scores_of_a_scored_log(tmp_path: Path) -> None:
    items = [scored(chat_row(tmp_path), (0.0, 1.0))]
    path = tmp_path / "scored.jsonl"
    write_scored(path, items)
    for target in ("slea", "openai_chat", "hub_dataset"):
        assert main(["convert", str(path), "--to", target, "--output", str(tmp_path / target)]) == 0
    assert list(read_scored(tmp_path / "slea")) == items
    row = json.loads((tmp_path / "openai_chat").read_text(encoding="utf-8"))
    assert [message["scores"][0]["score"] for message in row["messages"] if message["role"] == "assistant"] == [
        0.0,
        1.0,
    ]


def test_br_095_secrets_are_blanked_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_API_KEY", "open-sesame-42")
    row = {
        "messages": [
            {"role": "user", "content": "open-sesame-42 and hf_0000FAKE1234"},
            {"role": "assistant", "content": "ok"},
        ]
    }
    (tmp_path / "in.jsonl").write_text(json.dumps(row), encoding="utf-8")
    for target in ("slea", "openai_chat", "hub_dataset"):
        output = tmp_path / target
        assert main(["convert", str(tmp_path / "in.jsonl"), "--to", target, "--output", str(output), "--redact"]) == 0
        files = [output] if output.is_file() else [path for path in output.rglob("*") if path.is_file()]
        raw = b"".join(path.read_bytes() for path in files)
        assert b"open-sesame" not in raw
        assert b"hf_0000" not in raw
    write_scored(tmp_path / "scored.jsonl", [scored(chat_row(tmp_path), (1.0, 1.0))])
    arguments = ["convert", str(tmp_path / "scored.jsonl"), "--to", "slea", "--output", str(tmp_path / "x"), "--redact"]
    assert main(arguments) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"foo": 1}\n'])
@pytest.mark.parametrize("target", ["slea", "openai_chat", "hub_dataset"])
def test_converting_a_log_without_a_dialogue_is_an_error_and_writes_nothing(
    content: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd, output = tmp_path / "odd.jsonl", tmp_path / "output"
    odd.write_text(content)
    assert main(["convert", str(odd), "--to", target, "--output", str(output)]) == 2
    said = capsys.readouterr()
    assert "no dialogue could be read, so nothing was written" in said.err
    assert "not read: " in said.out
    assert not output.exists()
