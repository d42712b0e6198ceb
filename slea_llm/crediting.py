"""From scored trajectories to credit: rewards by stream and named part, then the assigner.

Runs when a batch is drawn, never before, so that every trajectory gets today's values and advantages.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slea_llm.augmenters.weighting import StepWeighting, check_weights
from slea_llm.credit.placement import Layout, known_tokens, lay_out, unscored_steps
from slea_llm.errors import ConfigError, CreditError, UnsupportedError, nearest
from slea_llm.interfaces import Augmenter, CreditAssigner, Gated, Reducer, StepWeigher, Versioned
from slea_llm.settings import StreamSettings, WeightSettings
from slea_llm.types import STEP_KINDS, AugmentedExperience, ScoredTrajectory, Step, TokenStats, Trajectory

Floats = NDArray[np.float64]

OUTCOME = "outcome"
"""The part that the environment pays, turn by turn."""
REFERENCE_KL = "reference_kl"
"""The part that charges every token its log-ratio to the reference policy (k1 in the reward)."""


def check_streams(
    streams: Mapping[str, StreamSettings],
    evaluators: Collection[str],
    augmenters: Collection[str],
    *,
    kl_in_reward: bool,
    kl_in_loss: bool,
    logged_only: Collection[str] = (),
    weighing: Collection[str] = (),
) -> None:
    """Refuse streams that count something twice, never, or from nowhere; needs nothing but names.

    `augmenters` names those that pay. `logged_only` names evaluators that are meant to feed no stream, `weighing`
    augmenters whose weights are in use, so that they need not feed one. Raises UnsupportedError for double counting and
    ConfigError for the rest, each with the mend.
    """
    if kl_in_reward and kl_in_loss:
        raise UnsupportedError(
            "the KL to the reference is in the reward (kl_coef) and in the loss (reference_kl): it would count twice; "
            "set kl_coef to 0 or take the loss term out"
        )
    clashes = sorted(set(evaluators) & set(augmenters) | {OUTCOME, REFERENCE_KL} & {*evaluators, *augmenters})
    if clashes:
        raise ConfigError(f"part name {clashes[0]!r} is used by two parts; rename one")
    known = {OUTCOME, *evaluators, *augmenters} | ({REFERENCE_KL} if kl_in_reward else set())
    fed = _check_sources(streams, known)
    if kl_in_reward and REFERENCE_KL not in fed:
        raise ConfigError(f"kl_coef is set, but no stream has {REFERENCE_KL!r} among its sources; add it to one")
    for name in sorted(augmenters):
        if name not in fed and name not in weighing:
            raise ConfigError(f"augmenter {name!r} feeds no stream; add it to the sources of one or take it out")
    for name in sorted(evaluators):
        if name not in fed and name not in logged_only:
            raise ConfigError(
                f"evaluator {name!r} feeds no stream; add it to the sources of one, or say that it is only logged"
            )


def _check_sources(streams: Mapping[str, StreamSettings], known: Collection[str]) -> dict[str, str]:
    """Part -> the stream that it feeds; raises when a stream's own settings do not hold."""
    if not streams:
        raise ConfigError("no reward stream is set; give at least one, for example outcome: {sources: [outcome]}")
    fed: dict[str, str] = {}
    for name, stream in streams.items():
        for source in stream.sources:
            if source == REFERENCE_KL and source not in known:
                raise ConfigError(f"stream {name!r} takes {source!r}, but kl_coef is 0; set it or take the source out")
            if source not in known:
                raise ConfigError(
                    f"stream {name!r}: unknown source {source!r}; one of {', '.join(sorted(known))}"
                    f"{nearest(source, known)}"
                )
            if source in fed:
                raise UnsupportedError(
                    f"part {source!r} feeds stream {fed[source]!r} and stream {name!r}: it would count twice; "
                    "name it in one place"
                )
            fed[source] = name
        if not (math.isfinite(stream.weight) and stream.weight >= 0.0):
            raise ConfigError(f"stream {name!r}: weight {stream.weight} must be 0 or above")
        for kind in stream.kinds:
            if kind not in STEP_KINDS:
                raise ConfigError(
                    f"stream {name!r}: step kind {kind!r} is not one of {', '.join(STEP_KINDS)}"
                    f"{nearest(kind, STEP_KINDS)}"
                )
    return fed


