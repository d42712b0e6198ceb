"""The learning study: what the protocol makes of an arm, which draw is used, what the tables say and refuse to say."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "learning"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "learning" / "plugins"))

from document import documented
from measures import Point
from needs import Device, Work
from protocol import Protocol, Study, changed_recipe
from runs import Result, over_expert, repeats
from study import RESULTS, page, run
from tables import Tables, fallen, pooled, tables, windowed
from tuning import TUNING, check_digests, chosen, kept, mean_areas, study_jobs, tuning_jobs, tuning_table

from slea_llm import planning, registry
from slea_llm.cli import compose
from slea_llm.types import Trajectory, Turn

PROTOCOL = Protocol.read()
PLAYED = 160
ENTRY_POINTS = cache(entry_points)


def result(arm: str, seed: int, *successes: int, label: str = "", digest: str = "") -> Result:
    """A finished run of `PLAYED` dialogues an iteration."""
    panel = {"successes": 200, "n": 256, "success_rate": 200 / 256, "mean_turns_success": 6.3, "moment": "after"}
    return Result(
        arm=arm,
        seed=seed,
        label=label,
        trainer="slea",
        recipe=PROTOCOL.recipe,
        changes={},
        iterations=len(successes),
        until=len(successes),
        digest=digest,
        tuned=None,
        commands=("python -m slea_llm train",),
        commit="0" * 40,
        versions={"python": "3.11"},
        phases={"update": 1.5},
        paid={"outcome": tuple(0.1 * won for won in successes)},
        tokens={"rows": 1000 * PLAYED * len(successes), "sampled": 100 * PLAYED * len(successes)},
        samples=("user: hello",),
        resumed=0,
        cpu_seconds=100.0,
        curve=tuple(Point(played=PLAYED, successes=won, turns=6.0, cpu=20.0, wall=30.0) for won in successes),
        alarms=((2, ("entropy",)), (3, ("reward_hacking",))),
        before=panel,
        after=panel,
        greedy=panel,
        over_expert=1.05,
        repeats=0.25,
    )


def quick() -> Study:
    return PROTOCOL.study("quick")


@pytest.fixture
def _quick_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is looked up in all packages of the machine every time; here one look serves all tests."""
    monkeypatch.setattr(registry, "entry_points", ENTRY_POINTS)


@pytest.mark.usefixtures("_quick_registry")
@pytest.mark.parametrize("name", PROTOCOL.arms)
def test_every_arm_is_a_run_that_plan_takes(name: str) -> None:
    arm = PROTOCOL.arms[name]
    assert arm.about
    for draw in PROTOCOL.tuning.values():
        planning.check(PROTOCOL.job(arm, 101, recipe=PROTOCOL.recipe, draw=draw, dialogues=1280, until=1280).resolved())


@pytest.mark.usefixtures("_quick_registry")
def test_every_evaluator_of_an_arm_can_be_built() -> None:
    found = {}
    for arm in PROTOCOL.arms.values():
        recipe = changed_recipe(PROTOCOL.recipe, arm.settings(PROTOCOL.recipe, PROTOCOL.common))
        found[repr(recipe.evaluators)] = recipe
    assert len(found) == 6  # none, the rules, with wrong signs, learnt, random, any question
    built = [compose.scorer(recipe).evaluators for recipe in found.values()]
    assert sorted(one.name for several in built for one in several) == [
        "knowledge_base",
        "knowledge_base",
        "random_scores",
        "reward_model",
        "wrong_signs",
    ]


@pytest.mark.parametrize("name", PROTOCOL.studies)
def test_every_study_shares_warm_starts_and_pairs_its_seeds(name: str, tmp_path: Path) -> None:
    study = PROTOCOL.study(name)
    jobs = study_jobs(study, tmp_path)
    assert len(jobs) == len(study.arms) * len(study.seeds)
    assert len({job.name for job in jobs}) == len(jobs)
    assert study.baseline in {job.arm for job in jobs}
    assert [job.seed for job in jobs[: len(study.arms)]] == [study.seeds[0]] * len(study.arms)


