"""strategy_game: the rules, and by measurement the good and bad patterns of play."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from slea_llm.environments import strategy_rules as rules
from slea_llm.environments.speech import call_text
from slea_llm.environments.strategy_game import StrategyEpisode, StrategyGame, plan
from slea_llm.environments.strategy_rules import Enemy, Land
from slea_llm.errors import ConfigError
from slea_llm.types import Message, State, Task
from slea_llm.users.scripted import ScriptedUser
from tests.support.dialogue import play

GAMES = 40
CALM = Enemy(strength=5.0, growth=0.0, scouting=(), raid_day=0, raid_strength=0.0)


@dataclass(frozen=True)
class Commander:
    """The expert, with another order where `choose` gives one."""

    choose: Callable[[State], str | None]

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del messages
        order = self.choose(state) or plan(state).name.removeprefix("order.")
        return call_text("order", {"do": order})


@cache
def tasks(rich: bool) -> tuple[Task, ...]:
    game = StrategyGame(StrategyGame.Config(rich_share=float(rich)))
    return tuple(game.task(seed) for seed in range(GAMES))


def measured(choose: Callable[[State], str | None], *, rich: bool) -> tuple[float, float]:
    """Share of wars won and the mean number of days."""
    game, user = StrategyGame(StrategyGame.Config()), ScriptedUser(ScriptedUser.Config())
    played = [play(game, user, Commander(choose), task) for task in tasks(rich)]
    won = [one.termination == "success" for one in played]
    return sum(won) / GAMES, sum(one.turns for one in played) / GAMES


def strong(state: State) -> bool:
    return state["seen"] is not None and state["force"] > state["seen"] + 1.0


@pytest.mark.parametrize("rich", [True, False])
def test_the_careful_commander_always_wins(rich: bool) -> None:
    assert measured(lambda state: None, rich=rich)[0] == 1.0  # noqa: ARG005


def test_good_technology_when_rich() -> None:
    """Those who are rich and gather more in place of research lose most wars."""
    poorer, _ = measured(lambda s: "gather" if plan(s).name == "order.research" and s["rich"] else None, rich=True)
    assert poorer < 0.6


def test_bad_technology_when_poor() -> None:
    """Research before troops costs the poor days, and gains them nothing."""
    _, careful = measured(lambda state: None, rich=False)  # noqa: ARG005
    won, days = measured(lambda s: "research" if s["technology"] < 1 and s["gold"] >= 50 else None, rich=False)
    assert won <= 1.0
    assert days > careful + 0.5


@pytest.mark.parametrize("rich", [True, False])
def test_bad_showing_the_army_to_scouts(rich: bool) -> None:
    """Marching under the eyes of scouts, and attacking all the same, loses wars that waiting a day wins."""

    def careless(state: State) -> str | None:
        return "attack" if state["shown"] else "march" if strong(state) else None

    assert measured(careless, rich=rich)[0] < 0.9


@pytest.mark.parametrize("rich", [True, False])
def test_bad_attacking_without_scouting(rich: bool) -> None:
    def blind(state: State) -> str | None:
        return "attack" if state["shown"] else "march" if state["army"] >= 6 else None

    assert measured(blind, rich=rich)[0] < 0.8


# rules ----------------------------------------------------------------------------------------------------------------


def after(orders: str, *, gold: int = 200, enemy: Enemy = CALM) -> Land:
    land = Land(gold=gold)
    for name in orders.split():
        rules.order(land, enemy, name)
    return land


def test_orders_cost_and_yield() -> None:
    land = after("gather farm gather", gold=30)
    assert (land.day, land.gold, land.farms) == (4, 30 + 40 - 30 + 60, 1)
    land = after("barracks train train train research")
    assert (land.army, land.technology, land.force, land.gold) == (8, 1, 12.0, 200 - 40 - 90 - 50)


@pytest.mark.parametrize(
    ("orders", "event"),
    [
        ("train", "no_barracks"),
        ("barracks barracks", "done_before"),
        ("attack", "no_army"),
        ("barracks train attack", "not_marched"),
        ("barracks train train train gather train", "no_room"),
        ("farm farm farm farm farm farm farm", "no_gold"),
    ],
)
def test_what_cannot_be_done_passes_the_day_and_says_why(orders: str, event: str) -> None:
    assert after(orders).events == [event]


def test_attack_needs_more_force_than_the_enemy() -> None:
    assert after("barracks train train march attack").outcome == "won"
    assert after("barracks train march attack").outcome == "lost"


def test_scouts_that_see_the_army_make_the_enemy_arm() -> None:
    watched = Enemy(strength=5.0, growth=0.0, scouting=(4,), raid_day=0, raid_strength=0.0)
    land = after("barracks train scout march", enemy=watched)
    assert (land.events, land.alerted, land.seen) == (["revealed"], rules.ALERT, None)
    assert after("barracks train train march attack", enemy=watched).outcome == "lost"
    assert after("barracks train train hide gather march attack", enemy=watched).outcome == "won"


def test_a_raid_takes_an_undefended_land() -> None:
    raided = Enemy(strength=5.0, growth=0.0, scouting=(), raid_day=3, raid_strength=3.0)
    assert after("gather gather gather", enemy=raided).outcome == "lost"
    assert after("gather walls gather", enemy=raided).events == ["raid_beaten"]
    weak = Enemy(strength=5.0, growth=0.0, scouting=(), raid_day=3, raid_strength=5.0)
    land = after("barracks train gather", enemy=weak)
    assert (land.events, land.army, land.gold) == (["raided"], 0, (200 - 70 + 40) // 2)


# the dialogue ---------------------------------------------------------------------------------------------------------


def begun(seed: int = 1) -> StrategyEpisode:
    game = StrategyGame(StrategyGame.Config())
    return game.start(game.task(seed))


def test_words_and_calls_order_the_same() -> None:
    spoken, called = begun(), begun()
    assert spoken.agent_says("<think>Attack!</think>Gather gold, then train.").acts["order"] == "gather"
    assert called.agent_says(call_text("order", {"do": "gather"})).acts["order"] == "gather"
    assert spoken.state() == called.state()


def test_no_order_passes_no_day() -> None:
    for said in ("Shall I attack?", "A fine day.", "Do not attack."):
        episode = begun()
        assert episode.agent_says(said).to_user
        assert episode.state()["day"] == 1
    unknown = begun().agent_says(call_text("order", {"do": "fly"}))
    assert "gather" in unknown.messages[0].content


def test_the_public_state_tells_no_strength_before_it_was_scouted() -> None:
    episode = begun()
    assert episode.state()["seen"] is None
    episode.agent_says("Scout the enemy.")
    assert episode.state()["seen"] > 0


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="rich_share 7"):
        StrategyGame.Config(rich_share=7)
    with pytest.raises(ConfigError, match="max_turns 3"):
        StrategyGame.Config(max_turns=3)