class Crediting:
    """Rewards of every part, placed on the tokens that earned them, and the credit that the assigner makes of them."""

    def __init__(
        self,
        streams: Mapping[str, StreamSettings],
        augmenters: Sequence[Augmenter | StepWeigher],
        assigner: CreditAssigner,
        *,
        kl_coef: float = 0.0,
        evaluators: Collection[str] | None = None,
        logged_only: Collection[str] = (),
        weights: WeightSettings | None = None,
    ) -> None:
        """`kl_coef` is the price of one nat of log-ratio to the reference. `evaluators` None: not known yet, so that a
        source which is nothing else is taken for one and looked for in the trajectories.

        Raises what `check_streams` and `check_weights` raise.
        """
        if not (math.isfinite(kl_coef) and kl_coef >= 0.0):
            raise ConfigError(f"kl_coef {kl_coef} must be 0 or above")
        names = [augmenter.name for augmenter in augmenters]
        if len(set(names)) != len(names):
            raise ConfigError(f"augmenters {', '.join(names)} do not have names of their own")
        if evaluators is None:
            sources = {source for stream in streams.values() for source in stream.sources}
            evaluators = sources - {OUTCOME, REFERENCE_KL, *names}
        settings = weights or WeightSettings()
        payers = {one.name: one for one in augmenters if isinstance(one, Augmenter)}
        weighers = {one.name: one for one in augmenters if isinstance(one, StepWeigher)}
        check_weights(settings, weighers, payers)
        check_streams(
            streams,
            evaluators,
            list(payers),
            kl_in_reward=kl_coef > 0.0,
            kl_in_loss=False,
            logged_only=logged_only,
            weighing=settings.sources,
        )
        self.streams = dict(streams)
        self.kl_coef = kl_coef
        self.evaluators = tuple(sorted(evaluators))
        self.weighting = StepWeighting(settings, [weighers[source] for source in settings.sources])
        self._augmenters = payers
        self.augmenters = tuple(augmenters)
        self._assigner = assigner
        self.heads: tuple[str, ...] = getattr(assigner, "heads", tuple(streams))
        """The value heads of the critic: those that the credit method asks for, one a stream if it asks for none."""
        self.conditional: str = getattr(getattr(assigner, "config", None), "conditional", "none")
        """What the credit method reads of a critic after a step, as `nested_gae` names it."""

    def credit(
        self,
        scored: Sequence[ScoredTrajectory],
        stats: Sequence[TokenStats],
        *,
        progress: float,
        reducer: Reducer,
    ) -> tuple[AugmentedExperience, ...]:
        """Credit of the trajectories that can carry any, in the given order.

        `stats[i]` belongs to `scored[i]`. Failed trajectories and those in which nothing was sampled are left out;
        `summary` counts them. `progress` in [0, 1] is the share of training done. Every rank calls this, also one
        that holds no trajectory. Raises CreditError when scores, rewards or stats do not fit a trajectory.
        """
        if len(scored) != len(stats):
            raise CreditError(f"{len(scored)} trajectories and {len(stats)} token stats do not pair")
        kept = [
            (self._without_shut(one), stat)
            for one, stat in zip(scored, stats, strict=True)
            if carries_credit(one.trajectory)
        ]
        rewards = [self.rewards(one, stat, progress=progress) for one, stat in kept]
        # Said only where it changes something, so that a method without streams that fade need not know of it.
        fading = {"progress": progress} if any(stream.fade_until for stream in self.streams.values()) else {}
        stats = [stat for _, stat in kept]
        credited = self._assigner.assign([one for one, _ in kept], rewards, stats, reducer, **fading)
        if versions := {one.name: one.version for one in self.augmenters if isinstance(one, Versioned)}:
            credited = tuple(dataclasses.replace(one, versions={**one.versions, **versions}) for one in credited)
        return self._weighted(credited, progress, reducer) if self.weighting.in_loss else credited

    def _without_shut(self, scored: ScoredTrajectory) -> ScoredTrajectory:
        """The trajectory with every learnt augmenter whose gate is shut named as such: it pays nothing, and a stream
        that has no other source claims no token."""
        shut = [name for name, one in self._augmenters.items() if isinstance(one, Gated) and not one.gate.open]
        return dataclasses.replace(scored, shut=(*scored.shut, *shut)) if shut else scored

    def _weighted(
        self, credited: Sequence[AugmentedExperience], progress: float, reducer: Reducer
    ) -> tuple[AugmentedExperience, ...]:
        """Lambda on the tokens of the steps, its mean over the policy tokens of all ranks brought to 1, so that the
        size of an update is not moved."""
        spread = []
        for one in credited:
            layout, weights = lay_out(one.scored), self.weighting.for_loss(one.scored, progress)
            tokens = np.ones(layout.tokens)
            for step in layout.steps:
                tokens[step.start : step.end] = weights[step.key]
            spread.append(tokens)
        live = [tokens[one.policy_mask] for tokens, one in zip(spread, credited, strict=True)]
        total, count = reducer.sum([math.fsum(float(part.sum()) for part in live), float(sum(p.size for p in live))])
        mean = total / count if total > 0.0 else 1.0
        return tuple(
            dataclasses.replace(one, weights=tokens / mean) for one, tokens in zip(credited, spread, strict=True)
        )

    def rewards(self, scored: ScoredTrajectory, stats: TokenStats, *, progress: float) -> dict[str, dict[str, Floats]]:
        """`[stream][part]`, (n,) each: what every sampled token of one trajectory earned, times the stream's scale."""
        layout = lay_out(scored)
        return {
            name: {
                source: stream.reward_scale * self._part(source, scored, stats, layout, progress)
                for source in stream.sources
            }
            for name, stream in self.streams.items()
        }

    def _part(
        self, source: str, scored: ScoredTrajectory, stats: TokenStats, layout: Layout, progress: float
    ) -> Floats:
        if source == OUTCOME:
            return _outcome(scored.trajectory, layout)
        if source == REFERENCE_KL:
            return _reference_kl(stats, layout, self.kl_coef)
        if source in scored.shut:
            return np.zeros(layout.tokens)
        if source in self._augmenters:
            return _on_steps(source, self._augmenters[source].augment(scored, progress), layout)
        if source not in scored.evaluator_versions:
            known = ", ".join(sorted(scored.evaluator_versions)) or "no evaluator"
            raise CreditError(f"trajectory {layout.trajectory_id} was scored by {known}, not by {source!r}")
        scores = scored.scores_of(source).items()
        return _on_steps(source, {key: one.score for key, one in scores if one.score is not None}, layout)

    def summary(
        self,
        scored: Sequence[ScoredTrajectory],
        experiences: Sequence[AugmentedExperience],
        *,
        reducer: Reducer,
    ) -> dict[str, float]:
        """Metrics of one call of `credit`, over all ranks (docs/credit.md says what each name means).

        A metric without a denominator (no reward at all, targets that are all equal) is left out on every rank, and so
        is what concerns a critic when none is read.
        """
        metrics = self._counts(scored, experiences, reducer)
        metrics |= self._advantages(experiences, reducer)
        names = list(self.streams)
        pairs = [_targets_and_values(experiences, name, self.streams[name]) for name in names]
        errors, targets = [target - value for target, value in pairs], [target for target, _ in pairs]
        moments = _moments([*errors, *targets], reducer)
        largest = reducer.max([float(np.abs(error).max(initial=0.0)) for error in errors])
        if not any(reducer.sum([float(error.size) for error in errors])):
            return metrics
        for name, (mean, variance), (_, spread), peak in zip(
            names, moments[: len(names)], moments[len(names) :], largest, strict=True
        ):
            metrics[f"credit/{name}/advantage_mean"] = mean
            metrics[f"credit/{name}/advantage_std"] = math.sqrt(variance)
            metrics[f"credit/{name}/advantage_max"] = peak
            if spread > 0.0:
                metrics[f"credit/{name}/explained_variance"] = 1.0 - variance / spread
        return metrics

    def _advantages(self, experiences: Sequence[AugmentedExperience], reducer: Reducer) -> dict[str, float]:
        """The largest reward of every stream, and what share of the trained tokens has no advantage or a cut one."""
        paid = [
            np.concatenate([np.zeros(1), *(np.abs(sum(one.rewards[name].values())) for one in experiences)])
            for name in self.streams
        ]
        largest = reducer.max([float(part.max()) for part in paid])
        advantages = np.concatenate([np.zeros(0), *(np.abs(one.advantages[one.policy_mask]) for one in experiences)])
        bound = float(getattr(getattr(self._assigner, "config", None), "clip", 0.0))
        cut = float(np.count_nonzero(advantages >= bound)) if bound else 0.0
        tokens, idle, cut = reducer.sum([float(advantages.size), float(np.count_nonzero(advantages == 0.0)), cut])
        metrics = {f"credit/{name}/reward_max": peak for name, peak in zip(self.streams, largest, strict=True)}
        if tokens:
            metrics |= {"credit/idle": idle / tokens, "credit/clipped": cut / tokens}
        return metrics

    def _counts(
        self, scored: Sequence[ScoredTrajectory], experiences: Sequence[AugmentedExperience], reducer: Reducer
    ) -> dict[str, float]:
        parts = [(name, source) for name, stream in self.streams.items() for source in stream.sources]
        evaluators = [source for _, source in parts if source in self.evaluators]
        sizes = [sum(float(np.abs(e.rewards[name][source]).sum()) for e in experiences) for name, source in parts]
        paid = [sum(float(e.rewards[name][source].sum()) for e in experiences) for name, source in parts]
        missing = [sum(len(unscored_steps(e.scored, name)) for e in experiences) for name in evaluators]
        steps = sum(len(e.scored.leaves()) for e in experiences)
        failed = sum(one.trajectory.failed for one in scored)
        empty = len(scored) - failed - len(experiences)
        numbers = (failed, empty, steps, len(experiences), *missing, *sizes, *paid)
        broken, unheard, leaves, dialogues, *rest = reducer.sum([float(number) for number in numbers])
        metrics = {"credit/failed": broken, "credit/empty": unheard}
        if leaves > 0.0:
            without = zip(evaluators, rest, strict=False)
            metrics.update({f"credit/unscored/{evaluator}": count / leaves for evaluator, count in without})
        sizes, paid = rest[len(evaluators) : len(evaluators) + len(parts)], rest[len(evaluators) + len(parts) :]
        if (total := sum(sizes)) > 0.0:
            shares = zip(parts, sizes, strict=True)
            metrics.update({f"credit/share/{source}": size / total for (_, source), size in shares})
        if self.weighting.in_loss:
            metrics |= _weight_metrics(experiences, reducer)
        if dialogues > 0.0:
            means = zip(parts, paid, strict=True)
            metrics.update({f"credit/paid/{source}": amount / dialogues for (_, source), amount in means})
        return metrics