def test_all_arms_get_the_same_draws_and_leave_out_what_they_do_not_have() -> None:
    draws = PROTOCOL.tuning.values()
    assert draws == PROTOCOL.tuning.values()
    assert draws[0] == {}
    low, high = PROTOCOL.tuning.space["learning_rate"]
    assert all(low <= draw["learning_rate"] <= high for draw in draws[1:])
    for knob in ("episodes", "minibatch", "entropy", "lam_turn"):
        assert {draw[knob] for draw in draws[1:]} <= set(PROTOCOL.tuning.space[knob])
    draw = {"learning_rate": 5e-4, "episodes": 16, "minibatch": 4, "entropy": 0.003, "lam_turn": 0.9}
    found = {}
    for name in ("token_gae", "grpo"):
        job = PROTOCOL.job(PROTOCOL.arms[name], 1, recipe=PROTOCOL.recipe, draw=draw, dialogues=2880, until=1280)
        recipe = found[name] = job.resolved()
        assert (recipe.trainer.learning_rate, recipe.rollout.episodes, recipe.trainer.minibatch) == (5e-4, 16, 4)
        assert (job.iterations, job.until, job.complete) == (180, 80, False)
        assert [one.options.get("weight") for one in recipe.losses if one.name == "entropy"] == [0.003]
    assert found["token_gae"].streams["outcome"].lam_turn == 0.9
    assert found["grpo"].streams["outcome"].lam_turn == 0.95, "credit relative to a group has no lambda"


def test_arms_of_one_environment_share_a_warm_start() -> None:
    study = PROTOCOL.study("full")
    jobs = study_jobs(study)[: len(study.arms)]
    assert len({job.warm_digest() for job in jobs}) == 1
    others = [replace(job, seed=jobs[0].seed + 1) for job in jobs[:2]]
    assert len({job.warm_digest() for job in [*jobs[:2], *others]}) == 2
    assert len({job.digest() for job in [*jobs[:2], *others]}) == 4


def test_the_draw_with_the_largest_area_is_used_once_the_search_is_whole(tmp_path: Path) -> None:
    arm = PROTOCOL.arms["token_gae"]
    jobs = tuning_jobs(PROTOCOL, arm)
    assert chosen(PROTOCOL, arm, tmp_path) is None
    for place, job in enumerate(jobs):
        if place == len(jobs) - 1:
            with pytest.raises(SystemExit, match="not finished"):
                chosen(PROTOCOL, arm, tmp_path)
            assert all("search unfinished" in line for line in tuning_table(PROTOCOL, tmp_path)[2:])
        made = result(arm.name, job.seed, 0, 40 + place % 3, label=job.label, digest=job.digest())
        made.write(tmp_path / arm.name / f"{job.name}.json")
    found = chosen(PROTOCOL, arm, tmp_path)
    assert found is not None
    assert (found.arm, found.draw) == ("token_gae", 2)
    assert found.values == PROTOCOL.tuning.values()[2]
    used = [line for line in tuning_table(PROTOCOL, tmp_path) if line.endswith("| yes |")]
    assert len(used) == 1
    assert used[0].startswith("| token_gae | 2 |")
    job = next(one for one in study_jobs(quick(), tmp_path) if one.arm == "token_gae")
    assert job.tuned == found
    assert job.resolved().trainer.learning_rate == found.values["learning_rate"]
    replace(made, digest="other").write(tmp_path / arm.name / f"{job.name}.json")
    replace(made, digest="other").write(tmp_path / arm.name / f"{jobs[0].name}.json")
    with pytest.raises(SystemExit, match="other settings"):
        chosen(PROTOCOL, arm, tmp_path)


def test_a_kept_run_of_other_settings_is_neither_shown_nor_played_over() -> None:
    jobs = study_jobs(quick())
    made = {jobs[0].name: result(jobs[0].arm, jobs[0].seed, 1, digest=jobs[0].digest())}
    check_digests(made, jobs, Path("results"))
    with pytest.raises(SystemExit, match=jobs[0].name):
        check_digests({jobs[0].name: replace(made[jobs[0].name], digest="older")}, jobs, Path("results"))


