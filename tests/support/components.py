"""What a component needs beside its defaults to be built in a test; a fitted one gets weights that were fitted."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from slea_llm import registry
from slea_llm.config import ComponentSpec, component_config
from slea_llm.continuations import BranchingPlay, ScriptPlayer
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.evaluators import counterfactual, hindsight, return_decomposition, tool_use_outcomes
from slea_llm.evaluators.fitted import Fitted
from slea_llm.interfaces import Agent, Fittable
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.rollout import play
from slea_llm.scoring import Scorer
from slea_llm.types import ScoredTrajectory, Task, Termination
from slea_llm.users.scripted import ScriptedUser

FITS: Mapping[str, Callable[..., Fitted]] = {
    "return_decomposition": return_decomposition.fit,
    "hindsight": hindsight.fit,
    "counterfactual_prediction": counterfactual.fit_prediction,
    "tool_use_outcomes": tool_use_outcomes.fit,
}


def build(kind: str, name: str, **changes: Any) -> Any:
    """The component with its defaults, and what it has none for; what it `needs` is handed to it as a run would."""
    component = registry.load(kind, name)
    given = {need: GIVEN[need]() for need in getattr(component, "needs", frozenset())}
    settings = {**options(kind, name), **changes}
    # Through the recipe's own validation, so that lists and mappings become what the Config declares.
    cls, config = component_config(kind, ComponentSpec(name=name, **settings))
    built = cls(config, **given)
    if kind == "augmenter" and isinstance(built, Fittable):
        built.load(fitted_augmenter(name, tuple(sorted(changes.items()))))
    return built


def options(kind: str, name: str) -> dict[str, Any]:
    """Options of a component's `Config` that have no default, or one that only costs time here."""
    if name in ("llm", "llm_judge") and kind in ("parser", "evaluator"):
        return {"endpoint": {"attempts": 1}}  # nobody answers: a second try would only wait
    if kind == "evaluator" and name in FITS:
        return {"model": fitted_folder(name)}
    if kind == "evaluator" and name == "blend":
        return {
            "evaluators": [
                {"name": "knowledge_base", "weight": 0.25},
                {"name": "hindsight", "weight": 0.75, "options": options("evaluator", "hindsight")},
            ]
        }
    return {}


def continuations() -> BranchingPlay:
    """Plays order dialogues on with an expert that errs by chance."""
    environment, user = OrderTaking(OrderTaking.Config()), ScriptedUser(ScriptedUser.Config())

    def make(task: Task, seed: int) -> Agent:
        return environment.expert(replace(task, seed=seed), error_rate=0.35)

    return BranchingPlay(environment, user, ScriptPlayer(make), max_turns=12)


GIVEN: Mapping[str, Callable[[], Any]] = {
    "continuations": continuations,
    "build_evaluator": lambda: lambda name, options: build("evaluator", name, **options),
}


@cache
def orders(count: int = 60, error_rate: float = 0.35) -> tuple[ScoredTrajectory, ...]:
    """Order dialogues of an expert that errs by chance, cut into thoughts and replies."""
    environment, user = OrderTaking(OrderTaking.Config()), ScriptedUser(ScriptedUser.Config())
    scorer = Scorer(TaggedParser(TaggedParser.Config()), [])
    found = []
    for seed in range(count):
        task = environment.task(seed)
        agent = environment.expert(task, error_rate=error_rate)
        found.append(scorer.score(play(environment, user, agent, task, seed=seed, max_turns=12)))
    return tuple(found)


@cache
def fitted_folder(name: str) -> str:
    """A folder with weights fitted on order dialogues; it stays until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="slea-fitted-")) / name
    FITS[name](orders(), seed=0).save(folder)
    return str(folder)


def plain_orders(count: int) -> list[ScoredTrajectory]:
    """Order dialogues whose end can be told from any state of them: 10 where a phone number is asked for, else -1."""
    found = []
    for one in orders(count):
        played = one.trajectory
        wins = "phone" in played.turns[0].state_before["required"]
        reward = 10.0 if wins else -1.0
        turns = (*(replace(turn, reward=0.0) for turn in played.turns[:-1]), replace(played.turns[-1], reward=reward))
        ending: Termination = "success" if wins else "failure"
        ended = replace(played, turns=turns, outcome=reward, termination=ending, error=None)
        found.append(replace(one, trajectory=ended))
    return found


@cache
def fitted_augmenter(name: str, changes: tuple[tuple[str, Any], ...] = ()) -> Path:
    """A folder with a copy whose gate is open, judged on dialogues that it had not learnt from."""
    component = registry.load("augmenter", name)
    part = component(component.Config(**dict(changes)))
    folder = Path(tempfile.mkdtemp(prefix="slea-fitted-"))
    data = plain_orders(60)
    for number, (known, fresh) in enumerate([((), data[:20]), (data[:20], data[20:])]):
        part.fit(known, fresh, seed=number, folder=folder / str(number))
        part.load(folder / str(number))
    assert part.gate.open, part.gate.line
    return folder / "1"
