"""What the parts make of a small decision process that is solved exactly: which policy is best, and what a loop earns.

The process: an order of two slots. In every turn the agent asks for a slot (filled by the answer), asks for one that is
filled already, clears one, or places the order, which ends the dialogue: 10 when both slots are filled, else -1. The
fifth turn ends it too, with -1. All courses of action are played out, so that nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import pytest

from slea_llm.augmenters.repeat_penalty import RepeatPenalty
from slea_llm.augmenters.slot_progress import SlotProgress
from slea_llm.augmenters.success_backprop import SuccessBackprop
from slea_llm.augmenters.value_shaping import ValueShaping
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.interfaces import Augmenter, LocalReducer
from slea_llm.settings import StreamSettings
from slea_llm.types import ScoredTrajectory
from tests.support.experience import stats_of
from tests.support.shaping import REPLY, talk

SLOTS = ("dish", "quantity")
LAST = 5
Course = tuple[str, ...]


def courses(done: Course = ()) -> Iterator[Course]:
    """Every course of action to its end."""
    filled = filled_after(done)
    if done and (done[-1] == "place" or len(done) == LAST):
        yield done
        return
    actions = ["place", *(f"ask {slot}" for slot in SLOTS), *(f"clear {slot}" for slot in filled)]
    for action in actions:
        yield from courses((*done, action))


def filled_after(course: Course) -> tuple[str, ...]:
    filled: dict[str, None] = {}
    for action in course:
        verb, _, slot = action.partition(" ")
        if verb == "ask":
            filled[slot] = None
        if verb == "clear":
            filled.pop(slot, None)
    return tuple(filled)


@cache
def played(course: Course) -> ScoredTrajectory:
    states: list[dict[str, Any]] = []
    for count in range(len(course) + 1):
        filled = filled_after(course[:count])
        asked = {slot: course[:count].count(f"ask {slot}") for slot in SLOTS}
        states.append({"required": list(SLOTS), "filled": list(filled), "confirmed": list(filled), "asked": asked})
    wins = course[-1] == "place" and len(states[-1]["filled"]) == len(SLOTS)
    rewards = [0.0] * (len(course) - 1) + [10.0 if wins else -1.0]
    ending: Any = "success" if wins else "failure"
    return talk([REPLY] * len(course), rewards=rewards, states=states, termination=ending, name="/".join(course))


def ranking(part: Augmenter | None, gamma: float) -> dict[Course, float]:
    """What every course of action earns in the stream of the outcome and the part, discounted between turns."""
    scored = [played(course) for course in courses()]
    sources = ("outcome",) if part is None else ("outcome", part.name)
    streams = {"s": StreamSettings(sources=sources, gamma_turn=gamma, lam_turn=1.0, whiten=False)}
    method = NestedGae(NestedGae.Config(whiten_final=False), streams=streams)
    crediting = Crediting(streams, [] if part is None else [part], method, evaluators=())
    stats = [stats_of(one, {"s": [0.0] * one.trajectory.sampled_tokens}) for one in scored]
    got = crediting.credit(scored, stats, progress=0.0, reducer=LocalReducer())
    return {course: float(one.advantages[0]) for course, one in zip(courses(), got, strict=True)}


def best(values: Mapping[Course, float]) -> set[Course]:
    top = max(values.values())
    return {course for course, value in values.items() if value > top - 1e-9}


class ToldValue:
    """Value shaping whose V is told: by the number of filled slots in a state."""

    name: ClassVar[str] = "value_shaping"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, values: Sequence[float], **options: Any) -> None:
        self._shaping, self._values = ValueShaping(ValueShaping.Config(**options)), values

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:  # noqa: ARG002
        turns = scored.trajectory.turns
        states = [*(turn.state_before for turn in turns), turns[-1].state_after]
        return self._shaping.shaped(scored, [self._values[len(state["filled"])] for state in states])


@pytest.mark.parametrize("gamma", [0.9, 0.99])
@pytest.mark.parametrize("values", [(0.0, 4.0, 9.0), (7.0, -3.0, 2.0), (5.0, 5.0, 5.0)])
def test_a_value_potential_changes_no_best_course_and_no_difference(gamma: float, values: tuple[float, ...]) -> None:
    """Every course loses V of the opening, right or wrong as V may be."""
    plain = ranking(None, gamma)
    shaped = ranking(ToldValue(values, gamma=gamma), gamma)
    assert best(shaped) == best(plain)
    for course, value in plain.items():
        assert shaped[course] == pytest.approx(value - values[0], abs=1e-9)


@pytest.mark.parametrize("late", [0, 4])
def test_a_slot_potential_changes_no_best_course(late: int) -> None:
    plain = ranking(None, 0.9)
    part = SlotProgress(SlotProgress.Config(gamma=0.9, eta=5.0, late_turns=late))
    shaped = ranking(part, 0.9)
    assert best(shaped) == best(plain)
    assert all(shaped[course] == pytest.approx(value, abs=1e-9) for course, value in plain.items())


def test_the_best_course_without_any_part_orders_at_once() -> None:
    assert best(ranking(None, 0.9)) == {("ask dish", "ask quantity", "place"), ("ask quantity", "ask dish", "place")}


@pytest.mark.parametrize(
    "part",
    [
        SlotProgress(SlotProgress.Config(form="every", eta=8.0)),
        ToldValue((0.0, 4.0, 9.0), form="positive"),
        ToldValue((0.0, 40.0, 9.0), form="unmasked", gamma=0.9),
        SuccessBackprop(SuccessBackprop.Config(form="each", bonus=3.0)),
    ],
    ids=["slot_progress every", "value_shaping positive", "value_shaping unmasked", "success_backprop each"],
)
def test_the_literal_forms_do_change_it(part: Augmenter) -> None:
    """Each prefers another course than the one that orders at once: the fault that the potential form does not have."""
    assert best(ranking(part, 0.9)).isdisjoint(best(ranking(None, 0.9)))


def test_a_loop_of_repeated_questions_earns_nothing_under_a_potential() -> None:
    """Asking the same again moves no potential: at a discount of 1 the loop earns exactly nothing, below 1 less."""
    loop = ("ask dish", "clear dish") * 2 + ("ask dish",)
    assert loop in set(courses())
    for gamma in (0.9, 1.0):
        for part in (
            SlotProgress(SlotProgress.Config(gamma=gamma, eta=5.0)),
            ToldValue((0.0, 4.0, 9.0), gamma=gamma),
        ):
            assert ranking(part, gamma)[loop] == pytest.approx(ranking(None, gamma)[loop], abs=1e-9)
    paid = SlotProgress(SlotProgress.Config(form="every", eta=5.0)).augment(played(loop), 0.0)
    assert sum(paid.values()) == pytest.approx(7.5)  # what the literal form pays for it
    bonus = SlotProgress(SlotProgress.Config(form="bonus", eta=1.0)).augment(played(loop), 0.0)
    assert sum(bonus.values()) == pytest.approx(0.5)


def test_a_repetition_in_a_failure_is_charged_and_the_best_course_is_not() -> None:
    part = RepeatPenalty(RepeatPenalty.Config())
    plain, charged = ranking(None, 0.9), ranking(part, 0.9)
    assert best(charged) == best(plain)
    assert charged["ask dish", "ask dish", "place"] < plain["ask dish", "ask dish", "place"]


def test_a_shared_bonus_prefers_no_longer_success() -> None:
    part = SuccessBackprop(SuccessBackprop.Config(form="spread", bonus=3.0))
    assert best(ranking(part, 0.9)) == best(ranking(None, 0.9))
