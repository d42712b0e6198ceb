"""Alarms: what a training run says of itself that is a known sign of trouble, what it means and what mends it.

docs/metrics.md lists every alarm; a test compares the page with `RULES`. Thresholds are where a healthy run never was
seen, not where a run is known to be lost: an alarm never stops anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pvariance
from typing import Any

from slea_llm.settings import StreamSettings

WINDOW = 12
"""Iterations that are remembered."""
CEILING = 0.9
"""Success from which no rise is to be expected."""
Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The metrics of the last iterations, oldest first, and how the run began.

    `beginnings[part]`: what a part paid a dialogue, success and dialogues of the first six iterations in which it paid.
    """

    window: Sequence[Metrics]
    streams: Mapping[str, StreamSettings]
    first_entropy: float | None
    beginnings: Mapping[str, Sequence[Sequence[float]]]

    def last(self, name: str, count: int = 1) -> list[float] | None:
        """The values of a metric in the last `count` iterations; None when one of them lacks it."""
        values = [one[name] for one in self.window[-count:] if name in one]
        return values if len(values) == count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One alarm. `check` says what was seen when it holds now, None when it does not."""

    name: str
    threshold: float
    meaning: str
    mend: str
    check: Callable[[History, float], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm that holds in this iteration. `first`: it was never raised before in this run."""

    name: str
    seen: str
    meaning: str
    mend: str
    first: bool

    def line(self) -> str:
        """What the terminal shows."""
        return f"alarm {self.name}: {self.seen}; {self.meaning}. {self.mend}"


def _advantage_range(history: History, threshold: float) -> str | None:
    for name in history.streams:
        peaks, rewards = history.last(f"credit/{name}/advantage_max", 2), history.last(f"credit/{name}/reward_max", 2)
        if peaks and rewards and min(rewards) > 0:
            ratio = min(peak / reward for peak, reward in zip(peaks, rewards, strict=True))
            if ratio > threshold:
                return f"stream {name}: the largest advantage is {ratio:.1f} times the largest reward"
    return None


def _above(name: str, what: str, count: int) -> Callable[[History, float], str | None]:
    """A check that a metric was above the threshold in each of the last `count` iterations."""

    def check(history: History, threshold: float) -> str | None:
        values = history.last(name, count)
        if values is None or min(values) <= threshold:
            return None
        return f"{what} is {values[-1]:.3g}"

    return check


def _explained_variance(history: History, threshold: float) -> str | None:
    for name in history.streams:
        values = history.last(f"credit/{name}/explained_variance", 3)
        error, reward = history.last(f"credit/{name}/advantage_std"), history.last(f"credit/{name}/reward_max")
        # Returns that are nearly all equal leave nothing to explain: errors that are small beside rewards are no fault.
        if values and error and reward and max(values) < threshold and error[0] > 0.5 * reward[0]:
            return f"stream {name}: explained variance {values[-1]:.2f}"
    return None


def _entropy(history: History, threshold: float) -> str | None:
    now, first = history.last("update/entropy", 2), history.first_entropy
    if not now or not first or max(now) >= threshold * first:
        return None
    return f"entropy is {now[-1]:.3g} nats a token, {now[-1] / first:.0%} of what it was"


def _ratio(history: History, threshold: float) -> str | None:
    values = history.last("ppo/ratio")
    if values and abs(values[0] - 1.0) > threshold:
        return f"the mean ratio to the proximal policy is {values[0]:.2f}"
    return None


def _reference_kl(history: History, threshold: float) -> str | None:
    values = history.last("reference_kl/k3", 5)
    if values and median(values) > threshold:
        return f"KL to the reference is {median(values):.2f} nats a token"
    return None


def _drowned_outcome(history: History, threshold: float) -> str | None:
    for name, stream in history.streams.items():
        if "outcome" not in stream.sources or len(stream.sources) < 2:
            continue
        shares = [history.last(f"credit/share/{source}", 3) for source in stream.sources]
        if any(share is None for share in shares):
            continue
        own = dict(zip(stream.sources, (fmean(share or ()) for share in shares), strict=True))
        share = own["outcome"] / sum(own.values()) if sum(own.values()) else 1.0
        if share < threshold:
            largest = max(own, key=lambda source: own[source])
            return f"stream {name}: the outcome is {share:.1%} of what is paid, most is {largest}"
    return None


def _reward_hacking(history: History, threshold: float) -> str | None:
    fell = _fall(history, threshold)
    if fell is None:
        return None
    for part in sorted(_parts(history)):
        paid = history.last(f"credit/paid/{part}", WINDOW)
        if paid is None:
            continue
        low, high, noise = _halves(paid)
        if high - low > max(3.0 * noise, 0.1 * abs(low)):
            return f"{part} pays {high:.2f} a dialogue, up from {low:.2f}, and success {fell}"
    return None


