"""complaint: the order of the steps decides, with the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from slea_llm.environments.complaint import Complaint
from slea_llm.environments.foreign import Saying
from slea_llm.environments.speech import call_text
from slea_llm.errors import ConfigError
from slea_llm.types import Task
from slea_llm.users.scripted import ScriptedUser
from tests.support.dialogue import Played, play

SOOTHE = "I am very sorry."
NUMBER = "What is your order number?"
SHOP = "Where did you buy it?"
OFFER = "We can send a technician. Which day suits you?"
CHECK = "So {notes}. Is that right?"
BOOK = call_text("book_visit", {})


def task_of(*, patience: int = 1, volunteers: Sequence[str] = ("symptom",), angry: bool = True) -> Task:
    visit = {"symptom": "does not spin", "order_number": "AB12345", "channel": "online shop", "day": "Friday"}
    first = {"day": "offers_visit", **(dict.fromkeys(("order_number", "channel"), "soothes") if angry else {})}
    user = {
        "values": visit,
        "volunteers": list(volunteers),
        "together": {},
        "vague": {},
        "misstated": {},
        "patience": patience,
        "wording": "complaint/user_angry.en.yaml",
        "first": first,
        "welcomes": {"soothes": "calmed", "offers_visit": "convinced"},
    }
    return Task(id="t", seed=0, goal={"visit": visit, "user": user})


def ended(replies: Sequence[str], **traits: Any) -> Played:
    environment = Complaint(Complaint.Config())
    user = ScriptedUser(ScriptedUser.Config())
    return play(environment, user, Saying(replies=[*replies, BOOK]), task_of(**traits))


def test_soothing_before_the_order_number_decides() -> None:
    """The same five replies; the first two change places."""
    assert ended([SOOTHE, NUMBER, SHOP, OFFER, CHECK]).termination == "success"
    assert ended([NUMBER, SOOTHE, SHOP, OFFER, CHECK]).termination == "user_left"
    assert ended([NUMBER, SOOTHE, SHOP, OFFER, CHECK], angry=False).termination == "success"


def test_a_patient_customer_forgives_one_step_out_of_order() -> None:
    assert ended([NUMBER, SOOTHE, NUMBER, SHOP, OFFER, CHECK], patience=2).termination == "success"


def test_an_offer_convinces_only_when_the_trouble_is_known() -> None:
    early = ended([SOOTHE, OFFER, "What is the problem?", NUMBER, SHOP, OFFER, CHECK], volunteers=())
    assert early.termination == "user_left"
    in_time = ended([SOOTHE, "What is the problem?", NUMBER, SHOP, OFFER, CHECK], volunteers=())
    assert in_time.termination == "success"


def test_no_visit_is_booked_before_it_was_offered() -> None:
    environment = Complaint(Complaint.Config())
    episode = environment.start(task_of())
    outcome = episode.agent_says(BOOK)
    assert (outcome.termination, outcome.messages[0].role) == (None, "tool")
    assert "no visit was offered" in outcome.messages[0].content


def test_apology_and_question_in_one_reply() -> None:
    assert ended([f"{SOOTHE} {NUMBER}", SHOP, OFFER, CHECK]).termination == "success"


def test_shares_steer_the_customer() -> None:
    calm, angry = (Complaint(Complaint.Config(angry_share=share)) for share in (0.0, 1.0))
    for seed in range(20):
        assert "order_number" not in calm.task(seed).goal["user"]["first"]
        assert angry.task(seed).goal["user"]["first"]["order_number"] == "soothes"
    with pytest.raises(ConfigError, match="angry_share -1"):
        Complaint.Config(angry_share=-1)
    with pytest.raises(ConfigError, match="max_turns 5"):
        Complaint.Config(max_turns=5)