def test_a_study_of_beginnings_takes_those_of_whole_runs() -> None:
    study = PROTOCOL.study("credit")
    job = next(one for one in study_jobs(study) if one.arm == "token_gae")
    assert job.name == f"token_gae-first640-{study.seeds[0]}"
    assert (job.until * 4, job.whole.name) == (job.iterations, f"token_gae-{study.seeds[0]}")
    made = result("token_gae", study.seeds[0], *range(job.iterations), digest=job.whole.digest())
    assert kept(job, {}) is None
    found = kept(job, {job.whole.name: made})
    assert found == made.first(job.until)
    assert found is not None
    assert [point.successes for point in found.curve] == list(range(job.until))
    assert (found.after, found.greedy, found.before) == (None, None, made.before)
    own = replace(made, label="first640")
    assert kept(job, {job.whole.name: made, job.name: own}) is own
    with pytest.raises(SystemExit, match=job.whole.name):
        check_digests({job.whole.name: replace(made, digest="older")}, [job], Path("results"))
    assert kept(job.whole, {job.name: own}) is None, "a beginning is no whole run"
    lines = tables(study, [found, replace(found, arm="streams_split")])
    assert "cap 640, the first of runs of 2,560" in lines[2]
    assert not any("at the end" in line and "less" in line for line in lines), "no panel, no difference of panels"


def test_runs_of_different_seeds_stand_side_by_side() -> None:
    from study import spread

    order = [(job.seed, job.arm) for job in spread(study_jobs(quick()), 2)]
    base, best = quick().baseline, quick().best
    assert order == [(101, base), (102, base), (101, best), (102, best), (103, base), (103, best)]


def test_a_finished_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = result("streams", 101, 10, 20, 160)
    made.write(tmp_path / "streams-101.json")
    assert Result.read(tmp_path / "streams-101.json") == made
    assert mean_areas([replace(made, label="0")]) == {0: 190 / 480}


def test_tables_count_censored_seeds_at_the_cap_and_print_no_ratio_over_a_baseline_that_fails() -> None:
    ours = [result("streams_split", seed, 40, 130, 140, 150) for seed in (101, 102)]
    ours.append(result("streams_split", 103, 0, 0, 0, 0))
    theirs = [result("token_gae", seed, 0, 40, 130, 150) for seed in (101, 102, 103)]
    shown = Tables(quick(), {"token_gae": theirs, "streams_split": ours})
    # Interquartile means of three: the outer two count a quarter each, the middle one whole.
    assert "| >= 373 (2/3) |" in shown.main()[3]
    assert shown.ratio_line("streams_split", 0.8).startswith(
        "streams_split over token_gae, dialogues to 80%: 0.78 (0.67 to"
    )
    assert shown.ratio_line("streams_split", 0.8).endswith(
        "3 seeds; did not get there and count as the cap: 1 of streams_split"
    )
    assert "| token_gae | 101 | 480 | 480 | 480 | 640 |" in "\n".join(shown.seeds())
    assert "| streams_split | 103 | > 640 | > 640 | > 640 | > 640 |" in "\n".join(shown.seeds())
    worse = Tables(quick(), {"token_gae": ours, "streams_split": theirs})
    assert worse.ratio_line("streams_split", 0.8).endswith("no ratio, the baseline got there in 2 of 3 seeds")
    assert "no ratio" in "\n".join(worse.articles())
    assert "| environment steps to 80 % | 500,000 | 200,000 | 0.40 | 2,880 (3/3) |" in "\n".join(shown.articles())
    assert tables(quick(), ours + theirs)[0] == "### quick"


def test_the_best_arm_is_set_against_every_other_one() -> None:
    seeds = (211, 212, 213)
    ours = [result("streams_split", seed, 130, 140, 140, 150) for seed in seeds]
    slow = [result("token_gae", seed, 0, 40, 130, 150) for seed in seeds]
    near = [result("gigpo", 211, 0, 140, 140, 150), *(result("gigpo", seed, 0, 0, 0, 0) for seed in seeds[1:])]
    shown = Tables(PROTOCOL.study("full"), {"token_gae": slow, "gigpo": near, "streams_split": ours})
    text = "\n".join(shown.comparisons())
    assert "gigpo over token_gae" in text
    assert "streams_split over token_gae, dialogues to 80%: 0.33" in text
    text = "\n".join(shown.best_over_others())
    assert "token_gae" not in text
    assert "streams_split over gigpo, dialogues to 80%: no ratio, gigpo got there in 1 of 3 seeds" in text
    # Areas of gigpo: 430, 0 and 0 of 640; the interquartile mean of the differences 130, 560 and 560 is 488.3.
    assert f"streams_split less gigpo, area under the curve: {(130 / 4 + 560 + 560 / 4) / 1.5 / 640:.3f}" in text
    assert Tables(PROTOCOL.study("parts"), {"streams_split": ours}).best_over_others() == []


