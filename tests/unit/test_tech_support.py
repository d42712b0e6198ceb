"""tech_support: findings are read off what users say, and a case is solved by a named fault and its mend."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import yaml

from slea_llm import assets
from slea_llm.environments.speech import Speech
from slea_llm.environments.tech_support import FACTS, SupportEpisode, TechSupport, candidates
from slea_llm.errors import ConfigError
from slea_llm.types import Task
from slea_llm.users.scripted import ScriptedUser
from tests.support.dialogue import play

FAULTS = Speech("tech_support", "en").data["faults"]


def case(fault: str, language: str = "en") -> SupportEpisode:
    environment = TechSupport(TechSupport.Config(language=language))  # type: ignore[arg-type]
    return environment.start(Task(id="t", seed=0, goal={"fault": fault}, language=language))


@pytest.mark.parametrize("code", ["en", "zh"])
def test_each_finding_is_read_off_every_way_of_telling_it(code: str) -> None:
    speech = Speech("tech_support", code)
    user = yaml.safe_load(assets.find("data", f"tech_support/user.{code}.yaml").read_text(encoding="utf-8"))
    numbers = {"host": "db-07", "ip": "10.1.2.3", "pid": "4711", "time": "09:30:12", "small": "5", "minor": "4"}
    for fact, findings in speech.data["texts"].items():
        for finding, texts in findings.items():
            for text, form in itertools.product(texts, user["tell"][fact]):
                for name, value in numbers.items():
                    text = text.replace(f"<{name}>", value)
                assert speech.values(form.format(**{fact: text})) == {fact: finding}
    for vague in itertools.chain(*user["vague"].values()):
        assert speech.values(vague) == {}
    assert {speech.verdict(text) for text in user["accept"]} == {True}
    assert {speech.verdict(text) for text in user["reject"]} == {False}


def test_findings_part_all_faults() -> None:
    for code in ("en", "zh"):
        data = Speech("tech_support", code).data
        assert data["faults"] == FAULTS
        for fault, entry in FAULTS.items():
            findings = {**data["usual"], **entry["findings"]}
            assert findings.keys() == set(FACTS)
            assert candidates(findings, FAULTS, data["usual"]) == [fault]
    errors = [entry["findings"]["error"] for entry in FAULTS.values()]
    assert all(errors.count(error) >= 2 for error in errors), "the error alone must not give the fault away"


def test_fault_and_mend_solve_the_case() -> None:
    episode = case("firewall_blocks")
    outcome = episode.agent_says("<think>so</think>The firewall blocks the port. Open the port.")
    assert outcome.acts["proposes"] == {"mend": "firewall_blocks"}
    assert episode.user_says("Great, it connects now.").termination == "success"


@pytest.mark.parametrize(
    "said",
    [
        "Open the port in the firewall, or raise max_connections, or free some disk space.",
        "The disk is full. Free some space.",
        "Please restart the service.",
        "Is it the firewall?",
        "It is not the firewall.",
    ],
)
def test_a_list_of_guesses_and_advice_for_any_case_solve_nothing(said: str) -> None:
    episode = case("firewall_blocks")
    episode.agent_says(said)
    assert episode.user_says("Great, it connects now.").termination is None


def test_a_mend_needs_the_name_and_no_denial_by_the_user() -> None:
    episode = case("pool_too_small")
    episode.agent_says("Please tune it: the pool is too small. Increase the pool size.")
    assert episode.user_says("No, still the same.").termination is None
    episode.agent_says("The pool is too small. Increase the pool size.")
    assert episode.user_says("Done. It works, thank you!").termination == "success"


def test_skill_decides_how_much_is_vague() -> None:
    novice, other = (TechSupport(TechSupport.Config(novice_share=share)) for share in (1.0, 0.0))
    vague = [sum(len(e.task(seed).goal["user"]["vague"]) for seed in range(60)) for e in (novice, other)]
    assert vague[0] > 2 * vague[1]
    with pytest.raises(ConfigError, match="novice_share 2"):
        TechSupport.Config(novice_share=2)
    with pytest.raises(ConfigError, match="max_turns 7"):
        TechSupport.Config(max_turns=7)


def test_guessing_all_day_rarely_helps() -> None:
    """Eight faults and a patience of two or three: naming one after the other succeeds in about a third at most."""
    environment, user = TechSupport(TechSupport.Config()), ScriptedUser(ScriptedUser.Config())
    wording = Speech("tech_support", "en").agents["mend"]

    class Guesser:
        def __init__(self, seed: int) -> None:
            self._faults = random.Random(seed).sample(list(FAULTS), len(FAULTS))  # noqa: S311

        def act(self, state: Any, messages: Any) -> str:
            del messages
            return str(wording[self._faults[state["turn"] % len(self._faults)]]["replies"][0])

    ends = [play(environment, user, Guesser(seed), environment.task(seed)).termination for seed in range(24)]
    assert ends.count("success") / len(ends) < 0.5
