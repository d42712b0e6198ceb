"""What a seed draws for order_taking: the order, and what its user volunteers, is vague about, misstates or changes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from slea_llm.environments.order_taking_language import SLOTS, Language


class Shares(Protocol):
    """The shares of users to whom something happens, each in [0, 1]."""

    @property
    def undecided_share(self) -> float: ...

    @property
    def sold_out_share(self) -> float: ...

    @property
    def change_share(self) -> float: ...


def add_events(rng: random.Random, goal: dict[str, Any], language: Language, shares: Shares) -> None:
    """Make the user of a goal undecided, meet a dish that is sold out, or change their mind."""
    order: dict[str, str] = goal["order"]
    user: dict[str, Any] = goal["user"]
    if rng.random() < shares.undecided_share:
        order["dish"] = ""
        goal["undecided"] = ["dish"]
        user["undecided"] = {"dish": rng.randint(0, 1)}
        for key in ("vague", "misstated"):
            user[key] = {slot: value for slot, value in user[key].items() if slot != "dish"}
        user["volunteers"] = [slot for slot in user["volunteers"] if slot != "dish"]
        together = {slot: [one for one in others if one != "dish"] for slot, others in user["together"].items()}
        user["together"] = {slot: others for slot, others in together.items() if others and slot != "dish"}
    elif rng.random() < shares.sold_out_share:
        first = rng.choice([dish for dish in language.dishes if dish != order["dish"]])
        goal["sold_out"] = [first]
        user["misstated"] = {**user["misstated"], "dish": first}
    taken = {*user["misstated"], *goal.get("undecided", ()), *goal.get("sold_out", ())}
    free = [slot for slot in order if slot not in taken]
    if free and rng.random() < shares.change_share:
        slot = rng.choice(free)
        while (value := draw_value(rng, slot, language)) == order[slot]:
            pass
        user["misstated"] = {**user["misstated"], slot: value}
        user["changes"] = [slot]


def draw_order(rng: random.Random, language: Language) -> dict[str, str]:
    wanted = {"dish", "quantity", "address"}
    wanted |= {slot for slot, share in (("time", 0.5), ("phone", 0.4)) if rng.random() < share}
    return {slot: draw_value(rng, slot, language) for slot in SLOTS if slot in wanted}


def draw_value(rng: random.Random, slot: str, language: Language) -> str:
    if slot == "dish":
        return rng.choice(language.dishes)
    if slot == "quantity":
        return rng.choice(language.quantities)
    if slot == "address":
        return language.address(number=rng.randint(1, 60), street=rng.choice(language.streets))
    if slot == "time":
        return f"{rng.randint(11, 21)}:{rng.choice(('00', '15', '30', '45'))}"
    return f"555-01{rng.randint(0, 99):02d}"


def draw_volunteers(rng: random.Random) -> list[str]:
    """What the user tells at the opening: nothing, or the start of its order."""
    choices = ((), ("dish",), ("dish", "quantity"), ("address",), ("dish", "address"), ("dish", "quantity", "address"))
    return list(rng.choices(choices, weights=(30, 25, 20, 5, 10, 10))[0])


def draw_together(rng: random.Random, slots: Sequence[str]) -> dict[str, list[str]]:
    """Slots that the user tells along with the one that was asked for."""
    together = {slot: [rng.choice([other for other in slots if other != slot])] for slot in slots}
    return {slot: others for slot, others in together.items() if rng.random() < 0.2}


def draw_misstated(rng: random.Random, order: Mapping[str, str], language: Language, share: float) -> dict[str, str]:
    """One slot, rarely two, with another value of its kind."""
    if rng.random() >= share:
        return {}
    wrong: dict[str, str] = {}
    for slot in rng.sample(list(order), k=2 if rng.random() < 0.2 else 1):
        while (value := draw_value(rng, slot, language)) == order[slot]:
            pass
        wrong[slot] = value
    return wrong
