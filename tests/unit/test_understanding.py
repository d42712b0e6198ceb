"""Paraphrases of what an agent may say are understood, in every environment and both languages."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from slea_llm import registry
from slea_llm.errors import UnsupportedError
from slea_llm.interfaces import Environment
from slea_llm.types import Message

FILE = Path(__file__).resolve().parents[1] / "fixtures" / "paraphrases.yaml"
PARAPHRASES: dict[str, dict[str, dict[str, list[str]]]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))


@cache
def environment_of(name: str, language: str) -> Environment:
    component = registry.load("environment", name)
    try:
        environment: Environment = component(component.Config(language=language))
    except UnsupportedError as error:  # code_task, where no sandbox can be made
        pytest.skip(str(error))
    return environment


def understood(name: str, language: str, reply: str) -> set[str]:
    """Slots asked for and acts done by a reply at the start of a dialogue."""
    environment = environment_of(name, language)
    episode: Any = environment.start(environment.task(0))
    episode.user_says("...")
    if name == "complaint":
        episode.notes.filled["symptom"] = "known"  # an offer counts once the trouble is known
    acts = episode.agent_says(reply).acts
    found = {*acts.get("asks", ()), *acts.get("does", ())}
    found |= {acts["order"]} if "order" in acts else set()
    found |= {"recommends"} if acts.get("recommends") else set()
    found |= {"sold_out"} if acts.get("regrets") else set()
    proposes = acts.get("proposes", {})
    found |= {f"names:{fault}" for fault in acts.get("named", ()) if len(acts["named"]) == 1}
    found |= {f"mends:{proposes['mend']}"} if "mend" in proposes else set()
    return found | {f"both:{fault}" for fault in acts.get("named", ()) if f"mends:{fault}" in found}


@pytest.mark.parametrize(("name", "language"), [(name, code) for name in PARAPHRASES for code in PARAPHRASES[name]])
def test_paraphrases_are_understood(name: str, language: str) -> None:
    said = [(act, reply) for act, replies in PARAPHRASES[name][language].items() for reply in replies]
    heard = [(act, reply, understood(name, language, reply)) for act, reply in said]
    missed = [(act, reply, found) for act, reply, found in heard if act not in found]
    assert not missed


NOTHING = {
    "en": ["Thank you.", "Hm.", "I like turtles.", "The weather is fine.", "Well then.", "asdf qwer", "..."],
    "zh": ["谢谢。", "嗯。", "我喜欢乌龟。", "天气不错。", "那好吧。", "……"],
}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", sorted(PARAPHRASES))
def test_what_means_nothing_does_nothing(name: str, language: str) -> None:
    for reply in NOTHING[language]:
        assert understood(name, language, reply) == set(), reply


@pytest.mark.parametrize("name", sorted(PARAPHRASES))
def test_a_thought_and_a_broken_call_do_nothing(name: str) -> None:
    some = [replies[0] for replies in PARAPHRASES[name]["en"].values()]
    for reply in (f"<think>{' '.join(some)}</think>Hm.", f"<think>{some[0]}"):
        assert understood(name, "en", reply) == set()
    environment = environment_of(name, "en")
    for call in ("<tool_call>{", '<tool_call>{"name": "fly"}</tool_call>', "<tool_call>[]</tool_call>"):
        outcome = environment.start(environment.task(0)).agent_says(call)
        assert [type(message) for message in outcome.messages] == [Message]
        assert (outcome.termination, outcome.to_user, outcome.messages[0].role) == (None, False, "tool")


def test_every_environment_of_this_library_has_paraphrases() -> None:
    adapters = {"gymnasium", "textworld", "verifiers"}
    assert set(PARAPHRASES) >= registry.ROWS["environment"].keys() - adapters
