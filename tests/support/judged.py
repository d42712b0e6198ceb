"""Small dialogues whose outcome follows from what the agent says, and reward models fitted to them in a second."""

from __future__ import annotations

import random
from collections.abc import Sequence

from slea_llm.encoders import HashingEncoder
from slea_llm.evaluators.reward_model_features import Encoding
from slea_llm.fitting.evaluator import FitSettings, FittedEvaluator, fit_evaluator
from slea_llm.fitting.labels import StepLabel, examples, outcome_labels
from slea_llm.fitting.training import Example, TrainingSettings
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.types import Message, Step, Trajectory, Turn

PARSER = TaggedParser(TaggedParser.Config())
TINY = FitSettings(folds=2, width=16, members=1, dropout=0.0, training=TrainingSettings(epochs=12, learning_rate=3e-3))
GOOD = ("Which address should it go to?", "What dish would you like?", "How many portions?")
BAD = ("Lovely weather, is it not?", "I like football.", "Let me think about it.")


def drawn(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 (test data)


def dialogue(number: int, rng: random.Random, *, turns: int = 3) -> Trajectory:
    """It succeeds when most of its replies ask for something; half of the time they mostly do."""
    share = rng.choice((0.15, 0.85))
    asked = [rng.random() < share for _ in range(turns)]
    replies = [rng.choice(GOOD if good else BAD) for good in asked]
    success = sum(asked) * 2 > turns
    return of_replies(f"d{number}", replies, success=success)


def of_replies(name: str, replies: Sequence[str], *, success: bool = True, task: str | None = None) -> Trajectory:
    """One turn a reply, each after a word of the user."""
    return Trajectory(
        id=name,
        task={} if task is None else {"id": task},
        environment="judged",
        seed=0,
        policy_version=0,
        turns=tuple(
            Turn(
                index=index,
                context=(Message(role="user", content=f"I want to order, word {index}"),),
                text=f"<think>Go on.</think>{reply}",
                state_before={"turn": index},
            )
            for index, reply in enumerate(replies)
        ),
        traces=(),
        outcome=1.0 if success else 0.0,
        termination="success" if success else "failure",
    )


def cut(trajectory: Trajectory) -> tuple[Step, ...]:
    return tuple(step for turn in trajectory.turns for step in PARSER.parse(turn, trajectory.id, None))


def labelled(count: int, *, seed: int = 0, encoding: Encoding = "apart") -> tuple[list[Example], list[StepLabel]]:
    """Examples with the outcome of each dialogue at every step."""
    rng = drawn(seed)
    parsed = [(one, cut(one)) for one in (dialogue(number, rng) for number in range(count))]
    labels = [label for one, steps in parsed for label in outcome_labels(one, steps)]
    return examples(parsed, labels, HashingEncoder(), encoding), labels


def fitted(count: int = 80, *, seed: int = 0, encoding: Encoding = "apart") -> FittedEvaluator:
    rows, labels = labelled(count, seed=seed, encoding=encoding)
    return fit_evaluator(rows, labels, encoder="hashing", encoding=encoding, settings=TINY, seed=seed)