def _reward_without_success(history: History, threshold: float) -> str | None:
    half = WINDOW // 2
    successes, played = history.last("episodes/success", half), history.last("episodes/played", half)
    if history.last("episodes/success", WINDOW) is None:
        return None  # the newest iterations would be the first ones
    for part in sorted(_parts(history)):
        paid, first = history.last(f"credit/paid/{part}", half), history.beginnings.get(part, ())
        if successes is None or played is None or paid is None or len(first) < half or not sum(played):
            continue
        low, high, noise = _halves([*(one[0] for one in first), *paid])
        then = sum(rate * count for _, rate, count in first) / max(sum(count for _, _, count in first), 1.0)
        now = sum(rate * count for rate, count in zip(successes, played, strict=True)) / sum(played)
        if high - low > max(3.0 * noise, threshold * abs(low)) and now <= then < CEILING:
            return (
                f"{part} pays {high:.2f} a dialogue, {low:.2f} when it began, and success is {now:.0%}, {then:.0%} then"
            )
    return None


def _success(history: History, threshold: float) -> str | None:
    fell = _fall(history, threshold)
    if fell is None:
        return None
    paid = {part: history.last(f"credit/paid/{part}", WINDOW) for part in sorted(_parts(history))}
    halves = {part: _halves(values)[:2] for part, values in paid.items() if values is not None}
    kept = [f"{part} still pays {high:.2f} a dialogue" for part, (low, high) in halves.items() if high >= 0.9 * low > 0]
    return ", and ".join([f"success {fell}", *kept])


def _parts(history: History) -> set[str]:
    """What is paid beside the outcome."""
    return {source for stream in history.streams.values() for source in stream.sources} - {"outcome", "reference_kl"}


