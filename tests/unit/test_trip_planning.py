"""trip_planning: look-ups read the database, and code checks every constraint of a booking."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.environments.speech import call_text
from slea_llm.environments.trip_database import Trip, TripDatabase, weekday
from slea_llm.environments.trip_planning import TripEpisode, TripPlanning
from slea_llm.errors import ConfigError
from slea_llm.types import Task


@cache
def planner(language: str = "en") -> TripPlanning:
    return TripPlanning(TripPlanning.Config(language=language))  # type: ignore[arg-type]


def database() -> TripDatabase:
    return planner().databases["en"]


def trip_of(seed: int, language: str = "en") -> Trip:
    return Trip(**planner(language).task(seed).goal["trip"])


def begun(trip: Trip, said: str = "", language: str = "en") -> TripEpisode:
    environment = planner(language)
    episode = environment.start(Task(id="t", seed=0, goal={"trip": asdict(trip)}, language=language))
    episode.user_says(said)
    return episode


def cheapest(trip: Trip) -> dict[str, str]:
    found = database()
    return {
        "journey": min(found.find_journeys(trip.city, trip.start, trip.nights), key=lambda one: one.price).id,
        "hotel": min(found.find_hotels(trip.city, trip.start, trip.nights), key=lambda one: one.price).id,
        "site": min(found.find_sites(trip.city, trip.purpose, trip.start, trip.nights), key=lambda one: one.fee).id,
    }


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 5000))
def test_every_task_has_a_plan_within_its_budget_and_one_beyond(seed: int) -> None:
    trip = trip_of(seed)
    costs = database().costs(trip.city, trip.start, trip.nights, trip.purpose)
    assert costs[0] <= trip.budget < costs[-1]
    assert database().faults(trip, **cheapest(trip)) == []


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 500), st.data())
def test_look_ups_hold_what_fits_and_nothing_else(seed: int, data: st.DataObject) -> None:
    """Against a slow reading of every row."""
    trip, found = trip_of(seed), database()
    nights = range(trip.start, trip.start + trip.nights)
    hotels = [one for one in found.hotels if one.city == trip.city and all(day not in one.full for day in nights)]
    assert found.find_hotels(trip.city, trip.start, trip.nights) == hotels
    journeys = found.find_journeys(trip.city, trip.start, trip.nights)
    ends = (trip.start, trip.start + trip.nights)
    assert journeys == [
        j for j in found.journeys if j.city == trip.city and all(weekday(d) in j.weekdays for d in ends)
    ]
    sites = found.find_sites(trip.city, trip.purpose, trip.start, trip.nights)
    assert all(any(weekday(day) in site.weekdays for day in trip.days) for site in sites)
    # A plan is right exactly when each part was found and the sum is within the budget.
    journey = data.draw(st.sampled_from(found.journeys))
    hotel, site = data.draw(st.sampled_from(found.hotels)), data.draw(st.sampled_from(found.sites))
    fits = {"journey": journey in journeys, "hotel": hotel in hotels, "site": site in sites}
    broken = found.faults(trip, journey=journey.id, hotel=hotel.id, site=site.id)
    assert {name for name, fit in fits.items() if not fit} == set(broken) - {"budget"}


def test_each_broken_constraint_is_named() -> None:
    trip, found = trip_of(3), database()
    right = cheapest(trip)
    elsewhere = next(one.id for one in found.hotels if one.city != trip.city)
    assert found.faults(trip, **{**right, "hotel": elsewhere}) == ["hotel"]
    assert found.faults(trip, **{**right, "site": "S0", "journey": "J0"}) == ["journey", "site"]
    assert found.faults(replace(trip, budget=1), **right) == ["budget"]


def test_search_uses_what_the_user_told_and_what_the_call_says() -> None:
    trip = trip_of(3)
    told = f"to {trip.city}, from {trip.start} May, for {trip.nights} nights, to visit {trip.purpose}"
    for arguments in ({}, {"city": trip.city, "start": f"{trip.start} May", "nights": trip.nights}):
        outcome = begun(trip, told).agent_says(call_text("search_hotels", arguments))
        names = [one.id for one in database().find_hotels(trip.city, trip.start, trip.nights)]
        assert [line.split()[0] for line in outcome.messages[0].content.split(", ")] == names
    dates = begun(trip, told).agent_says(call_text("search_journeys", {"start": f"2026-05-{trip.start:02d}"}))
    assert dates.messages == begun(trip, told).agent_says(call_text("search_journeys", {})).messages


def test_chinese_date_is_its_day() -> None:
    episode = begun(trip_of(3, "zh"), "去上海，5月10日出发，住3晚", "zh")
    assert episode.state()["filled"] == {"city": "上海", "start": "5月10日", "nights": "3晚"}
    episode.agent_says(call_text("search_journeys", {}))
    found = planner("zh").databases["zh"].find_journeys("上海", 10, 3)
    assert [one["id"] for one in episode.state()["found"]["journey"]] == [one.id for one in found]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (call_text("search_hotels", {}), "not known yet: city, first day, nights"),
        (call_text("search_hotels", {"town": "Wuhan"}), "town"),
        (call_text("search_hotel", {}), "did you mean 'search_hotels'"),
        (call_text("book_trip", {"journey": "J1", "hotel": 3}), "hotel is missing"),
        (call_text("search_hotels", {"city": "Atlantis", "start": 3, "nights": 2}), "not known yet: city"),
        (call_text("search_hotels", {"city": ["x"], "start": True, "nights": None}), "not known yet"),
        ("<tool_call>nonsense</tool_call>", "not valid JSON"),
    ],
)
def test_faulty_calls_are_told_to_the_agent(call: str, words: str) -> None:
    outcome = begun(trip_of(1)).agent_says(call)
    assert outcome.termination is None
    assert words in outcome.messages[0].content


def test_booking_ends_it() -> None:
    trip = trip_of(8)
    assert begun(trip).agent_says(call_text("book_trip", cheapest(trip))).termination == "success"
    lower = {part: one.lower() for part, one in cheapest(trip).items()}
    assert begun(trip).agent_says(call_text("book_trip", lower)).termination == "success"
    wrong = begun(trip).agent_says(call_text("book_trip", {**cheapest(trip), "hotel": "H999"}))
    assert (wrong.termination, wrong.reward, wrong.acts["broken"]) == ("failure", -1.0, ["hotel"])


def test_several_look_ups_in_one_reply() -> None:
    trip = trip_of(3)
    told = f"to {trip.city}, from {trip.start} May, for {trip.nights} nights, to visit {trip.purpose}"
    calls = "".join(call_text(tool, {}) for tool in ("search_journeys", "search_hotels", "search_sites"))
    outcome = begun(trip, told).agent_says(calls)
    assert [message.name for message in outcome.messages] == ["search_journeys", "search_hotels", "search_sites"]


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="slack 3"):
        TripPlanning.Config(slack=3)
    with pytest.raises(ConfigError, match="max_turns 4"):
        TripPlanning.Config(max_turns=4)
    other = TripPlanning(TripPlanning.Config(database_seed=5)).databases["en"]
    assert other.hotels != database().hotels
