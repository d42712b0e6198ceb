"""What the rooms promise each other. A component is a class whose first argument is its own frozen `Config`.

Whatever else a component needs is named in its `needs` and injected by keyword by the composition root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from slea_llm.tensors import Batch, LossValue, ModelOutputs
from slea_llm.types import (
    AugmentedExperience,
    Continued,
    Generation,
    GenerationRequest,
    Message,
    Outcome,
    ReplyPrefix,
    ScoredStep,
    ScoredTrajectory,
    State,
    Step,
    Task,
    TokenStats,
    Trajectory,
    Turn,
    UserReply,
    Verdict,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch


class Episode(Protocol):
    """One running dialogue of an environment. Everything it knows is in `snapshot()`, which restores it exactly.

    The driver hands every reply of the user to `user_says`, with `leaving` as the user set it, and adds the `reward` of
    both `agent_says` and `user_says` to the turn of the agent's reply that led to it. The episode gives the reward of
    every ending, a leaving user (termination user_left) included. Its own turn limit is a rule of the task, so
    reaching it is a failure; `max_turns` is the cut that the driver makes, whose value after it is bootstrapped.
    """

    def system_prompt(self) -> tuple[Message, ...]:
        """What the agent is told before the user speaks."""
        ...

    def state(self) -> State:
        """The public state (JSON values): what agent, evaluators and augmenters may see, never the hidden goal."""
        ...

    def agent_says(self, text: str) -> Outcome:
        """Take one reply of the agent as sampled (thought included) and say what follows."""
        ...

    def user_says(self, text: str, *, leaving: bool = False) -> Outcome:
        """Take what the user answered, before the agent sees it; a termination here ends the dialogue.

        With `leaving` the outcome always has the termination user_left and the reward of that ending.
        """
        ...

    def snapshot(self) -> Mapping[str, Any]:
        """The whole state as JSON values."""
        ...


class Environment(Protocol):
    """A task family. Holds no episode state itself."""

    name: ClassVar[str]

    def task(self, seed: int) -> Task:
        """The task of this seed; equal seeds give equal tasks."""
        ...

    def start(self, task: Task) -> Episode: ...

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> Episode: ...

    def expert(self, task: Task, *, error_rate: float = 0.0) -> Agent:
        """A scripted agent that succeeds, or that errs in this share of its replies (seeded by the task)."""
        ...

    def idler(self, task: Task) -> Agent:
        """A scripted agent that does nothing of use; it must fail."""
        ...


class Agent(Protocol):
    """A scripted agent: the state that it may see and what the user just said, to a reply (thought included)."""

    def act(self, state: State, messages: Sequence[Message]) -> str: ...


class UserSession(Protocol):
    """One simulated user in one dialogue."""

    async def opening(self) -> UserReply: ...

    async def answer(self, acts: Mapping[str, Any], messages: Sequence[Message]) -> UserReply:
        """Answer the agent. `acts` is what the environment understood, `messages` what was said (thoughts removed)."""
        ...

    def snapshot(self) -> Mapping[str, Any]: ...


@runtime_checkable
class Reseedable(Protocol):
    """An episode or a user session whose further draws can be drawn anew, from another seed.

    Continuations from one restored state need it to differ by more than the agent; one that draws nothing lacks it.
    """

    def reseed(self, seed: int) -> None: ...


@runtime_checkable
class Traced(Protocol):
    """A user session that says what it was made of: the record of its dialogue holds it as `provenance["user"]`."""

    def provenance(self) -> Mapping[str, Any]:
        """JSON values: the name of the user, for a model its name and the hash of its prompt, what went wrong."""
        ...


@runtime_checkable
class Unrepeatable(Protocol):
    """A user that may answer otherwise when the same dialogue is played again, so that none of it can be branched."""

    unrepeatable: ClassVar[str]
    """Why, for whoever asks to branch."""


class SimulatedUser(Protocol):
    """Who answers the agent."""

    def start(self, task: Task, seed: int) -> UserSession: ...

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> UserSession: ...


class Generator(Protocol):
    """A sampler: token ids in, token ids and behaviour log-probabilities out."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that now answer requests."""
        ...

    async def generate(self, request: GenerationRequest) -> Generation: ...

    def load(self, source: WeightSource, version: int) -> None:
        """Serve these weights from now on. Versions only grow; raises GenerationError when the canary does not move."""
        ...

    def close(self) -> None: ...


