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
from tests.support.paraphrases import lines_of, understands

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


SAID = sorted((FILE.parent / "said").glob("*.jsonl"))
"""50 sentences per environment and language by someone who had read the documentation only, with what they mean."""
OTHERWISE = {
    "Did anybody upgrade the database lately?": "asks for a recent change as much as for the version",
    "百货商场买的，星期四上门，是这样吗？": "says that someone comes, so it offers a visit too",
}
"""Sentences that are heard otherwise than their writer labelled them, and why that is held to be right."""


@pytest.mark.parametrize("file", SAID, ids=lambda file: file.stem)
def test_what_a_stranger_wrote_is_understood(file: Path) -> None:
    name, language, lines = lines_of(file)
    assert len({line["text"] for line in lines}) == 50
    missed = {line["text"] for line in lines if not understands(name, language, line)[0]}
    assert missed == {line["text"] for line in lines} & OTHERWISE.keys()


def test_every_paraphrased_environment_has_a_strangers_sentences() -> None:
    named = {f"{name}.{code}" for name in PARAPHRASES for code in ("en", "zh")}
    assert {file.stem for file in SAID} == named


# What broadened patterns must not catch.
WITHOUT_EFFECT = [
    ("order_taking", "en", "Our food is very good."),
    ("order_taking", "en", "Would you like anything else?"),
    ("order_taking", "zh", "我们的菜很好吃。"),
    ("complaint", "en", "Unfortunately nobody can visit you."),
    ("complaint", "zh", "我们暂时无法安排师傅上门。"),
    ("complaint", "zh", "今天不能派人过去。"),
    ("tech_support", "en", "It is not the password that expired."),
    ("strategy_game", "en", "We will not put a wall around the town."),
    ("strategy_game", "zh", "别让探子看见。"),
    ("code_task", "en", "Did I get anything wrong?"),
    ("code_task", "zh", "我没记错吧？"),
    ("code_task", "zh", "有没有不对的地方？"),
]


@pytest.mark.parametrize(("name", "language", "reply"), WITHOUT_EFFECT)
def test_what_only_sounds_like_an_act_does_nothing(name: str, language: str, reply: str) -> None:
    assert understood(name, language, reply) == set()


# Alternatives are asked for; what stands beside them, and "or" that offers none, is read back.
ALTERNATIVES = [
    ("code_task", "en", "CSV or JSON?", {"source"}, {}),
    ("code_task", "en", "Is it CSV, JSON or something else?", {"source"}, {}),
    ("code_task", "en", "And what do I fill: a dict, a list, a database?", {"target"}, {}),
    ("code_task", "en", "Do I read CSV or JSON into a sorted list?", {"source"}, {"target": "a sorted list"}),
    ("code_task", "en", "Should I skip bad amounts or raise ValueError?", {"bad"}, {}),
    ("code_task", "en", "CSV text, or am I wrong?", set(), {"source": "CSV text"}),
    ("code_task", "en", "What I noted: CSV text, a dict, is that right?", set(), "source target"),
    ("code_task", "zh", "用字典还是列表？", {"target"}, {}),
    ("code_task", "zh", "要不要把金额加起来？", {"repeated"}, {}),
    ("code_task", "zh", "还是用字典，对吗？", set(), {"target": "按编号的字典"}),
    ("trip_planning", "en", "Shanghai or Hangzhou?", {"city"}, {}),
    ("trip_planning", "en", "Where do you go, Shanghai, Beijing or Tokyo?", {"city"}, {}),
    ("trip_planning", "en", "You go to Shanghai for business or pleasure?", {"purpose"}, {"city": "Shanghai"}),
    ("trip_planning", "en", "So 1500 dollars or less, right?", set(), {"budget": "1500 dollars"}),
    ("trip_planning", "zh", "去上海出差还是旅游？", {"purpose"}, {"city": "上海"}),
    ("trip_planning", "zh", "住3晚还是4晚？", {"nights"}, {}),
    ("complaint", "en", "Does it leak or does it make a loud noise?", {"symptom"}, {}),
    ("complaint", "zh", "是漏水还是不排水？", {"symptom"}, {}),
    ("complaint", "zh", "周五还是周六方便？", {"day"}, {}),
]