def earned(experience: AugmentedExperience) -> dict[tuple[int, int], dict[str, float]]:
    """`(turn, step) -> part -> reward`: which part paid which leaf step, times the scale of its stream."""
    parts = {part: paid for stream in experience.rewards.values() for part, paid in stream.items()}
    return {
        step.key: {part: float(paid[step.start : step.end].sum()) for part, paid in parts.items()}
        for step in lay_out(experience.scored).steps
    }


def with_parents(steps: Sequence[Step], values: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Credit of every step by `(turn, index)`, from that of the leaf steps: a parent's is the sum of its children's.

    A parent with a child that has no value has none either. A parent must stand before its children.
    """
    totals = dict(values)
    children: dict[tuple[int, int], list[float | None]] = {}
    for step in reversed(steps):
        key = (step.turn, step.index)
        if (below := children.get(key)) is not None:
            known = [value for value in below if value is not None]
            totals.pop(key, None)
            if len(known) == len(below):
                totals[key] = math.fsum(known)
        if step.parent is not None:
            children.setdefault((step.turn, step.parent), []).append(totals.get(key))
    return totals


def carries_credit(trajectory: Trajectory) -> bool:
    """False for a failed trajectory and for one that ended before the policy sampled a token."""
    return not trajectory.failed and bool(trajectory.turns)


def _outcome(trajectory: Trajectory, layout: Layout) -> Floats:
    """The reward of every turn on the last token that was sampled in it, never on what came after it."""
    paid = sum(turn.reward for turn in trajectory.turns)
    if trajectory.outcome is None or not math.isclose(paid, trajectory.outcome, rel_tol=1e-9, abs_tol=1e-9):
        raise CreditError(
            f"trajectory {trajectory.id}: its turns earned {paid}, its outcome is {trajectory.outcome}; "
            "a reward would be lost or made up"
        )
    rewards = np.zeros(layout.tokens)
    for turn, place in zip(trajectory.turns, layout.turns, strict=True):
        if place.end > place.start:
            rewards[place.end - 1] += turn.reward
        elif turn.reward:
            raise CreditError(f"trajectory {trajectory.id}: turn {turn.index} earned {turn.reward} without any token")
    return rewards


def _reference_kl(stats: TokenStats, layout: Layout, kl_coef: float) -> Floats:
    """k1 in the reward: minus the coefficient times log pi - log ref, at every token."""
    for what, array in (("proximal", stats.proximal), ("reference", stats.reference)):
        if array.shape != (layout.tokens,):
            raise CreditError(
                f"trajectory {layout.trajectory_id}: {what} log-probs have shape {array.shape}, "
                f"should be ({layout.tokens},)"
            )
    return -kl_coef * (np.asarray(stats.proximal, np.float64) - np.asarray(stats.reference, np.float64))


def _on_steps(part: str, numbers: Mapping[tuple[int, int], float], layout: Layout) -> Floats:
    """Step rewards on the last token of their steps."""
    rewards = np.zeros(layout.tokens)
    earners = {step.key: step.earner for step in layout.steps}
    for key, number in numbers.items():
        if key not in earners:
            raise CreditError(
                f"trajectory {layout.trajectory_id}: part {part!r} pays step {key}, which is no leaf step"
            )
        if not math.isfinite(number):
            raise CreditError(f"trajectory {layout.trajectory_id}: part {part!r} pays step {key} {number}")
        rewards[earners[key]] += number
    return rewards


def _weight_metrics(experiences: Sequence[AugmentedExperience], reducer: Reducer) -> dict[str, float]:
    """The largest weight of a policy token, and the share of the tokens that would give as much with equal weights."""
    live = [one.weights[one.policy_mask] for one in experiences]
    count, total, square = reducer.sum([float(sum(part.size for part in live)), *_sum_and_square(live)])
    (largest,) = reducer.max([max((float(part.max(initial=0.0)) for part in live), default=0.0)])
    if square <= 0.0:
        return {}
    return {"credit/weights/max": largest, "credit/weights/effective_share": total * total / (count * square)}


def _sum_and_square(arrays: Sequence[Floats]) -> tuple[float, float]:
    return math.fsum(float(one.sum()) for one in arrays), math.fsum(float(np.square(one).sum()) for one in arrays)


def _targets_and_values(
    experiences: Sequence[AugmentedExperience], name: str, stream: StreamSettings
) -> tuple[Floats, Floats]:
    """Targets and values of one stream where the critic is read and every score is known."""
    targets, values = [np.zeros(0)], [np.zeros(0)]
    for one in experiences:
        read = one.value_mask & known_tokens(one.scored, lay_out(one.scored), stream.sources)
        targets.append(one.returns[name][read])
        values.append(np.asarray(one.stats.values[name], np.float64)[:-1][read])
    return np.concatenate(targets), np.concatenate(values)


def _moments(arrays: Sequence[Floats], reducer: Reducer) -> list[tuple[float, float]]:
    """Mean and population variance of each array over all ranks; 0 and 0 of an empty one."""
    sums = reducer.sum([number for array in arrays for number in (float(array.size), float(array.sum()))])
    counts = [max(count, 1.0) for count in sums[0::2]]
    means = [total / count for total, count in zip(sums[1::2], counts, strict=True)]
    squares = reducer.sum([float(np.square(a - mean).sum()) for a, mean in zip(arrays, means, strict=True)])
    return [(mean, square / count) for mean, square, count in zip(means, squares, counts, strict=True)]