class WeightSource(Protocol):
    """The trainer's side of a weight transfer."""

    def save_adapter(self, folder: Path) -> Path:
        """Write the policy's LoRA adapter in PEFT layout and return its folder."""
        ...

    def merged_weights(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Hugging Face names and merged tensors of the policy, adapters and heads left out."""
        ...


class StepParser(Protocol):
    """Cuts one turn into steps."""

    name: ClassVar[str]

    def parse(self, turn: Turn, trajectory_id: str, starts: Sequence[int] | None) -> tuple[Step, ...]:
        """Steps of a turn. `starts[i]`: the character at which sampled token i starts; None for logs without tokens."""
        ...


class StepEvaluator(Protocol):
    """Scores the steps of one trajectory; one ScoredStep for every leaf step, scored or with the reason why not."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]

    @property
    def version(self) -> str: ...

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]: ...


@runtime_checkable
class Remembering(Protocol):
    """An evaluator whose next answer depends on earlier ones; what it remembers is checkpointed with the run."""

    def state(self) -> Mapping[str, Any]:
        """JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Continuations(Protocol):
    """A way to play a dialogue on from a place in one of its replies, many times."""

    def branch(
        self, trajectory: Trajectory, prefixes: Sequence[ReplyPrefix], seeds: Sequence[int]
    ) -> tuple[Continued, ...]:
        """For every prefix, how its continuations ended, one for each seed; equal seeds make equal draws.

        Environment and user are restored exactly as they were before that reply, the reply is begun as recorded, and
        the policy goes on from there to the end. Raises EpisodeError when the dialogue cannot be restored.
        """
        ...


@runtime_checkable
class Gated(Protocol):
    """An evaluator that was learnt. While its gate is shut its scores are kept and read, and weigh 0 in training."""

    @property
    def gate(self) -> Verdict: ...


@runtime_checkable
class Composed(Protocol):
    """An evaluator made of others."""

    @property
    def evaluators(self) -> Sequence[StepEvaluator]: ...


@runtime_checkable
class BatchScoring(Protocol):
    """An evaluator that scores several trajectories in one go, with the same result as one by one."""

    def score_many(
        self, trajectories: Sequence[tuple[Trajectory, Sequence[Step]]]
    ) -> Sequence[tuple[ScoredStep, ...]]: ...


@runtime_checkable
class BatchParsing(Protocol):
    """A parser that cuts several turns in one go, with the same result as one by one."""

    def parse_many(self, turns: Sequence[tuple[Turn, str, Sequence[int] | None]]) -> Sequence[tuple[Step, ...]]:
        """What `parse` gives for each `(turn, trajectory_id, starts)`, in their order."""
        ...


@runtime_checkable
class Augmenter(Protocol):
    """Turns scores and outcomes into step rewards of one named part.

    What weighs steps instead of paying them is a `StepWeigher`; a component of the kind augmenter is one of the two or
    both. One that was learnt is also `Gated` and, when it learns while the run goes on, `Fittable`.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> reward` of this part for leaf steps; `progress` in [0, 1] is the share of training done."""
        ...


@runtime_checkable
class StepWeigher(Protocol):
    """Says how much each step matters for learning (lambda); named under `weights.sources` of a recipe."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]

    def weights(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> weight`, 0 or above, for leaf steps; a step that is not named weighs 1."""
        ...


@runtime_checkable
class Versioned(Protocol):
    """A part whose answer depends on more than the recipe, such as weights that were fitted."""

    @property
    def version(self) -> str:
        """Changes whenever the answer may."""
        ...


@runtime_checkable
class Fittable(Protocol):
    """A learnt augmenter that is fitted on the dialogues of the run itself; in between a frozen copy is used."""

    name: ClassVar[str]
    reads: frozenset[str]
    """Evaluators whose scores a fit reads."""

    @property
    def refresh_every(self) -> int:
        """Finished dialogues, over all ranks, after which it is fitted anew; 0: never."""
        ...

    @property
    def window(self) -> int:
        """Newest dialogues, over all ranks, that it learns from."""
        ...

    @property
    def gate(self) -> Verdict: ...

    def fit(
        self, known: Sequence[ScoredTrajectory], fresh: Sequence[ScoredTrajectory], *, seed: int, folder: Path
    ) -> None:
        """Judge the present copy on `fresh`, which it has not seen; learn from both; write the next copy to `folder`.

        The present copy stays what it is until `load`. Equal arguments write equal bytes. Raises SleaError.
        """
        ...

    def load(self, folder: Path) -> None:
        """Go on with the copy in a folder that `fit` wrote; the one before stays when this raises."""
        ...


class CreditAssigner(Protocol):
    """Turns rewards and values of a set of trajectories into advantages and returns, one number per sampled token.

    Groups of one task are whole on a rank. A method may say `reads_critic = False`, so that a recipe with a critic is
    refused, and name in `heads` the value heads that it reads where these are not one a stream.
    """

    name: ClassVar[str]

    def assign(
        self,
        scored: Sequence[ScoredTrajectory],
        rewards: Sequence[Mapping[str, Mapping[str, np.ndarray]]],
        stats: Sequence[TokenStats],
        reducer: Reducer,
        *,
        progress: float = 0.0,
    ) -> tuple[AugmentedExperience, ...]:
        """`progress` in [0, 1] is the share of training done: streams have `weight_at(progress)`."""
        ...


class Replay(Protocol):
    """A buffer of earlier dialogues. Every rank calls every method, in the same order."""

    def mix(
        self,
        fresh: Sequence[ScoredTrajectory],
        *,
        iteration: int,
        policy_version: int,
        progress: float,
        reducer: Reducer,
    ) -> tuple[Sequence[ScoredTrajectory], Mapping[str, float]]:
        """Store the fresh dialogues and return them with earlier ones behind them, and metrics."""
        ...

    def weigh(
        self, experiences: Sequence[AugmentedExperience], *, reducer: Reducer
    ) -> tuple[Sequence[AugmentedExperience], Mapping[str, float]]:
        """The experiences with the importance weights of the drawn ones, and metrics; learns their priorities."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Imitator(Protocol):
    """Chooses what is imitated in the updates of an iteration; holds no state. Every rank calls it."""

    def mark(
        self, experiences: Sequence[AugmentedExperience], *, iteration: int, progress: float, reducer: Reducer
    ) -> tuple[Sequence[AugmentedExperience], Mapping[str, float]]:
        """The experiences with what is imitated marked, further ones that are there to be imitated, and metrics."""
        ...


