"""The rules of the small strategy game: what an order does to the land, day by day. No chance after the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ORDERS: tuple[str, ...] = (
    "gather",
    "farm",
    "barracks",
    "walls",
    "train",
    "research",
    "scout",
    "march",
    "hide",
    "attack",
)
COSTS: Mapping[str, int] = {"farm": 30, "barracks": 40, "walls": 30, "train": 30, "research": 50}
RICH = 100
"""Gold from which the land counts as rich."""

GATHERED, FARM_YIELD = 40, 20
TROOPS, MOST_TROOPS = 3, 8
MOST_TECHNOLOGY = 3
ALERT = 6
"""What the enemy adds when its scouts see the army."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Enemy:
    """What is hidden: strength at the start, growth a day, the days on which its scouts watch, and its raid.

    `raid_day` 0: no raid.
    """

    strength: float
    growth: float
    scouting: tuple[int, ...]
    raid_day: int
    raid_strength: float


@dataclass(slots=True, kw_only=True)
class Land:
    """All that changes. `day` is the day on which the next order is given, from 1 on."""

    day: int = 1
    gold: int
    farms: int = 0
    barracks: bool = False
    walls: int = 0
    army: int = 0
    technology: int = 0
    shown: bool = False
    alerted: float = 0.0
    seen: float | None = None
    outcome: str = ""
    events: list[str] = field(default_factory=list)

    @property
    def force(self) -> float:
        """Strength of the army: every technology adds half of its number."""
        return self.army * (1 + 0.5 * self.technology)

    @property
    def defence(self) -> float:
        return self.force + 4.0 * self.walls


def strength(enemy: Enemy, land: Land) -> float:
    """The enemy's strength today."""
    return enemy.strength + enemy.growth * (land.day - 1) + land.alerted


def order(land: Land, enemy: Enemy, name: str) -> None:
    """Give an order, let the day pass. `events` names what happened; `outcome` is `won` or `lost` at the end."""
    land.events = []
    refused = _refusal(land, name)
    if refused:
        land.events.append(refused)
    else:
        land.gold -= COSTS.get(name, 0)
        _carry_out(land, enemy, name)
    if not land.outcome:
        _night(land, enemy)


def _refusal(land: Land, name: str) -> str:
    """Why an order cannot be carried out, or the empty text."""
    if COSTS.get(name, 0) > land.gold:
        return "no_gold"
    if name == "train" and not land.barracks:
        return "no_barracks"
    if name == "train" and land.army >= MOST_TROOPS:
        return "no_room"
    if name in ("march", "attack", "hide") and not land.army:
        return "no_army"
    if name == "attack" and not land.shown:
        return "not_marched"
    if (name == "research" and land.technology >= MOST_TECHNOLOGY) or (name == "barracks" and land.barracks):
        return "done_before"
    return ""


def _carry_out(land: Land, enemy: Enemy, name: str) -> None:
    if name == "gather":
        land.gold += GATHERED + FARM_YIELD * land.farms
    elif name == "farm":
        land.farms += 1
    elif name == "barracks":
        land.barracks = True
    elif name == "walls":
        land.walls += 1
    elif name == "train":
        land.army = min(MOST_TROOPS, land.army + TROOPS)
    elif name == "research":
        land.technology += 1
    elif name == "scout":
        land.seen = strength(enemy, land)
        land.events.append("scouted")
    elif name in ("march", "hide"):
        land.shown = name == "march"
    elif name == "attack":
        land.outcome = "won" if land.force > strength(enemy, land) else "lost"


def _night(land: Land, enemy: Enemy) -> None:
    if land.shown and land.day in enemy.scouting:
        land.alerted += ALERT
        land.seen = None  # what was seen of the enemy is no longer so
        land.events.append("revealed")
    if land.day == enemy.raid_day:
        _raid(land, enemy)
    land.day += 1


def _raid(land: Land, enemy: Enemy) -> None:
    if land.defence >= enemy.raid_strength:
        land.events.append("raid_beaten")
        return
    if land.defence <= 0:
        land.outcome = "lost"
        return
    land.gold //= 2
    land.army = max(0, land.army - TROOPS)
    land.events.append("raided")
