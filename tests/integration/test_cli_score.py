"""`slea score`: sensible with a log alone, append-only, resumable, refusing with the reason what a log cannot give."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from slea_llm import score_runs
from slea_llm.cli import main
from slea_llm.cli.score import default_output
from slea_llm.errors import StorageError
from slea_llm.score_runs import CREDIT
from slea_llm.storage import ScoredLog, read_scored, write_trajectories
from tests.support.logged import booking, logged, scored


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    dialogues = [
        booking(f"d{task}.{trial}", success=trial % 2 == 0, task=f"t{task}", errors=trial)
        for task in range(5)
        for trial in range(4)
    ]
    write_trajectories(path, dialogues)
    return path


def test_a_log_alone_gives_scores_a_summary_and_what_to_do_next(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(log)]) == 0
    said = capsys.readouterr().out
    results = log.with_name("mine.scores")
    assert "success: 10/20 = 50.0 % (95 % 29.9 to 70.1)" in said
    assert "pass^1..4: 0.5000, 0.1667, 0.0000, 0.0000 over 5 tasks" in said
    assert "-0.40  x10" in said
    assert f"`slea report {results}` makes one HTML file of it" in said
    (run,) = score_runs.runs(results)
    assert [one.trajectory.id for one in run.read()][:2] == ["d0.0", "d0.1"]
    assert run.card.finished
    assert run.card.counts["evaluators"]["rules"]["unscored"] == 0
    credit = list(CREDIT.read(run.credit))
    assert len(credit) == 20
    assert all(one.why_not is None for one in credit)


@pytest.mark.parametrize("content", ["", "[]", "a,b,c\n", '{"foo": 1}\n'])
def test_a_log_without_a_dialogue_is_an_error_and_leaves_no_results(
    content: str, tmp_path: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_text(content)
    assert main(["score", str(odd)]) == 2
    assert "no dialogue could be read, so nothing was scored" in capsys.readouterr().err
    assert not odd.with_name("odd.scores").exists()
    results = log.with_name("mine.scores")
    assert main(["score", str(log)]) == 0
    assert main(["score", str(odd), "--output", str(results)]) == 2
    assert [run.number for run in score_runs.runs(results)] == [1]


def test_a_folder_of_logs_and_their_results_counts_every_dialogue_once(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(log)]) == 0
    (log.parent / "own").mkdir()
    (log.parent / "own" / "run-0007.json").write_text(json.dumps({"messages": [{"role": "user", "content": "Hi."}]}))
    capsys.readouterr()
    assert main(["convert", str(log.parent), "--to", "slea", "--output", str(log.parent / "all.jsonl")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("2 files, 21 records, 21 trajectories")
    assert "or results of scoring, passed over: " in said
    assert "mine.scores/run-0001.scores.jsonl" in said


def test_the_knowledge_that_comes_with_the_package_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(log), "--evaluator", "knowledge_base"]) == 0
    assert "note: knowledge_base knows taking orders alone" in capsys.readouterr().out
    support = "evaluators.knowledge_base.file=knowledge/support.yaml"
    assert main(["score", str(log), "--evaluator", "knowledge_base", "--set", support]) == 0
    assert "note: knowledge_base" not in capsys.readouterr().out


def test_knowledge_of_another_domain_is_told_with_the_mend(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = "evaluators.knowledge_base.file=knowledge/support.yaml"
    assert main(["score", str(log), "--evaluator", "knowledge_base", "--set", named]) == 0
    said = capsys.readouterr().out
    assert "note: knowledge/support.yaml is knowledge of tech_support, and these are dialogues of" in said
    trips = [dataclasses.replace(booking(f"d{n}", success=True), environment="trip_planning") for n in range(2)]
    write_trajectories(log.with_name("trips.jsonl"), trips)
    assert main(["score", str(log.with_name("trips.jsonl")), "--evaluator", "knowledge_base", "--set", named]) == 0
    assert "set knowledge_base's file to knowledge/trip_planning.yaml" in capsys.readouterr().out
    orders = [dataclasses.replace(booking(f"d{n}", success=True), environment="order_taking") for n in range(2)]
    write_trajectories(log.with_name("orders.jsonl"), orders)
    assert main(["score", str(log.with_name("orders.jsonl")), "--evaluator", "knowledge_base"]) == 0
    assert "is knowledge of" not in capsys.readouterr().out


def test_logs_that_have_the_names_of_cards_are_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    for number in (1, 2):
        write_trajectories(folder / f"run-{number:04d}.json", [booking(f"d{number}", success=True)])
    (folder / "run-0003.json").write_text('[{"messages": [{"role": "assistant", "content": "Hello."}]}]')
    (folder / "run-0004.json").mkdir()
    assert score_runs.runs(folder) == ()
    assert main(["score", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("3 files, 3 records, 3 trajectories")
    assert main(["score", str(folder / "run-0001.json")]) == 0
    results = folder / "run-0001.scores"
    (results / "run-0007.json").write_text("[]")
    assert main(["score", str(folder / "run-0001.json")]) == 0
    assert [run.number for run in score_runs.runs(results)] == [1, 8]


def test_a_card_begins_as_readers_of_folders_expect(log: Path) -> None:
    assert main(["score", str(log)]) == 0
    card = log.with_name("mine.scores") / "run-0001.json"
    assert card.read_bytes().startswith(b'{\n  "format": "slea.score_run"')
    card.write_bytes(card.read_bytes()[:100])
    with pytest.raises(StorageError, match="could not be read"):
        score_runs.runs(card.parent)


def test_running_again_adds_a_run_and_changes_nothing(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(log)]) == 0
    results = log.with_name("mine.scores")
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    assert main(["score", str(log), "--set", "evaluators.rules.tool_error=-1"]) == 0
    assert {name: (results / name).read_bytes() for name in before} == before
    first, second = score_runs.runs(results)
    assert first.card.evaluators["rules"] != second.card.evaluators["rules"]
    capsys.readouterr()
    assert main(["score", str(results), "--compare", "1", "2"]) == 0
    said = capsys.readouterr().out
    assert "mean score: run-0001 rules -0.036, run-0002 rules -0.200" in said
    assert "-0.40 against -1.00" in said


def test_results_can_be_scored_again(log: Path) -> None:
    assert main(["score", str(log), "--no-credit"]) == 0
    results = log.with_name("mine.scores")
    assert not score_runs.latest(results).credit.exists()
    assert main(["score", str(results), "--parser", "tagged"]) == 0
    assert score_runs.latest(results).number == 2
    assert len(list(score_runs.latest(results).read())) == 20


def test_an_interrupted_run_is_gone_on_with(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, broken = tmp_path / "whole.scores", tmp_path / "broken.scores"
    assert main(["score", str(log), "--output", str(whole)]) == 0
    assert main(["score", str(log), "--output", str(broken)]) == 0
    run = score_runs.latest(broken)
    run.save(dataclasses.replace(run.card, finished=None, counts={}))
    lines = run.scores.read_bytes().splitlines(keepends=True)
    run.scores.write_bytes(b"".join(lines[:8]) + lines[8][:40])  # seven dialogues and a torn line
    run.credit.unlink()
    assert main(["score", str(log), "--output", str(broken), "--resume", "--parser", "tagged"]) == 2
    assert "parser: 'auto' then, 'tagged' now" in capsys.readouterr().err
    assert main(["score", str(log), "--output", str(broken), "--resume"]) == 0
    assert "7 dialogues are scored already" in capsys.readouterr().out
    for name in ("run-0001.scores.jsonl", "run-0001.credit.jsonl"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert main(["score", str(log), "--output", str(broken), "--resume"]) == 2
    assert "holds no interrupted run" in capsys.readouterr().err


def test_what_needs_live_state_is_refused_with_the_reason(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(log), "--evaluator", "counterfactual"]) == 2
    said = capsys.readouterr().err
    assert "'counterfactual' cannot score a log: it plays dialogues on in a live environment" in said
    assert "counterfactual_prediction" in said
    assert not log.with_name("mine.scores").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--evaluator", "rulez"], "did you mean 'rules'?"),
        (["--parser", "atuo"], "did you mean 'auto'?"),
        (["--set", "evaluators.rules.tool_eror=1"], "did you mean 'tool_error'?"),
        (["--compare", "rules", "3"], "holds the runs none"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
)
def test_mistakes_are_told_with_the_mend(
    log: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["score", str(log), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not log.with_name("mine.scores").exists()


def test_a_log_that_is_not_there_names_the_nearest(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(log.with_name("mien.jsonl"))]) == 2
    assert "did you mean 'mine.jsonl'?" in capsys.readouterr().err


def test_labels_and_overrides_are_read_and_measured(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"trajectory": "d0.1", "turn": 1, "step": 0, "label": 0, "by": "ada"},
        {"trajectory": "d0.1", "turn": 0, "step": 0, "label": 1, "by": "ada"},
        {"trajectory": "d0.3", "override": -10, "by": "ada", "why": "books without asking"},
        {"trajectory": "gone", "label": 1},
    ]
    labels = tmp_path / "labels.jsonl"
    labels.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    assert main(["score", str(log), "--labels", str(labels)]) == 0
    said = capsys.readouterr().out
    assert "rules against 2 labels made by hand: AUC 1.000" in said
    assert "1 annotated trajectories of labels.jsonl are not in the log, such as 'gone'" in said
    run = score_runs.latest(log.with_name("mine.scores"))
    assert run.card.counts["overridden"] == 1
    assert run.card.annotations is not None
    assert run.card.annotations["name"] == "labels.jsonl"
    (overridden,) = [one.scores[-1] for one in run.read() if one.trajectory.id == "d0.3"]
    assert (overridden.score, overridden.rationale[:20]) == (-10.0, "overridden by ada: b")


def test_labels_of_steps_that_are_not_there_are_left_out_and_the_run_is_whole(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"trajectory": "d0.1", "turn": 9, "step": 0, "label": 0},
        {"trajectory": "d0.2", "turn": 9, "step": 0, "override": -10, "by": "ada", "why": "a slip"},
        {"trajectory": "d0.3", "override": -10, "by": "ada", "why": "books without asking"},
    ]
    labels = tmp_path / "labels.jsonl"
    labels.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    assert main(["score", str(log), "--labels", str(labels)]) == 0
    said = capsys.readouterr().out
    assert "warning: 2 of them were left out, the first: annotation of 'd0.1': no leaf step at turn 9, step 0" in said
    counts = score_runs.latest(log.with_name("mine.scores")).card.counts
    assert (counts["overridden"], counts["annotations_misplaced"]) == (1, 2)


def test_a_run_that_scored_nothing_says_so_and_ends_with_1(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(log)]) == 0
    assert main(["score", str(log), "--evaluator", "reward_model"]) == 1
    said = capsys.readouterr().out
    assert "careful: no step was scored" in said
    assert said.count("failures: ") == 1, "what was not scored did not score below 0 either"
    assert (
        main(["convert", str(log.with_name("mine.scores")), "--run", "1", "--to", "slea", "--output", f"{log}.1"]) == 0
    )
    assert all(one.scores[0].score is not None for one in read_scored(Path(f"{log}.1")))
    assert (
        main(["convert", str(log.with_name("mine.scores")), "--run", "3", "--to", "slea", "--output", f"{log}.2"]) == 2
    )
    assert "holds the runs run-0001, run-0002, not '3'" in capsys.readouterr().err


def test_a_run_that_is_being_written_is_not_gone_on_with(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(log)]) == 0
    results = log.with_name("mine.scores")
    (run,) = score_runs.runs(results)
    run.save(dataclasses.replace(run.card, finished=None))
    before = run.scores.read_bytes()
    with run.held():
        assert main(["score", str(log), "--resume"]) == 2
        assert "run-0001 is being written by another process" in capsys.readouterr().err
        assert main(["score", str(log)]) == 0
        assert (
            "run-0001 is being written by another process; wait until it has ended; this is" in capsys.readouterr().out
        )
    assert run.scores.read_bytes() == before
    assert sorted(path.name for path in results.iterdir() if path.name.endswith(".lock")) == []


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("gpt-4.1-mini.jsonl", "gpt-4.1-mini.scores"),
        ("run.2026-01-01.jsonl.gz", "run.2026-01-01.scores"),
        ("a.scores.jsonl", "a.scores"),
        ("plain", "plain.scores"),
    ],
)
def test_results_keep_the_name_of_the_log(name: str, folder: str, tmp_path: Path) -> None:
    assert default_output(tmp_path / name) == tmp_path / folder


def test_results_of_another_log_in_the_same_folder_are_told(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.jsonl"
    write_trajectories(other, [booking("x", success=True)])
    assert main(["score", str(log), "--output", str(tmp_path / "out")]) == 0
    assert "earlier runs" not in capsys.readouterr().out
    assert main(["score", str(other), "--output", str(tmp_path / "out")]) == 0
    assert f"note: earlier runs of {tmp_path / 'out'} read other logs, such as mine.jsonl" in capsys.readouterr().out


def test_a_folder_without_a_log_leaves_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty folder").mkdir()
    assert main(["score", str(tmp_path / "empty folder")]) == 2
    assert not (tmp_path / "empty folder.scores").exists()


def test_two_words_on_one_step_are_told(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"trajectory": "d0.1", "turn": 0, "step": 0, "override": value, "by": who, "why": "so"}
        for who, value in (("ada", -1), ("ben", 1))
    ]
    labels = tmp_path / "labels.jsonl"
    labels.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    assert main(["score", str(log), "--labels", str(labels)]) == 0
    assert "warning: 1 of them say another thing of a step than an earlier line" in capsys.readouterr().out


def test_two_evaluators_are_compared_on_one_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(log), "--compare", "rules", "knowledge_base"]) == 0
    said = capsys.readouterr().out
    assert "steps scored by both" in said
    assert set(score_runs.latest(log.with_name("mine.scores")).card.evaluators) == {"rules", "knowledge_base"}


def test_a_recipe_of_the_scoring_sections_alone_is_enough(log: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "scoring.yaml"
    recipe.write_text("parser: {name: tagged}\nevaluators: [{name: rules, result: 0.5}]\n", encoding="utf-8")
    assert main(["score", str(log), "--recipe", str(recipe)]) == 0
    run = score_runs.latest(log.with_name("mine.scores"))
    assert run.card.parser == "tagged"
    assert next(iter(run.read())).scores[0].score == 0.5


def test_br_093_ids_that_are_paths_touch_nothing_outside_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    log = inside / "a.jsonl"
    names = ["../../out", "/etc/out", "a; touch MARK", "x\x1b[2J", "{{7*7}}", "n" * 3000]
    write_trajectories(log, [booking(name, success=False, errors=3) for name in names])
    assert main(["score", str(log)]) == 0
    assert main(["report", str(inside / "a.scores")]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert sorted(path.name for path in inside.iterdir()) == ["a.html", "a.jsonl", "a.scores"]


def test_a_folder_that_holds_something_else_is_refused(log: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("kept", encoding="utf-8")
    assert main(["score", str(log), "--output", str(tmp_path / "full")]) == 2
    assert main(["score", str(log), "--output", str(log)]) == 2


def test_a_log_without_outcomes_still_gets_its_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "chat.jsonl"
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, how are you?"}]}]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    assert main(["score", str(log)]) == 0
    said = capsys.readouterr().out
    assert "success: unknown, the log does not say how its 1 dialogues ended" in said
    assert "carry no advantages, the first because: the log does not say how it ended" in said


def test_the_log_of_a_run_is_whole_after_every_append(tmp_path: Path) -> None:
    one, other = scored(booking("a", success=True), logged("b", success=False))
    with ScoredLog(tmp_path / "a.jsonl") as log:
        log.append(one)
        log.append(other)
    with ScoredLog(tmp_path / "a.jsonl") as log:
        assert log.cut_bytes == 0


def test_any_credit_of_the_registry_works_on_a_log(log: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "scoring.yaml"
    recipe.write_text(
        "evaluators: [{name: rules}]\ncredit: {name: group_relative}\nstreams: {outcome: {sources: [outcome]}}\n",
        encoding="utf-8",
    )
    assert main(["score", str(log), "--recipe", str(recipe), "--credit"]) == 0
    credit = list(CREDIT.read(score_runs.latest(log.with_name("mine.scores")).credit))
    assert {one.why_not for one in credit} == {None}
    assert {one.advantages[0] > 0 for one in credit[::2]} == {True}
    assert {one.advantages[0] < 0 for one in credit[1::2]} == {True}


def test_credit_that_needs_models_is_left_out_or_refused(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "scoring.yaml"
    recipe.write_text("kl_in_reward: 0.1\nstreams: {outcome: {sources: [outcome, reference_kl]}}\n", encoding="utf-8")
    assert main(["score", str(log), "--recipe", str(recipe), "--credit"]) == 2
    assert "a log has neither" in capsys.readouterr().err
    assert not log.with_name("mine.scores").exists()
    assert main(["score", str(log), "--recipe", str(recipe)]) == 0
    assert "advantages left out: stream 'outcome' takes reference_kl" in capsys.readouterr().out


def test_a_file_name_that_is_not_utf_8_is_scored_and_gone_on_with(tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"n\xff.jsonl")
    odd.write_text('{"messages": [{"role": "assistant", "content": "Hello."}]}\n', encoding="utf-8")
    results = tmp_path / "results"
    assert main(["score", str(odd), "--output", str(results)]) == 0
    (run,) = score_runs.runs(results)
    assert run.card.sources[0]["name"] == "n\ufffd.jsonl"
    run.save(dataclasses.replace(run.card, finished=None))
    assert main(["score", str(odd), "--output", str(results), "--resume"]) == 0
    assert [one.trajectory.id for one in run.read()] == ["n\ufffd.jsonl#1"]
    assert main(["convert", str(odd), "--to", "openai_chat", "--output", str(tmp_path / "rows.jsonl")]) == 0


def test_what_is_no_file_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "dead.jsonl").symlink_to("nowhere")
    for path, words in (
        (tmp_path / "pipe.jsonl", "is a pipe, which can be read only once"),
        (tmp_path / "dead.jsonl", "is a link to something that is not there"),
        (Path("/"), "has no name for its results to take; give --output FOLDER"),
    ):
        assert main(["score", str(path)]) == 2
        assert words in capsys.readouterr().err
