"""A dialogue that is a small Markov decision process, with a random user and a random agent: every value is known.

The agent needs two facts before it guesses. It first thinks (ask or guess), then speaks (asking well or badly); a user
who is asked well tells a fact more often. A guess ends the dialogue, right when both facts are known; six replies end
it too. Values are worked out here by backward induction over (turn, facts), apart from anything under
test.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Literal

from slea_llm.types import Message, Outcome, State, Task, UserReply

Plan = Literal["ask", "guess"]
Wording = Literal["well", "badly"]

NEEDED, LAST_TURN = 2, 6
ASKS = {0: 0.9, 1: 0.7, 2: 0.35}
"""Known facts -> the chance that the agent asks once more instead of guessing."""
ASKS_WELL = 0.5
TELLS: Mapping[Wording, float] = {"well": 0.85, "badly": 0.25}
"""How the user was asked -> the chance that it tells a fact."""
FACTS = ("colour", "size")
SAYS = {
    ("ask", "well"): "<think>I should ask.</think>Which colour and size do you need, please?",
    ("ask", "badly"): "<think>I should ask.</think>Anything else?",
    ("guess", "well"): "<think>I know enough.</think>Here is what you need.",
}


@cache
def value(turn: int, known: int) -> float:
    """P(success) before the reply of `turn` (0 to 5)."""
    if turn == LAST_TURN:
        return 0.0
    asks = ASKS[known]
    return asks * after_plan(turn, known, "ask") + (1 - asks) * after_plan(turn, known, "guess")


def after_plan(turn: int, known: int, plan: Plan) -> float:
    """P(success) once the agent has thought."""
    if plan == "guess":
        return after_reply(turn, known, "guess", "well")
    well = after_reply(turn, known, "ask", "well")
    return ASKS_WELL * well + (1 - ASKS_WELL) * after_reply(turn, known, "ask", "badly")


def after_reply(turn: int, known: int, plan: Plan, wording: Wording) -> float:
    """P(success) once the agent has spoken, before the user answers."""
    if plan == "guess":
        return float(known == NEEDED)
    tells = TELLS[wording] if known < NEEDED else 0.0
    return tells * value(turn + 1, min(known + 1, NEEDED)) + (1 - tells) * value(turn + 1, known)


def exact(turn: int, known: int, text: str) -> tuple[float, float, float]:
    """P(success) before a reply, after its thought and after all of it."""
    plan, wording = next(key for key, said in SAYS.items() if said == text)
    return (
        value(turn, known),
        after_plan(turn, known, _plan(plan)),
        after_reply(turn, known, _plan(plan), _word(wording)),
    )


def _plan(name: str) -> Plan:
    return "guess" if name == "guess" else "ask"


def _word(name: str) -> Wording:
    return "well" if name == "well" else "badly"


class FactsEpisode:
    def __init__(self, turn: int = 0, known: int = 0) -> None:
        self.turn, self.known = turn, known

    def system_prompt(self) -> tuple[Message, ...]:
        return (Message(role="system", content="Find out what the user needs."),)

    def state(self) -> State:
        return {"known": list(FACTS[: self.known]), "missing": list(FACTS[self.known :]), "left": LAST_TURN - self.turn}

    def agent_says(self, text: str) -> Outcome:
        self.turn += 1
        if "Here is" in text:
            right = self.known == NEEDED
            return Outcome(reward=float(right), termination="success" if right else "failure")
        if self.turn == LAST_TURN:
            return Outcome(termination="failure")
        return Outcome(to_user=True, acts={"asked": "well" if "please" in text else "badly"})

    def user_says(self, text: str, *, leaving: bool = False) -> Outcome:
        del leaving
        self.known = min(self.known + ("It is" in text), NEEDED)
        return Outcome()

    def snapshot(self) -> Mapping[str, Any]:
        return {"turn": self.turn, "known": self.known}


class FactsEnvironment:
    name: ClassVar[str] = "facts"

    def task(self, seed: int) -> Task:
        return Task(id=f"facts-{seed}", seed=seed, goal={})

    def start(self, task: Task) -> FactsEpisode:
        del task
        return FactsEpisode()

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> FactsEpisode:
        del task
        return FactsEpisode(**snapshot)

    def expert(self, task: Task, *, error_rate: float = 0.0) -> FactsAgent:
        del error_rate
        return FactsAgent(task, task.seed)

    def idler(self, task: Task) -> FactsAgent:
        return FactsAgent(task, task.seed)


class FactsSession:
    """Tells a fact by chance; what it draws is named by its seed and the number of its answers."""

    def __init__(self, seed: int, spoken: int = 0) -> None:
        self.seed, self.spoken = seed, spoken

    async def opening(self) -> UserReply:
        return UserReply(text="I need something.")

    async def answer(self, acts: Mapping[str, Any], messages: Sequence[Message]) -> UserReply:
        del messages
        self.spoken += 1
        tells = random.Random(f"facts user/{self.seed}/{self.spoken}").random() < TELLS[acts["asked"]]  # noqa: S311
        return UserReply(text="It is this one." if tells else "What do you mean?")

    def snapshot(self) -> Mapping[str, Any]:
        return {"seed": self.seed, "spoken": self.spoken}

    def reseed(self, seed: int) -> None:
        self.seed = seed


class FactsUser:
    def start(self, task: Task, seed: int) -> FactsSession:
        del task
        return FactsSession(seed)

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> FactsSession:
        del task
        return FactsSession(**snapshot)


class FactsAgent:
    """The policy; its draws are named by its seed and the turn."""

    def __init__(self, task: Task, seed: int) -> None:
        del task
        self.seed = seed

    def act(self, state: State, messages: Sequence[Message]) -> str:
        del messages
        rng = random.Random(f"facts agent/{self.seed}/{state['left']}")  # noqa: S311
        if rng.random() >= ASKS[len(state["known"])]:
            return SAYS["guess", "well"]
        return SAYS["ask", "well" if rng.random() < ASKS_WELL else "badly"]