def _fall(history: History, threshold: float) -> str | None:
    """How success fell from the older half of the window to the newer; None where it did not, or chance could do it."""
    successes, played = history.last("episodes/success", WINDOW), history.last("episodes/played", WINDOW)
    if successes is None or played is None:
        return None
    rate = min(max(fmean(successes), 0.0), 1.0)
    sizes = [max(sum(half), 1.0) for half in (played[: WINDOW // 2], played[WINDOW // 2 :])]
    chance = math.sqrt(rate * (1.0 - rate) * sum(1.0 / size for size in sizes))
    before, after, noise = _halves(successes)
    if before - after < threshold or before - after < 3.0 * max(noise, chance):
        return None
    return f"fell from {before:.0%} to {after:.0%}"


def _halves(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of the older half, of the newer half, and the standard error of their difference."""
    half = len(values) // 2
    older, newer = values[:half], values[half:]
    return fmean(older), fmean(newer), math.sqrt((pvariance(older) + pvariance(newer)) / max(half - 1, 1))


def _gradient(history: History, threshold: float) -> str | None:
    norms = [one["grad_norm/policy"] for one in history.window if "grad_norm/policy" in one]
    if len(norms) < 4:
        return None
    usual = median(norms[:-1])
    if usual > 0 and norms[-1] > threshold * usual:
        return f"the policy's gradient norm is {norms[-1] / usual:.0f} times its usual size"
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        name="advantage_range",
        threshold=10.0,
        meaning="the critic is far from the returns that are paid, so advantages are its errors",
        mend="Lower trainer.critic_learning_rate, give it critic_warmup_iterations, or set credit.clip",
        check=_advantage_range,
    ),
    Rule(
        name="advantage_clip",
        threshold=0.01,
        meaning="the bound on advantages cuts what should be learnt from, and shifts their mean",
        mend="Raise credit.clip, or find the rewards that are out of range",
        check=_above("credit/clipped", "the share of advantages that credit.clip cuts", 2),
    ),
    Rule(
        name="no_signal",
        threshold=0.9,
        meaning="nearly no trained token has an advantage: dialogues are alike in what they earn",
        mend="Use tasks that succeed sometimes, larger groups, or a stream of scores",
        check=_above("credit/idle", "the share of trained tokens without an advantage", 3),
    ),
    Rule(
        name="drowned_outcome",
        threshold=0.05,
        meaning="what is added to the outcome decides alone what is learnt",
        mend="Give the scores a stream of their own, or lower their scale",
        check=_drowned_outcome,
    ),
    Rule(
        name="explained_variance",
        threshold=-0.5,
        meaning="the critic predicts returns worse than a constant",
        mend="Lower trainer.critic_learning_rate; scale streams to like size with reward_scale",
        check=_explained_variance,
    ),
    Rule(
        name="ppo_clip",
        threshold=0.3,
        meaning="a large share of tokens is out of the clip range, so the update is far too large",
        mend="Lower trainer.learning_rate or epochs, or set trainer.target_kl",
        check=_above("ppo/clip_frac", "the share of clipped tokens", 2),
    ),
    Rule(
        name="ratio",
        threshold=0.1,
        meaning="the policy left the one that the ratio starts from; a mean ratio stays near 1 in expectation",
        mend="Lower trainer.learning_rate; with replay, lower the age limit",
        check=_ratio,
    ),
    Rule(
        name="update_kl",
        threshold=0.1,
        meaning="an iteration moves the policy further than its advantages are valid for",
        mend="Set trainer.target_kl (0.03), or lower trainer.learning_rate",
        check=_above("update/kl", "KL from the proximal policy in nats a token", 2),
    ),
    Rule(
        name="reference_kl",
        threshold=2.0,
        meaning="the policy speaks another language than the one it started from",
        mend="Raise the weight of reference_kl, or kl_in_reward",
        check=_reference_kl,
    ),
    Rule(
        name="entropy",
        threshold=0.1,
        meaning="the policy says nearly always the same, so nothing new is tried",
        mend="Add {name: entropy, floor: ...} to losses, raise ppo.clip_high or rollout.temperature",
        check=_entropy,
    ),
    Rule(
        name="gradient",
        threshold=100.0,
        meaning="one batch pulls with a force that the others do not have; a collapse often begins so",
        mend="Look for odd rewards in the newest rollouts; keep trainer.max_grad_norm above 0",
        check=_gradient,
    ),
    Rule(
        name="reward_hacking",
        threshold=0.05,
        meaning="the policy earns more of this part and succeeds less often: the part can be had without success",
        mend="Stop, read the newest rollouts, lower or mend that part (a potential or a bound), refit its evaluator",
        check=_reward_hacking,
    ),
    Rule(
        name="reward_without_success",
        threshold=0.5,
        meaning="the policy earns more of this part and succeeds no more often: it may be had without success",
        mend="Read the newest rollouts: steps that come before success are well, else lower or mend that part",
        check=_reward_without_success,
    ),
    Rule(
        name="success",
        threshold=0.1,
        meaning="the policy forgets, or what it is paid for is not success",
        mend="Go back to an earlier checkpoint with a lower trainer.learning_rate or larger minibatches; where a part "
        "still pays as before, give the outcome more weight or mend that part",
        check=_success,
    ),
)


class Health:
    """Looks at the metrics of every iteration. What it remembers is checkpointed with the run."""

    def __init__(self, streams: Mapping[str, StreamSettings], *, rules: Sequence[Rule] = RULES) -> None:
        self._streams, self._rules = dict(streams), tuple(rules)
        self._window: list[dict[str, float]] = []
        self._entropies: list[float] = []
        self._beginnings: dict[str, list[list[float]]] = {}
        self._raised: set[str] = set()

    def observe(self, metrics: Metrics) -> list[Alarm]:
        """The alarms that hold after this iteration."""
        self._window = [*self._window, dict(metrics)][-WINDOW:]
        if len(self._entropies) < 3 and "update/entropy" in metrics:
            self._entropies.append(metrics["update/entropy"])
        self._note_beginnings(metrics)
        first = fmean(self._entropies) if self._entropies else None
        history = History(window=self._window, streams=self._streams, first_entropy=first, beginnings=self._beginnings)
        found = [
            Alarm(name=rule.name, seen=seen, meaning=rule.meaning, mend=rule.mend, first=rule.name not in self._raised)
            for rule in self._rules
            if (seen := rule.check(history, rule.threshold)) is not None
        ]
        self._raised |= {alarm.name for alarm in found}
        return found

    def _note_beginnings(self, metrics: Metrics) -> None:
        if not {"episodes/success", "episodes/played"} <= metrics.keys():
            return
        for name, paid in metrics.items():
            part = name.removeprefix("credit/paid/")
            noted = self._beginnings.setdefault(part, []) if part != name and paid else None
            if noted is not None and len(noted) < WINDOW // 2:
                noted.append([paid, metrics["episodes/success"], metrics["episodes/played"]])

    def state(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "window": self._window,
            "entropies": self._entropies,
            "beginnings": self._beginnings,
            "raised": sorted(self._raised),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._window = [dict(one) for one in state["window"]]
        self._entropies = list(state["entropies"])
        self._beginnings = {part: [list(one) for one in noted] for part, noted in state["beginnings"].items()}
        self._raised = set(state["raised"])