def test_an_unfinished_study_says_so_and_compares_nothing_over_two_seeds() -> None:
    ours = [result("streams_split", seed, 130, 140, 140, 150) for seed in (101, 102)]
    slow = [result("token_gae", seed, 0, 40, 130, 150) for seed in (101, 102, 103)]
    shown = Tables(quick(), {"token_gae": slow, "streams_split": ours})
    assert shown.provenance()[1] == "**Not finished**: 1 arms lack runs of some of the 3 seeds."
    assert shown.main()[2].startswith("| token_gae | 3 |")
    assert shown.main()[3].startswith("| streams_split | 2 of 3 |")
    assert shown.comparisons()[-1].endswith("no ratio, the arms share 2 seeds, and 3 are asked for")
    assert Tables(quick(), {"token_gae": slow}).provenance()[1].startswith("**Not finished**")


def test_a_block_of_the_page_without_an_end_is_refused() -> None:
    page = "<!-- tuned -->\nwords\n\n<!-- table full -->\n<!-- end -->\n"
    with pytest.raises(ValueError, match="<!-- tuned --> has no <!-- end -->"):
        documented(page, tuned=lambda: [], table=lambda _: [])
    whole = documented(page.replace("words", "old\n<!-- end -->"), tuned=lambda: ["new"], table=lambda name: [name])
    assert whole == "<!-- tuned -->\n\nnew\n\n<!-- end -->\n\n<!-- table full -->\n\nfull\n\n<!-- end -->\n"


def test_arms_without_a_search_are_not_played_beside_tuned_ones(tmp_path: Path) -> None:
    folders = argparse.Namespace(results=tmp_path, tuning=tmp_path, work=tmp_path, arms=(), seeds=(), jobs=1)
    with pytest.raises(SystemExit, match="nothing was searched for streams_split, token_gae"):
        run(PROTOCOL, argparse.Namespace(study="quick", **vars(folders)))


@pytest.mark.usefixtures("_quick_registry")
def test_the_page_holds_what_the_kept_runs_give() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "study.md").read_text(encoding="utf-8")
    assert {f"<!-- table {name} -->" for name in PROTOCOL.studies} <= set(text.splitlines())
    assert page(text, PROTOCOL, argparse.Namespace(results=RESULTS, tuning=TUNING)) == text, (
        "write it anew: python benchmarks/learning/study.py document"
    )


def test_domains_are_pooled_only_where_every_baseline_got_there() -> None:
    base = [result("token_gae", seed, 0, 40, 130, 150) for seed in (101, 102, 103)]
    faster = [result("streams_split", seed, 40, 130, 140, 150) for seed in (101, 102, 103)]
    stuck = [result("token_gae", seed, 0, 40, 40, 40) for seed in (301, 302, 303)]
    others = [replace(one, seed=one.seed + 200) for one in faster]
    first = Tables.of(quick(), [*base, *faster])
    second = Tables.of(PROTOCOL.study("second"), [*(replace(one, seed=one.seed + 200) for one in base), *others])
    line = next(one for one in pooled([first, second], "streams_split") if "to 80%" in one)
    assert line == "- streams_split over the baselines of quick, second, to 80%: 0.67 (0.67 to 0.67)"
    failing = Tables.of(PROTOCOL.study("second"), [*stuck, *others])
    line = next(one for one in pooled([first, failing], "streams_split") if "to 80%" in one)
    assert line.endswith("no ratio (second: the baseline got there in 0 of 3 seeds)")