@pytest.mark.parametrize(("name", "language", "reply", "asks", "reads_back"), ALTERNATIVES)
def test_a_question_of_alternatives_asks_and_reads_nothing_back(
    name: str, language: str, reply: str, asks: set[str], reads_back: dict[str, str] | str
) -> None:
    environment = environment_of(name, language)
    acts = environment.start(environment.task(0)).agent_says(reply).acts
    assert {*acts["asks"]} == asks
    heard = acts["reads_back"]
    assert (set(heard) == set(reads_back.split())) if isinstance(reads_back, str) else (heard == reads_back)


@pytest.mark.parametrize("name", ["tech_support", "strategy_game"])
def test_without_placeholders_what_looks_like_one_is_what_it_says(name: str) -> None:
    environment = environment_of(name, "en")
    episode: Any = environment.start(environment.task(0))
    episode.notes.filled = {"error": "timed_out"}
    acts = episode.agent_says("So {notes}, and {error}. Right?").acts
    assert acts["heard"] == "So {notes}, and {error}. Right?"
    assert not acts.get("reads_back")


@pytest.mark.parametrize(
    ("language", "reply", "gone", "instead"),
    [
        ("en", "The gyoza is sold out, shall I put down ramen?", "gyoza", "ramen"),
        ("en", "We ran out of sushi, sorry.", "sushi", None),
        ("zh", "烤鸭卖完了，换成红烧肉可以吗？", "烤鸭", "红烧肉"),
    ],
)
def test_what_stands_behind_a_dish_that_is_gone_is_offered_instead(
    language: str, reply: str, gone: str, instead: str | None
) -> None:
    environment = environment_of("order_taking", language)
    acts = environment.start(environment.task(0)).agent_says(reply).acts
    assert (acts["regretted"].get("dish"), acts["suggests"].get("dish")) == (gone, instead)
    assert not acts["reads_back"]


@pytest.mark.parametrize(
    ("language", "reply", "asks", "reads_back", "suggests"),
    [
        ("en", "The ramen is great tonight.", (), {}, {"dish": "ramen"}),
        ("en", "Ramen is great, how many would you like?", ("quantity",), {"dish": "ramen"}, {}),
        ("en", "The ramen is really good, is that what you want?", (), {"dish": "ramen"}, {}),
        ("zh", "烤鸭很不错。", (), {}, {"dish": "烤鸭"}),
        ("zh", "烤鸭不错，请问要几份？", ("quantity",), {"dish": "烤鸭"}, {}),
        ("zh", "烤鸭，没错吧？", (), {"dish": "烤鸭"}, {}),
    ],
)
def test_praise_recommends_unless_it_goes_on_asking(
    language: str, reply: str, asks: tuple[str, ...], reads_back: dict[str, str], suggests: dict[str, str]
) -> None:
    environment = environment_of("order_taking", language)
    acts = environment.start(environment.task(0)).agent_says(reply).acts
    assert (acts["asks"], acts["reads_back"], acts["suggests"]) == (asks, reads_back, suggests)


@pytest.mark.parametrize(
    ("replies", "mend"),
    [
        (["The TLS versions differ. Update the driver so that it supports TLS 1.3."], "tls_after_upgrade"),
        (["The server wants another login plugin.", "Install a newer driver."], "plugin_after_upgrade"),
        (["The upgrade needs TLS.", "Install a newer driver."], "tls_after_upgrade"),
        (["Install a newer driver."], None),
        (["It is the firewall.", "Install a newer driver."], None),
        (["It is the firewall. Open the port, and raise max_connections."], None),
    ],
)
def test_a_newer_client_mends_the_fault_of_the_upgrade_that_was_named(replies: list[str], mend: str | None) -> None:
    environment = environment_of("tech_support", "en")
    episode = environment.start(environment.task(0))
    for reply in replies:
        acts = episode.agent_says(reply).acts
        episode.user_says("Hm.")
    assert acts["proposes"].get("mend") == mend
