"""Augmenter `slot_progress`: the numbers of its two forms and of its schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.augmenters.slot_progress import SlotProgress, ramp_coefficient
from slea_llm.errors import ConfigError, CreditError
from slea_llm.types import ScoredTrajectory, Span, Step, Termination, Trajectory, Turn

SLOTS = ("dish", "quantity", "address")


def state(filled: tuple[str, ...]) -> dict[str, Any]:
    return {"required": list(SLOTS), "filled": dict.fromkeys(filled, "x")}


def dialogue(*filled: tuple[str, ...], termination: Termination = "success") -> ScoredTrajectory:
    """Two steps a turn; `filled` holds the slots before each turn and after the last."""
    turns = tuple(
        Turn(index=i, context=(), text="ab", state_before=state(filled[i]), state_after=state(filled[i + 1]))
        for i in range(len(filled) - 1)
    )
    trajectory = Trajectory(
        id="t",
        task={},
        environment="order_taking",
        seed=0,
        policy_version=0,
        turns=turns,
        traces=(),
        outcome=None,
        termination=termination,
        error="broke" if termination == "error" else None,
    )
    steps = tuple(
        Step(trajectory_id="t", turn=t.index, index=i, kind="reply", text="ab"[i], span=Span(i, i + 1))
        for t in turns
        for i in range(2)
    )
    return ScoredTrajectory(trajectory=trajectory, steps=steps, scores=(), parser="tagged")


def rewards(scored: ScoredTrajectory, progress: float = 0.0, **options: Any) -> list[float]:
    given = SlotProgress(SlotProgress.Config(**options)).augment(scored, progress)
    assert list(given) == [(turn.index, 1) for turn in scored.trajectory.turns]
    return list(given.values())


COUNTS_0_1_1_3_3 = ((), SLOTS[:1], SLOTS[:1], SLOTS, SLOTS)
DITHER = ((), SLOTS[:1], (), SLOTS[:1], (), SLOTS[:1])


def test_oracle_slot_intrinsic() -> None:
    scored = dialogue(*COUNTS_0_1_1_3_3)
    assert rewards(scored, form="bonus", eta=1.0) == pytest.approx([0.5, 0.0, 1.0, 0.0], abs=1e-12)
    assert rewards(scored, form="bonus") == pytest.approx([0.1, 0.0, 0.2, 0.0], abs=1e-12)
    potential = rewards(scored, form="potential", eta=1.0, gamma=0.99)
    assert potential == pytest.approx([0.495, -0.005, 0.985, -1.5], abs=1e-12)
    assert sum(0.99**t * f for t, f in enumerate(potential)) == pytest.approx(0.0, abs=1e-12)


def test_oracle_slot_dither_fill_clear() -> None:
    """A naive bonus for every filling pays 1.5 for filling and clearing one slot three times."""
    assert sum(rewards(dialogue(*DITHER), form="every", eta=1.0)) == pytest.approx(1.5)
    assert sum(rewards(dialogue(*DITHER), form="bonus", eta=1.0)) == pytest.approx(0.5)
    cut = dialogue(*DITHER, termination="max_turns")
    assert sum(rewards(cut, form="potential", eta=1.0, gamma=1.0)) == pytest.approx(0.5)


@pytest.mark.parametrize(("eta", "alpha", "expected"), [(0.2, 1.0, [1.3, -0.4, 2.2]), (0.1, 0.7, [0.89, -0.28, 1.5])])
def test_oracle_aug_mix(eta: float, alpha: float, expected: list[float]) -> None:
    intrinsic = rewards(dialogue((), SLOTS[:1], SLOTS[:1], SLOTS), form="bonus", eta=eta)
    mixed = [alpha * a + i for a, i in zip([1.2, -0.4, 2.0], intrinsic, strict=True)]
    assert mixed == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("update", "expected"), [(0, 0.0), (19, 0.0), (20, 0.1), (25, 0.15), (30, 0.2), (40, 0.2)])
def test_oracle_beta_schedule(update: int, expected: float) -> None:
    assert ramp_coefficient(update, begin=20, start=0.1, rise=0.01, maximum=0.2) == pytest.approx(expected, abs=1e-12)
    # The same in shares of a training of 40 updates.
    ramp = SlotProgress(SlotProgress.Config(schedule="ramp", ramp_begin=0.5, ramp_rise=0.4))
    assert ramp.coefficient(update / 40) == pytest.approx(expected, abs=1e-12)


def test_a_coefficient_of_zero_gives_zeros() -> None:
    for form in ("potential", "bonus"):
        assert rewards(dialogue(*COUNTS_0_1_1_3_3), progress=0.1, form=form, schedule="ramp") == [0.0] * 4


def test_a_cut_dialogue_keeps_its_last_potential() -> None:
    (reward,) = rewards(dialogue((), SLOTS, termination="budget"), eta=1.0, gamma=0.9)
    assert reward == pytest.approx(0.9 * 1.5)
    (reward,) = rewards(dialogue((), SLOTS, termination="failure"), eta=1.0, gamma=0.9)
    assert reward == pytest.approx(0.0)


def test_the_bonus_is_bounded() -> None:
    assert rewards(dialogue((), SLOTS[:2], SLOTS), form="bonus", eta=1.0, bonus_bound=1.2) == pytest.approx([1.0, 0.2])


def test_late_slots_are_worth_less() -> None:
    late = dialogue((), SLOTS[:1], SLOTS[:1], SLOTS[:2])
    assert rewards(late, form="bonus", eta=1.0, late_turns=4) == pytest.approx([0.5, 0.0, 0.25])


def test_slots_that_nobody_asked_for_earn_nothing() -> None:
    assert rewards(dialogue((), ("phone",)), form="bonus", eta=1.0) == [0.0]
    assert rewards(dialogue((), ("phone",)), form="every", eta=1.0) == [0.5]  # but in the form without the lesson


def test_a_failed_dialogue_earns_nothing() -> None:
    assert SlotProgress(SlotProgress.Config()).augment(dialogue((), SLOTS, termination="error"), 0.0) == {}


def test_a_state_without_slots_is_an_error() -> None:
    scored = dialogue((), SLOTS)
    turn = scored.trajectory.turns[0]
    turn.state_before.pop("filled")  # type: ignore[attr-defined]
    with pytest.raises(CreditError, match="turn 0 in trajectory 't' has no list 'filled'"):
        SlotProgress(SlotProgress.Config()).augment(scored, 0.0)


@pytest.mark.parametrize("options", [{"gamma": 1.1}, {"eta": -1.0}, {"form": "sum"}, {"ramp_max": float("nan")}])
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} "):
        SlotProgress.Config(**options)


@given(
    filled=st.lists(st.sets(st.sampled_from(SLOTS)).map(lambda s: tuple(sorted(s))), min_size=2, max_size=8),
    gamma=st.floats(0.5, 1.0),
    late=st.integers(0, 6),
)
@settings(deadline=None, max_examples=40)
def test_a_potential_never_changes_which_dialogue_is_best(
    filled: list[tuple[str, ...]], gamma: float, late: int
) -> None:
    """The discounted sum is minus the first potential, whatever happens in between."""
    given_rewards = rewards(dialogue(*filled, termination="failure"), eta=1.0, gamma=gamma, late_turns=late)
    total = sum(gamma**t * reward for t, reward in enumerate(given_rewards))
    assert total == pytest.approx(-0.5 * len(filled[0]), abs=1e-9)


@given(filled=st.lists(st.sets(st.sampled_from(SLOTS)).map(lambda s: tuple(sorted(s))), min_size=2, max_size=8))
@settings(deadline=None, max_examples=40)
def test_a_bonus_counts_each_slot_once(filled: list[tuple[str, ...]]) -> None:
    new = set().union(*filled) - set(filled[0])
    assert sum(rewards(dialogue(*filled), form="bonus", eta=1.0)) == pytest.approx(0.5 * len(new), abs=1e-9)