def test_alarms_are_set_beside_the_fall_that_they_should_foretell() -> None:
    run = result("token_gae", 101, 80, 120, 120, 90, 80)
    line = Tables(quick(), {"token_gae": [run]}).alarms()[2]
    # 0.75 at best; 0.5625 after four iterations is the first that is 0.15 below; alarms held in the second and third.
    assert line == "| token_gae | 101 | 0.750 | 320 | 0.500 | 640 | 480 | entropy | 320 |"
    assert fallen([0.5, 0.6, 0.46, 0.44], 0.15) == 3
    assert fallen([0.1, 0.2], 0.15) is None
    assert windowed(run.curve, 320) == [0.5, 0.625, 0.75, 210 / 320, 170 / 320]


def dialogue(name: str, *turns: Turn, success: bool) -> Trajectory:
    return Trajectory(
        id=name,
        task={"id": name},
        environment="order_taking",
        seed=0,
        policy_version=0,
        turns=turns,
        traces=(),
        termination="success" if success else "failure",
        outcome=10.0 if success else -1.0,
    )


def test_asking_for_what_was_told_is_counted_by_slot() -> None:
    first = Turn(index=0, context=(), text="", state_before={"asked": {}}, state_after={"asked": {"dish": 1}})
    second = Turn(
        index=1,
        context=(),
        text="",
        state_before={"asked": {"dish": 1}, "filled": {"dish": "soup"}},
        state_after={"asked": {"dish": 2, "time": 1}},
    )
    assert repeats(dialogue("a", first, second, success=False)) == 1


def test_turns_are_compared_with_the_experts_on_the_tasks_that_were_won() -> None:
    turn = Turn(index=0, context=(), text="")
    played = [
        dialogue("a", turn, replace(turn, index=1), replace(turn, index=2), success=True),
        dialogue("b", turn, success=True),
        dialogue("c", *(replace(turn, index=at) for at in range(9)), success=False),
    ]
    assert over_expert(played, {"a": 2, "b": 1, "c": 4}) == pytest.approx(4 / 3)
    assert over_expert(played[2:], {"c": 4}) is None


def test_further_losses_and_sources_go_on_top_of_what_an_arm_has() -> None:
    arm = replace(
        PROTOCOL.arms["added_scores"],
        losses=({"name": "imitation"},),
        outcome={"sources": ["success_backprop"], "gamma_turn": 1.0},
        changes={**PROTOCOL.arms["added_scores"].changes, "augmenters": [{"name": "success_backprop"}]},
    )
    recipe = changed_recipe(PROTOCOL.recipe, arm.settings(PROTOCOL.recipe, PROTOCOL.common))
    assert recipe.streams["outcome"].sources == ("outcome", "knowledge_base", "success_backprop")
    assert recipe.streams["outcome"].gamma_turn == 1.0
    assert [one.name for one in recipe.losses] == ["ppo", "value", "reference_kl", "imitation"]


@pytest.mark.parametrize(("what", "name"), [("study", "quik"), ("arm", "token_gea")])
def test_a_wrong_name_is_answered_with_the_nearest(what: str, name: str) -> None:
    with pytest.raises(SystemExit, match=f"unknown {what} .*did you mean|nearest"):
        getattr(PROTOCOL, what)(name)


def test_what_a_device_needs_follows_from_lengths_and_settings() -> None:
    made = replace(result("streams_split", 101, 10, 20), changes={"trainer.epochs": 1})
    work = Work.of(made, parameters=1e6)
    # 1,000 tokens a dialogue: read once (2 P), three passes (6 P), one epoch of policy and critic (4 P each).
    assert work.operations == pytest.approx((2 + 6 + 8) * 1e6 * 1000)
    assert work.steps == 100
    alone = Work.of(replace(made, changes={"trainer.epochs": 2, "model.critic": "none"}), parameters=1e6)
    assert alone.operations == pytest.approx((2 + 4 + 8) * 1e6 * 1000)
    device = Device(name="a", operations=1e12, bandwidth=1e9)
    # 16 Gflop at half of 1 Tflop/s, and 100 steps of 2 MB at 1 GB/s shared by four dialogues.
    assert work.seconds(device, parameters=1e6, at_once=4, mfu=0.5) == pytest.approx(0.032 + 0.05)
