"""Who is blamed for a dialogue, by rules or by a chat model, and what is done about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.adjudication import RefereedRollout
from slea_llm.blame.facts import facts, same, wanted
from slea_llm.blame.faults import KINDS
from slea_llm.cli import main
from slea_llm.endpoints import Endpoint
from slea_llm.environments.foreign import foreign_task
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.errors import ConfigError, EpisodeError
from slea_llm.evaluation import noise_floor, report
from slea_llm.interfaces import LocalReducer
from slea_llm.metrics_log import episode_metrics
from slea_llm.referee import Referee, blame_counts, blame_line
from slea_llm.rollout import FailedEpisodesError, play
from slea_llm.storage import read_trajectories, write_trajectories
from slea_llm.types import Message, Task, Trajectory, Turn
from slea_llm.users.scripted import ScriptedUser
from tests.strategies import trajectories
from tests.support.chat_server import Reply, completion, serving
from tests.support.planted_faults import FLIGHT, PIZZA, PLANTED, planted, spoken

REFEREE = Referee(Referee.Config())
GAME = foreign_task("textworld", 0, {"game": "games/a.z8"}, number=9).goal


@pytest.mark.parametrize("number", range(len(PLANTED)), ids=[f"{one[0]}-{n}" for n, one in enumerate(PLANTED)])
def test_a_planted_fault_is_the_users_and_its_words_are_quoted(number: int) -> None:
    trajectory = planted(number)
    ruling = REFEREE.judge(trajectory)
    assert (ruling.party, ruling.by, ruling.excluded) == ("user", "rules", True)
    assert ruling.fault is not None
    assert PLANTED[number][0] in [ruling.fault.kind, *(one.kind for one in ruling.noted)] or ruling.fault.kind == "leak"
    assert ruling.fault.kind in KINDS
    assert ruling.fault.quote


def test_a_stop_signal_that_ends_the_dialogue_was_heard_by_nobody() -> None:
    lines = ("Two ham pizzas.", "Where to?", "14 Mill Street, 18:45.", "Two ham pizzas, done.")
    for last in ("###STOP###", "I really appreciate your help. Thank you. ###STOP###"):
        ended = REFEREE.judge(spoken("a", PIZZA, (*lines, last), ending="failure"))
        assert (ended.party, [one.kind for one in ended.noted]) == ("agent", [])
    heard = REFEREE.judge(spoken("b", PIZZA, (*lines, "###STOP###", "Pardon?", "Bye."), ending="failure"))
    assert (heard.party, heard.fault and heard.fault.kind) == ("user", "stop_signal")


def test_the_command_prints_blame_without_words_and_says_which_ends_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, empty = tmp_path / "log.jsonl", tmp_path / "empty.jsonl"
    call = '<tool_call>{"name": "place_order", "arguments": {}}</tool_call>'
    silent = spoken("silent", PIZZA, ("Two ham pizzas.", call), ending="failure")
    write_trajectories(log, [silent, spoken("open", PIZZA, ("Two ham pizzas.", "Where to?"), ending="unknown")])
    assert main(["referee", str(log)]) == 0
    said = capsys.readouterr().out
    assert "silent (failure): agent, turn 0, fails: (no words)" in said
    assert "2 dialogues, 0 successes, 1 of which the log does not say how they ended" in said
    empty.touch()
    assert main(["referee", str(empty)]) == 2
    assert "holds no dialogue that could be read" in capsys.readouterr().err


CLEAN = (
    (PIZZA, ("Hi.", "What would you like to eat?", "Two ham pizzas please.", "Where to?",
             "14 Mill St., at a quarter to 7.", "Two ham pizzas to 14 Mill Street at 18:45, correct?",
             "Yes, thanks.", "Nice weather today.")),
    (PIZZA, ("One moment. Two ham pizzas.", "I do not know what you mean.", "Two ham pizzas to 14 Mill Street!",
             "What would you like to eat?", "As I said, ham pizza.", "And what would you like to eat?")),
    (FLIGHT, ("I'd like to fly to Madrid.", "From where?", "Oslo. Do you have anything before noon?", "On which day?",
              "May 12th, 3 passengers.", "There is a flight at 9:15 for $220 each. Shall I book it?",
              "How about a later one?", "Booked.")),
    (PIZZA, ("Hello.", "How many pizzas?", "2 please, ham.", "Sorry, we have no ham pizza today.",
             "Oh. What else is there?", "Cheese pizza.")),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(CLEAN)))
def test_a_user_that_does_its_part_is_not_blamed_for_a_failure(number: int) -> None:
    goal, lines = CLEAN[number]
    ruling = REFEREE.judge(spoken("clean", goal, lines, ending="failure"))
    assert (ruling.party, ruling.by, ruling.excluded) == ("agent", "default", False)
    assert REFEREE.judge(spoken("clean", goal, lines, ending="success")).party is None


USER = ScriptedUser(ScriptedUser.Config())


@cache
def environment_of(language: Any) -> OrderTaking:
    return OrderTaking(OrderTaking.Config(language=language))


def scripted(seed: int, error_rate: float, language: str = "en") -> Trajectory:
    environment = environment_of(language)
    task = environment.task(seed)
    agent = environment.expert(task, error_rate=error_rate) if error_rate < 1 else environment.idler(task)
    return play(environment, USER, agent, task, seed=seed, max_turns=12)


def test_scripted_users_are_never_blamed_not_even_when_nobody_says_that_they_are_scripts() -> None:
    played = [scripted(seed, rate, "zh" if seed % 2 else "en") for seed in range(40) for rate in (0.0, 0.6, 1.0)]
    unknown = [replace(one, provenance={**one.provenance, "user": {}}) for one in played]
    for one, rulings in zip(played, zip(*map(REFEREE.judge_many, (played, unknown)), strict=True), strict=True):
        assert {ruling.party for ruling in rulings} == {None if one.success else "agent"}, one.id
        assert not any(ruling.excluded for ruling in rulings)


def test_a_success_that_was_given_away_is_no_success() -> None:
    lines = ("My hidden goal is two ham pizzas to 14 Mill Street at 18:45.", "Ordered.")
    ruling = REFEREE.judge(spoken("leak", PIZZA, lines, ending="success"))
    assert (ruling.party, ruling.excluded) == ("user", True)
    assert ruling.fault is not None
    assert ruling.fault.quote in lines[0].lower()


def test_a_fault_that_the_user_puts_right_is_noted_and_blames_nobody() -> None:
    lines = (
        "A flight to Madrid from Oslo for 3 passengers.",
        "Which date?",
        "June 3.",
        "June 3?",
        "Sorry, May 12.",
        "Bye.",
    )
    ruling = REFEREE.judge(spoken("mended", FLIGHT, lines, ending="failure"))
    assert ruling.party == "agent"
    assert [(one.kind, one.weight) for one in ruling.noted] == [("contradicts_goal", "minor")]


@pytest.mark.parametrize(
    ("error", "party", "kind"),
    [
        ("EpisodeError: the simulated user did not answer: gone [turn 3, user]", "user", "broke"),
        ("KeyError: 'x' [turn 1, environment]", "environment", "crashed"),
        ("GenerationError: no answer [turn 2, agent]", "environment", "crashed"),
        ("anything else", "environment", "crashed"),
    ],
)
def test_a_dialogue_that_broke_is_laid_to_the_part_that_raised(error: str, party: str, kind: str) -> None:
    broken = replace(
        spoken("b", PIZZA, ("Hi.", "Hello?"), ending="failure"), termination="error", error=error, outcome=None
    )
    ruling = REFEREE.judge(broken)
    assert ruling.fault is not None
    assert (ruling.party, ruling.fault.kind) == (party, kind)
    assert ruling.fault.quote == error


def test_a_tool_that_fails_is_the_environments() -> None:
    turn = Turn(index=0, context=(Message(role="user", content="Hi."),), text="<tool_call>{}</tool_call>")
    after = Turn(index=1, context=(Message(role="tool", content="500 Internal Server Error"),), text="Sorry.")
    one = replace(spoken("t", {}, ("Hi.", "x"), ending="failure"), turns=(turn, after), provenance={})
    ruling = REFEREE.judge(one)
    assert (ruling.party, ruling.excluded) == ("environment", True)
    assert ruling.fault is not None
    assert ruling.fault.turn == 1


@pytest.mark.parametrize("key", ["code", "source_code", "command", "script"])
def test_an_error_of_a_program_that_the_agent_handed_over_is_no_failure_of_the_tool(key: str) -> None:
    call = f'<tool_call>{{"name": "run", "arguments": {{"{key}": "int(row)"}}}}</tool_call>'
    turn = Turn(index=0, context=(Message(role="user", content="Hi."),), text=call)
    answer = "1 of 6 tests passed.\nplain records: raised ValueError: not a table (line 10)\nlast: timed out"
    after = Turn(index=1, context=(Message(role="tool", content=answer),), text="Sorry.")
    one = replace(spoken("t", {}, ("Hi.", "x"), ending="failure"), turns=(turn, after), provenance={})
    ruling = REFEREE.judge(one)
    assert (ruling.party, ruling.excluded) == ("agent", False)


@pytest.mark.parametrize(
    ("answer", "party"),
    [
        ("Agreed: raise ValueError.", "agent"),
        ("Agreed: raise ValueError. TypeError: no such note", "environment"),
        ("KeyError", "environment"),
    ],
)
def test_a_tool_that_repeats_the_users_words_has_not_failed(answer: str, party: str) -> None:
    turn = Turn(index=0, context=(Message(role="user", content="Bad amounts raise ValueError."),), text="Noted?")
    after = Turn(index=1, context=(Message(role="tool", content=answer),), text="Well.")
    one = replace(spoken("t", {}, ("Hi.", "x"), ending="failure"), turns=(turn, after), provenance={})
    assert REFEREE.judge(one).party == party


def test_what_the_environment_noted_against_the_users_words_is_its_own_fault() -> None:
    one = spoken("m", PIZZA, ("Two ham pizzas.", "Where to?", "14 Mill Street.", "Ordered."), ending="failure")
    state = {"filled": {"address": "41 Hill Street"}, "placed": True}
    turns = (one.turns[0], replace(one.turns[1], state_after=state))
    ruling = REFEREE.judge(replace(one, turns=turns))
    assert ruling.fault is not None
    assert (ruling.party, ruling.fault.kind, ruling.fault.quote) == ("environment", "misheard", "14 Mill Street.")


def test_br_057_a_finished_dialogue_without_an_outcome_is_the_scorers_and_no_failure() -> None:
    lost = replace(spoken("s", PIZZA, ("Hi.", "Hello."), ending="failure"), outcome=None)
    ruling = REFEREE.judge(lost)
    assert (ruling.party, ruling.excluded) == ("scorer", True)
    (marked,) = REFEREE.marked([lost])
    good = spoken("g", PIZZA, ("Hi.", "Done."), ending="success")
    bad = spoken("b", PIZZA, ("Hi.", "Done."), ending="failure")
    got = report([*REFEREE.marked([good, bad]), marked], expected=3)
    assert (got.n, got.success_rate, got.excluded) == (2, 0.5, 1)


def test_what_a_log_says_of_success_is_a_verdict_without_a_number() -> None:
    source = {"format": "openai_chat"}
    won = spoken("s", {}, ("Hi.", "Hello."), ending="success", source=source)
    assert REFEREE.judge(replace(won, outcome=None)).party is None
    lost = spoken("s", {}, ("Hi.", "Hello."), ending="failure", source=source)
    assert REFEREE.judge(replace(lost, outcome=None)).party == "agent"


@pytest.mark.parametrize(
    ("goal", "ending", "outcome", "party"),
    [
        (PIZZA, "success", -1.0, "scorer"),
        (PIZZA, "failure", 1.0, "scorer"),
        (PIZZA, "failure", 0.5, "agent"),
        (GAME, "failure", 0.75, "agent"),
        (GAME, "failure", 20.0, "agent"),  # a pole that fell after 20 steps
        (GAME, "success", -110.0, None),  # a car that came up the hill, a point a step
    ],
)
def test_an_outcome_against_the_ending_is_the_scorers_and_a_part_of_the_reward_is_not(
    goal: Mapping[str, Any], ending: Any, outcome: float, party: str | None
) -> None:
    one = replace(spoken("s", goal, ("Hi.", "Hello."), ending=ending), outcome=outcome)
    assert REFEREE.judge(one).party == party


def test_a_replayed_user_that_the_agent_left_is_not_the_agents_failure() -> None:
    user = {"name": "recorded", "left_at": 0, "spent": False}
    ruling = REFEREE.judge(spoken("r", PIZZA, ("Hi.", "What a day."), ending="user_left", user=user))
    assert ruling.fault is not None
    assert (ruling.party, ruling.fault.kind, ruling.fault.quote) == ("user", "off_path", "What a day.")


@given(trajectory=trajectories())
@settings(max_examples=15, deadline=None)
def test_any_dialogue_gets_one_ruling_that_can_be_written_down(trajectory: Trajectory) -> None:
    (marked,) = REFEREE.marked([trajectory])
    blame = json.loads(json.dumps(marked.provenance["blame"]))
    assert blame["party"] in (None, "agent", "user", "environment", "scorer")
    assert (blame["party"] is None) <= (trajectory.success or trajectory.termination == "unknown")
    assert marked.excluded == blame["excluded"]
    assert replace(marked, provenance=trajectory.provenance) == trajectory


@given(st.text(max_size=300))
@settings(max_examples=60, deadline=None)
def test_no_text_stops_the_reading_of_facts(text: str) -> None:
    for fact in facts(text):
        assert same(fact, fact)


@pytest.mark.parametrize(
    ("value", "text", "named"),
    [
        ("two", "I'd like 2 of them", True),
        ("two", "at 2:30", False),
        ("两", "来2份", True),
        ("19:30", "half past seven", True),
        ("19:30", "at 7:30 am", False),
        ("14 Mill Street", "14 mill st.", True),
        ("14 Mill Street", "114 Mill Street", False),
        ("555-0123", "call 555 0123", True),
        ("friday", "on Fridays", True),
        ("ham pizza", "ham pizzas", True),
        ("ham pizza", "hampizzas", False),
        ("May 12", "the 12th of May", True),
        ("6月8日", "6月8号", True),
        ("人民路12号", "送到人民路12号", True),
    ],
)
def test_a_value_is_found_in_other_spellings(value: str, text: str, named: bool) -> None:
    (slot,) = wanted({"values": {"x": value}})
    assert slot.named_in(text) == named


# --- the chat model ------------------------------------------------------------------------------------------------


def with_judge(url: str, **options: Any) -> Referee:
    return Referee(Referee.Config(endpoint=Endpoint(url=url, model="m", attempts=2, deadline_s=10.0), **options))


def test_the_chat_model_is_asked_about_what_no_rule_explains_and_must_quote() -> None:
    goal, lines = CLEAN[3]
    clean, planted_one = spoken("c", goal, lines, ending="failure"), planted(0)
    good = {"party": "user", "turn": 2, "quote": "oh. what  ELSE is there?", "reason": "It gave up its dish."}
    invented = {**good, "quote": "I want sushi."}
    with serving(*(Reply(body=completion(one)) for one in (invented, good))) as server:
        ruling, by_rule = with_judge(server.url).judge_many([clean, planted_one])
    assert (ruling.party, ruling.by) == ("user", "llm")
    assert ruling.fault is not None
    assert (ruling.fault.kind, ruling.fault.turn, ruling.fault.note) == ("judged", 2, "It gave up its dish.")
    assert by_rule.by == "rules"
    assert len(server.requests) == 2  # the planted one is explained by a rule
    assert "does not stand in a line of user" in server.requests[1]["messages"][-1]["content"]


def test_a_chat_model_that_fails_leaves_the_agent_to_blame_and_the_reason() -> None:
    goal, lines = CLEAN[3]
    with serving(Reply(status=400, body=b"no")) as server:
        ruling = with_judge(server.url).judge(spoken("c", goal, lines, ending="failure"))
    assert (ruling.party, ruling.by) == ("agent", "default")
    assert ruling.unasked.startswith("status 400")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"excludes": ("usr",)}, "did you mean 'user'"),
        ({"excludes": ("agent",)}, "excludes names 'agent'"),
        ({"redraws": -1}, "redraws -1"),
        ({"prompt": "judge/step"}, "a referee's has"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Referee(Referee.Config(**options))


# --- what is done with a ruling --------------------------------------------------------------------------------------


class Played:
    """A rollout that is already played: record `(task, draw)` of the plan, with user faults where it says so."""

    def __init__(self, faulty: dict[int, int]) -> None:
        self.faulty, self.calls = faulty, list[tuple[list[str], int]]()

    def run(self, tasks: Sequence[Task], *, user_draw: int = 0, **_: Any) -> list[Trajectory]:
        self.calls.append(([task.id for task in tasks], user_draw))
        return [self._one(task, user_draw) for task in tasks]

    def _one(self, task: Task, draw: int) -> Trajectory:
        faulty = draw < self.faulty.get(task.seed, 0)
        lines = ("How may I help you today?", "Hm.") if faulty else ("Hi.", "Done.")
        made = spoken(f"{task.id}-{draw}", {}, lines, ending="failure" if faulty or task.seed % 2 else "success")
        return replace(made, task={**made.task, "id": task.id})


def refereed(faulty: dict[int, int], **options: Any) -> tuple[Played, list[Trajectory]]:
    played = Played(faulty)
    tasks = [Task(id=f"t{seed}", seed=seed, goal={}) for seed in range(4)]
    rollout = RefereedRollout(played, Referee(Referee.Config(**options)))  # type: ignore[arg-type]
    return played, rollout.run(tasks, first_episode=0, policy_version=0)


def test_user_faults_leave_success_rate_and_counts_and_can_be_inspected() -> None:
    _, records = refereed({0: 1})
    assert [one.excluded for one in records] == [True, False, False, False]
    got = report(records, expected=4)
    assert (got.n, got.successes, got.excluded, dict(got.blamed)) == (3, 1, 1, {"user": 1, "agent": 2})
    assert "1 left out as others' faults" in got.line()
    metrics = episode_metrics(records, policy_version=-1, reducer=LocalReducer())
    assert (metrics["episodes/played"], metrics["episodes/excluded"], metrics["episodes/failed"]) == (3, 1, 0)
    assert metrics["episodes/success"] == pytest.approx(1 / 3)
    assert metrics["episodes/blamed/user"] == 1
    assert blame_counts(records)["user/role_flip"] == 1
    assert (
        blame_line(records) == "blame: agent 2 (fails 2); user 1 (role_flip 1); 1 left out of gradient and success rate"
    )


def test_blame_may_be_recorded_and_change_nothing() -> None:
    _, records = refereed({0: 1}, excludes=())
    assert report(records, expected=4).n == 4
    assert records[0].provenance["blame"]["party"] == "user"


def test_an_excluded_dialogue_is_played_again_with_another_user_and_both_are_kept() -> None:
    played, records = refereed({0: 2, 2: 1}, redraws=3)
    assert played.calls == [(["t0", "t1", "t2", "t3"], 0), (["t0", "t2"], 1), (["t0"], 2)]
    assert [one.id for one in records] == ["t0-2", "t1-0", "t2-1", "t3-0", "t0-0", "t2-0", "t0-1"]
    assert [bool(one.provenance["blame"].get("redrawn")) for one in records] == [False] * 4 + [True] * 3
    got = report(records, expected=4)
    assert (got.n, got.successes, got.excluded) == (4, 2, 3)


def test_a_panel_that_says_nothing_about_the_agent_is_no_measurement() -> None:
    _, records = refereed(dict.fromkeys(range(4), 1))
    with pytest.raises(EpisodeError, match="excludes all 4 dialogues"):
        report(records, expected=4)


def test_the_records_of_a_rollout_that_broke_have_rulings_too() -> None:
    class Breaking:
        def run(self, *_: Any, **__: Any) -> list[Trajectory]:
            raise FailedEpisodesError("too many", [planted(0)])

    rollout = RefereedRollout(Breaking(), REFEREE)  # type: ignore[arg-type]
    with pytest.raises(FailedEpisodesError, match="too many") as raised:
        rollout.run([], first_episode=0, policy_version=0)
    assert raised.value.trajectories[0].excluded


def test_the_noise_floor_is_what_the_users_seeds_alone_change() -> None:
    def panel(*wins: bool) -> list[Trajectory]:
        ends = ["success" if win else "failure" for win in wins]
        made = [spoken(str(n), {}, ("Hi.", "Done."), ending=end) for n, end in enumerate(ends)]  # type: ignore[arg-type]
        return [replace(one, task={**one.task, "id": one.id}) for one in made]

    found = noise_floor([panel(True, True, False, False), panel(True, False, False, False)])
    assert (found.rates, found.tasks, found.flips) == ((0.5, 0.25), 4, 0.25)
    assert found.spread == pytest.approx(0.17678, abs=1e-5)  # |0.5 - 0.25| / sqrt(2)
    assert found.floor == pytest.approx(0.49, abs=1e-3)  # 1.96 * 0.25
    (excluded,) = REFEREE.marked([replace(planted(0), task={**planted(0).task, "id": "0"})])
    assert noise_floor([panel(True, True), [excluded, panel(True, True)[1]]]).tasks == 1
    with pytest.raises(EpisodeError, match="2 or more"):
        noise_floor([panel(True)])
    with pytest.raises(EpisodeError, match="no task"):
        noise_floor([panel(True), [excluded]])


def test_the_command_prints_rulings_with_their_words_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "judged.jsonl"
    write_trajectories(log, [planted(4), scripted(0, 0.0), scripted(3, 1.0)])
    assert main(["referee", str(log), "--output", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "out_of_character-4 (failure): user, turn 1" in printed
    assert "3 dialogues, 1 successes; blame: agent 1 (fails 1); user 1" in printed
    assert [one.excluded for one in read_trajectories(out)] == [True, False, False]
    assert main(["referee", str(log), "--party", "user"]) == 0
    assert "agent, turn" not in capsys.readouterr().out
    assert main(["referee", str(log), "--party", "usr"]) == 2
    assert "did you mean 'user'" in capsys.readouterr().err
    assert main(["referee", str(log), "--output", str(out)]) == 2


def test_the_command_takes_the_section_of_a_recipe_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, out, recipe = tmp_path / "log.jsonl", tmp_path / "judged.jsonl", tmp_path / "referee.yaml"
    write_trajectories(log, [planted(4)])
    recipe.write_text("referee: {name: rules, excludes: []}\n", encoding="utf-8")
    assert main(["referee", str(log), "--recipe", str(recipe), "--output", str(out)]) == 0
    assert [one.excluded for one in read_trajectories(out)] == [False]
    recipe.write_text("refeere: {name: rules}\n", encoding="utf-8")
    assert main(["referee", str(log), "--recipe", str(recipe)]) == 2
    assert "did you mean 'referee'?" in capsys.readouterr().err
