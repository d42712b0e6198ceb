"""A small database of journeys, hotels and sites, made from a seed; every look-up reads it anew."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WEEK = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """There and back; `weekdays` (0 to 6) are the days on which it runs."""

    id: str
    city: str
    kind: str
    price: int
    weekdays: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hotel:
    """`price` is for one night; `full` holds the days of the month on which no room is left."""

    id: str
    city: str
    name: str
    price: int
    full: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a trip is for; `fee` is paid once, `weekdays` are its opening days."""

    id: str
    city: str
    name: str
    purpose: str
    fee: int
    weekdays: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """What the user wants. `start` is a day of the month, `budget` the most that the whole may cost."""

    city: str
    start: int
    nights: int
    budget: int
    purpose: str

    @property
    def days(self) -> range:
        """The days of the month on which the traveller is there, the last one included."""
        return range(self.start, self.start + self.nights + 1)


class TripDatabase:
    """Journeys, hotels and sites of every city. Day 1 of the month is a Monday (weekday 0)."""

    def __init__(self, data: Mapping[str, Any], cities: Sequence[str], purposes: Sequence[str], *, seed: int) -> None:
        self.journeys: list[Journey] = []
        self.hotels: list[Hotel] = []
        self.sites: list[Site] = []
        for city in cities:
            self._add_city(random.Random(f"trip database/{seed}/{cities.index(city)}"), data, city, purposes)  # noqa: S311 (not a secret)

    def _add_city(self, rng: random.Random, data: Mapping[str, Any], city: str, purposes: Sequence[str]) -> None:
        far = rng.randint(60, 200)
        for kind in data["journeys"]:
            for _ in range(2):
                price = far + 10 * rng.randint(0, 20)
                weekdays = frozenset(rng.sample(range(WEEK), rng.randint(4, 6)))
                self.journeys.append(
                    Journey(id=f"J{len(self.journeys) + 1}", city=city, kind=kind, price=price, weekdays=weekdays)
                )
        for name in rng.sample(list(data["hotels"]), 5):
            full = frozenset(rng.sample(range(1, 29), 4))
            self.hotels.append(
                Hotel(id=f"H{len(self.hotels) + 1}", city=city, name=name, price=10 * rng.randint(4, 22), full=full)
            )
        for number, purpose in enumerate(purposes):
            for stem in rng.sample(list(data["sites"]), 2):
                self.sites.append(
                    Site(
                        id=f"S{len(self.sites) + 1}",
                        city=city,
                        name=str(data["site_name"]).format(stem=stem, purpose=data["purpose_short"][purpose]),
                        purpose=purpose,
                        fee=5 * rng.randint(0, 6),
                        weekdays=frozenset(rng.sample(range(5), 4) + ([5] if number % 2 else [])),
                    )
                )

    def find_journeys(self, city: str, start: int, nights: int) -> list[Journey]:
        """Journeys that run on the first and on the last day."""
        ends = {weekday(start), weekday(start + nights)}
        return [one for one in self.journeys if one.city == city and ends <= one.weekdays]

    def find_hotels(self, city: str, start: int, nights: int) -> list[Hotel]:
        """Hotels with a room for every night."""
        return [one for one in self.hotels if one.city == city and not one.full & set(range(start, start + nights))]

    def find_sites(self, city: str, purpose: str, start: int, nights: int) -> list[Site]:
        """Sites for the purpose that are open on one of the days."""
        open_days = {weekday(day) for day in range(start, start + nights + 1)}
        return [one for one in self.sites if one.city == city and one.purpose == purpose and one.weekdays & open_days]

    def faults(self, trip: Trip, *, journey: str, hotel: str, site: str) -> list[str]:
        """Names of the constraints that a plan breaks: journey, hotel, site, budget."""
        found_journey = next(
            (j for j in self.find_journeys(trip.city, trip.start, trip.nights) if j.id == journey), None
        )
        found_hotel = next((h for h in self.find_hotels(trip.city, trip.start, trip.nights) if h.id == hotel), None)
        sites = self.find_sites(trip.city, trip.purpose, trip.start, trip.nights)
        found_site = next((s for s in sites if s.id == site), None)
        parts = {"journey": found_journey, "hotel": found_hotel, "site": found_site}
        broken = [name for name, part in parts.items() if part is None]
        if found_journey and found_hotel and found_site:
            cost = found_journey.price + trip.nights * found_hotel.price + found_site.fee
            broken += ["budget"] if cost > trip.budget else []
        return broken

    def costs(self, city: str, start: int, nights: int, purpose: str) -> list[int]:
        """The cost of every whole plan without regard to a budget, cheapest first."""
        return sorted(
            journey.price + nights * hotel.price + site.fee
            for journey in self.find_journeys(city, start, nights)
            for hotel in self.find_hotels(city, start, nights)
            for site in self.find_sites(city, purpose, start, nights)
        )


def weekday(day: int) -> int:
    """0 (Monday) to 6 of a day of the month."""
    return (day - 1) % WEEK