class LossTerm(Protocol):
    """One loss over a Batch, with its own mask, weight and denominator.

    `reads_reference`: whether it reads `batch.reference_logprobs`, which are NaN in runs where nothing says so.
    """

    name: ClassVar[str]
    reads_reference: ClassVar[bool]
    weight: float

    def denominator(self, batch: Batch) -> torch.Tensor:
        """The count of this term's units in a micro-batch (scalar); summed over micro-batches and ranks it divides.

        A sum of 0 divides by 1: a term that is a plain sum returns 0.
        """
        ...

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> LossValue: ...


@runtime_checkable
class Adapting(Protocol):
    """A loss term that changes itself as training goes; its state is checkpointed with the run."""

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Called after every update that moved the policy, with its metrics, which are the same on every rank."""
        ...

    def state(self) -> Mapping[str, Any]:
        """JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Reducer(Protocol):
    """Sums across ranks. Every whitening and every denominator goes through one."""

    @property
    def world_size(self) -> int: ...

    def sum(self, values: Sequence[float]) -> list[float]: ...

    def max(self, values: Sequence[float]) -> list[float]: ...


class LocalReducer:
    """The reducer of a single process."""

    @property
    def world_size(self) -> int:
        return 1

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def max(self, values: Sequence[float]) -> list[float]:
        return list(values)
