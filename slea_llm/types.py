"""The records that cross rooms. Frozen, slotted, keyword-only; nothing here imports more than the standard library.

Vocabulary: a *step* is a reasoning or dialogue step, a *turn* is one reply of the agent, an *update* is an optimizer
update, a *score* is what an evaluator says, a *reward* is what enters credit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    import numpy as np

State: TypeAlias = Mapping[str, Any]

Role = Literal["system", "user", "assistant", "tool"]
StepKind = Literal["thought", "reply", "tool_call"]
Termination = Literal["success", "failure", "max_turns", "user_left", "budget", "error", "unknown"]
FinishReason = Literal["stop", "length", "abort"]

ROLES: tuple[str, ...] = get_args(Role)
STEP_KINDS: tuple[str, ...] = get_args(StepKind)
TERMINATIONS: tuple[str, ...] = get_args(Termination)
OVERRIDE = "override"
"""Key in the provenance of a dialogue whose reward a reviewer changed."""
TRUNCATIONS: frozenset[str] = frozenset({"max_turns", "budget"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A structured call in a reply. `arguments` is the text as written, not yet parsed."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message. `content` is never None: a reply that only calls tools has the empty string."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role {self.role!r} is not one of {', '.join(ROLES)}")


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Half-open range of characters `[start, end)`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"span [{self.start}, {self.end}) is not a range with 0 <= start <= end")

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, order=True)
class TokenSpan:
    """Half-open range of token positions `[start, end)` in row `row` of a trajectory's token rows."""

    row: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.row < 0 or not 0 <= self.start <= self.end:
            raise ValueError(f"token span row {self.row} [{self.start}, {self.end}) is not a range")

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTrace:
    """One row of tokens as the model saw and sampled them; text is never tokenised a second time.

    `sampled_mask[i]` is true where the policy sampled token i; `logprobs[i]` is the log-probability of that token under
    the distribution really sampled from (after temperature), and 0.0 where the token was not sampled.
    """

    token_ids: tuple[int, ...]
    sampled_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.sampled_mask), len(self.logprobs))
        if len(set(lengths)) != 1:
            raise ValueError(f"token_ids, sampled_mask and logprobs have unequal lengths {lengths}")
        for index, (sampled, logprob) in enumerate(zip(self.sampled_mask, self.logprobs, strict=True)):
            if sampled and not (math.isfinite(logprob) and logprob <= 1e-6):
                raise ValueError(f"log-probability {logprob} of sampled token {index} is not finite and <= 0")

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One reply of the agent and what led to it.

    `context` holds the messages that are new since the previous reply (for turn 0: all of the prompt). `text` is the
    reply as sampled, thought included, end-of-turn token excluded; step spans index into it. `span` is None for logs
    without tokens. `state_before` and `state_after` are the environment's public state, as JSON values. `tool_calls`
    are the calls of an imported reply as its log held them, with their ids; what they say stands in `text` too.
    """

    index: int
    context: tuple[Message, ...]
    text: str
    span: TokenSpan | None = None
    finish_reason: FinishReason = "stop"
    reward: float = 0.0
    state_before: State = field(default_factory=dict)
    state_after: State = field(default_factory=dict)
    tool_calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} of turn {self.index} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One dialogue, finished or failed.

    `traces` holds one row when earlier turns are kept verbatim, one row a turn when the prompt is rebuilt; it is empty
    for logged text, which can be scored and imitated but never enters a PPO ratio. Every sampled token belongs to
    exactly one turn. `outcome` is the sum of rewards of a finished dialogue, None after an error and where a log says
    none; termination `unknown` is for logs alone. `closing` holds the messages after the last reply.
    """

    id: str
    task: Mapping[str, Any]
    environment: str
    seed: int
    policy_version: int
    turns: tuple[Turn, ...]
    traces: tuple[TokenTrace, ...]
    outcome: float | None
    termination: Termination
    error: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    closing: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if self.termination not in TERMINATIONS:
            raise ValueError(f"termination {self.termination!r} is not one of {', '.join(TERMINATIONS)}")
        if (self.error is not None) != (self.termination == "error"):
            raise ValueError(f"trajectory {self.id}: error text and termination {self.termination!r} contradict")
        if self.outcome is not None and not math.isfinite(self.outcome):
            raise ValueError(f"trajectory {self.id}: outcome {self.outcome} is not finite")
        if self.traces:
            self._check_spans()

    def _check_spans(self) -> None:
        covered = [[False] * len(trace) for trace in self.traces]
        last = (-1, 0)
        for turn in self.turns:
            if turn.span is None:
                raise ValueError(f"trajectory {self.id}: turn {turn.index} has no token span")
            span = turn.span
            if span.row >= len(covered) or span.end > len(covered[span.row]) or (span.row, span.start) < last:
                raise ValueError(f"trajectory {self.id}: span {span} of turn {turn.index} is out of range or order")
            last = (span.row, span.end)
            covered[span.row][span.start : span.end] = [True] * len(span)
        for row, (mask, trace) in enumerate(zip(covered, self.traces, strict=True)):
            if tuple(mask) != trace.sampled_mask:
                raise ValueError(
                    f"trajectory {self.id}: sampled mask of row {row} is not the union of the turns' spans"
                )

    @property
    def success(self) -> bool:
        return self.termination == "success"

    @property
    def counts_as_success(self) -> bool:
        """True when it succeeded and no reviewer has put another reward in the place of what that paid."""
        return self.success and OVERRIDE not in self.provenance

    @property
    def truncated(self) -> bool:
        """True when the dialogue was cut from outside, so that its value after the cut is to be bootstrapped."""
        return self.termination in TRUNCATIONS

    @property
    def failed(self) -> bool:
        """True when the episode itself broke; such a record has no outcome and never enters an update."""
        return self.termination == "error"

    @property
    def excluded(self) -> bool:
        """True when a referee found that the dialogue says nothing about the agent: no gradient, no success rate."""
        return (self.provenance.get("blame") or {}).get("excluded") is True

    def reply_ids(self, turn: Turn) -> tuple[int, ...]:
        """The tokens that were sampled for a turn; none for logs without tokens."""
        if turn.span is None or not self.traces:
            return ()
        return self.traces[turn.span.row].token_ids[turn.span.start : turn.span.end]

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(trace.sampled_mask) for trace in self.traces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A piece of one reply. Leaf steps tile the turn's text and its sampled token span, in order, without gap.

    `parent` is the index (within the turn) of the step that this one refines, None for a top-level step. A token that
    crosses a border belongs to the step in which its first character starts; the end-of-turn token belongs to the last.
    """

    trajectory_id: str
    turn: int
    index: int
    kind: StepKind
    text: str
    span: Span
    tokens: TokenSpan | None = None
    parent: int | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in STEP_KINDS:
            raise ValueError(f"step kind {self.kind!r} is not one of {', '.join(STEP_KINDS)}")


def leaf_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps of one trajectory that no other step refines, in order."""
    parents = {(step.turn, step.parent) for step in steps if step.parent is not None}
    return tuple(step for step in steps if (step.turn, step.index) not in parents)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """An evaluator's word on one step: a score, or the reason why there is none. A failed score is never 0."""

    turn: int
    step: int
    evaluator: str
    version: str
    score: float | None
    reason: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    rationale: str = ""

    def __post_init__(self) -> None:
        if (self.score is None) == (self.reason is None):
            raise ValueError(f"step {self.turn}.{self.step}: give exactly one of score and reason")
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"step {self.turn}.{self.step}: score {self.score} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the scores of a learnt evaluator may move training, and the line that says why or why not."""

    open: bool
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTrajectory:
    """What the buffer and the score files hold: raw rewards and scores, never an advantage.

    `shut` names the evaluators whose gate was shut when they scored it: their scores are there to be read, and weigh 0.
    """

    trajectory: Trajectory
    steps: tuple[Step, ...]
    scores: tuple[ScoredStep, ...]
    parser: str
    evaluator_versions: Mapping[str, str] = field(default_factory=dict)
    shut: tuple[str, ...] = ()

    def leaves(self) -> tuple[Step, ...]:
        """The steps that no other step refines, in order."""
        return leaf_steps(self.steps)

    def scores_of(self, evaluator: str) -> dict[tuple[int, int], ScoredStep]:
        """`(turn, step) -> score` of one evaluator."""
        return {(s.turn, s.step): s for s in self.scores if s.evaluator == evaluator}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """What the models say today about the sampled tokens of one trajectory, in sampled order; made just before credit.

    `proximal` and `reference` have shape (n,). `values[stream]` (n + 1,) are those of the context before every sampled
    token, and after the last one (used only when the end was a cut); `after[stream]` (n,) those after every token.
    """

    proximal: np.ndarray
    reference: np.ndarray
    values: Mapping[str, np.ndarray]
    policy_version: int
    critic_version: int
    after: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentedExperience:
    """A scored trajectory with its credit, one number per sampled token, recomputable from what it holds.

    `rewards[stream][part]` (n,), `advantages` (n,), `returns[stream]` (n,), `weights` (n,) multiply the policy loss.
    `value_mask` (n,) says before which tokens the critic is read and supervised, `after_mask` (n,) after which, if it
    is at all; `after_returns[head]` (n,) are the targets there.
    """

    scored: ScoredTrajectory
    stats: TokenStats
    rewards: Mapping[str, Mapping[str, np.ndarray]]
    advantages: np.ndarray
    returns: Mapping[str, np.ndarray]
    weights: np.ndarray
    value_mask: np.ndarray
    policy_mask: np.ndarray
    unit: Literal["token", "substep", "step", "turn"] = "token"
    versions: Mapping[str, str] = field(default_factory=dict)
    after_returns: Mapping[str, np.ndarray] = field(default_factory=dict)
    after_mask: np.ndarray | None = None
    imitation: np.ndarray | None = None  # (n,), weight of a token that is imitated, NaN elsewhere
    prototypes: np.ndarray | None = None  # (rows,), share of each row among the prototypes of one state


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing to be done for a user. `goal` is hidden from the agent; `opening` is what it is told at the start."""

    id: str
    seed: int
    goal: Mapping[str, Any]
    language: str = "en"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the environment says after a reply.

    `messages` go to the agent as they are (tool results). `to_user` asks for the user's answer; `acts` holds what the
    environment understood of the reply. `termination` ends the episode.
    """

    messages: tuple[Message, ...] = ()
    to_user: bool = False
    acts: Mapping[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    termination: Termination | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserReply:
    """What the simulated user says. `leaving` ends the dialogue once the text was delivered (termination user_left)."""

    text: str
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ReplyPrefix:
    """The first `characters` of the reply of `turn`, which are its first `tokens` (None for logs without tokens)."""

    turn: int
    characters: int
    tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """How the continuations of one prefix ended, in the order of the seeds, or the reason why they did not."""

    successes: tuple[bool, ...] = ()
    reason: str | None = None

    def __post_init__(self) -> None:
        if bool(self.successes) == (self.reason is not None):
            raise ValueError("give either how the continuations ended or the reason why they did not")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sampling job: tokens in. `key` names the draw (seed, episode, turn): noise does not depend on the order."""

    prompt_ids: tuple[int, ...]
    key: tuple[int, ...]
    max_tokens: int
    greedy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Tokens out, with the log-probability of each under the distribution really sampled from.

    A sampled end-of-turn token is part of `token_ids`; nothing that was not sampled ever is.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int
