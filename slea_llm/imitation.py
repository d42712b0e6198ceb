"""What is imitated in an iteration: the best steps of successes, by clusters of alike states.

Only a step with a gain, in a dialogue that succeeded and that no reviewer changed, is ever imitated. Nothing is kept
from one iteration to the next, so that a resumed run chooses what the whole one would have chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slea_llm.credit.placement import lay_out
from slea_llm.demonstrations import TOKENISED, Demonstrations, is_tokenised
from slea_llm.encoders import SentenceEncoder
from slea_llm.errors import CreditError
from slea_llm.interfaces import Reducer
from slea_llm.losses.imitation import ImitationConfig
from slea_llm.losses.imitation_prototypes import PrototypeConfig
from slea_llm.settings import StreamSettings
from slea_llm.types import (
    AugmentedExperience,
    ScoredTrajectory,
    Step,
    TokenSpan,
    TokenStats,
    TokenTrace,
    Trajectory,
    Turn,
)

Floats = NDArray[np.float64]
ADVANTAGE = "advantage"


def leader_clusters(vectors: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """(n,) cluster of each vector of length 1: that of the first leader with a cosine of `threshold` or more.

    A vector without one leads a new cluster, so that the result depends on the order alone.
    """
    leaders: list[NDArray[np.float32]] = []
    labels = np.zeros(len(vectors), np.int64)
    for row, vector in enumerate(vectors):
        alike = np.flatnonzero(np.stack(leaders) @ vector >= threshold - 1e-6) if leaders else np.zeros(0, np.int64)
        labels[row] = alike[0] if len(alike) else len(leaders)
        if not len(alike):
            leaders.append(vector)
    return labels


def awr_weights(advantages: Floats, *, beta: float, largest: float) -> Floats:
    """min(exp(A / beta), largest): advantage-weighted regression (Peng et al. 2019)."""
    return np.exp(np.minimum(advantages / beta, np.log(largest)))  # type: ignore[no-any-return]


def sil_weights(returns: Floats, values: Floats, *, largest: float = 1.0) -> Floats:
    """(R - V)+ cut at `largest`: self-imitation (Oh et al. 2018, whose code cuts at 1)."""
    return np.clip(returns - values, 0.0, largest)


def smoothed(counts: NDArray[np.int64], *, added: float = 1.0) -> Floats:
    """Laplace-smoothed shares: (count + added) / (sum + added n)."""
    raised = counts + added
    return raised / raised.sum()  # type: ignore[no-any-return]


def divergence(p: Floats, q: Floats) -> float:
    """KL(p || q) in nats, of shares that are nowhere 0."""
    return float((p * np.log(p / q)).sum())


def faded(progress: float, until: float) -> float:
    """1 at the start, 0 from `until` on, in a straight line."""
    return max(0.0, 1.0 - progress / until)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A leaf step of experience `owner`, tokens `[start, end)` in sampled order. `gain` None: not to be imitated."""

    owner: int
    step: Step
    start: int
    end: int
    state: str
    gain: float | None


class Imitation:
    """Marks the steps that the imitation losses of a recipe learn from; either of `steps` and `prototypes` may be None.

    `encoder(name)` gives a sentence encoder, `streams` are the reward streams of the run.
    """

    def __init__(
        self,
        steps: ImitationConfig | None,
        prototypes: PrototypeConfig | None,
        *,
        encoders: Mapping[str, SentenceEncoder],
        streams: Mapping[str, StreamSettings],
        demonstrations: Demonstrations | None = None,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        self._steps, self._prototypes = steps, prototypes
        self._encoders, self._streams = encoders, dict(streams)
        self._demonstrations, self._seed, self._rank = demonstrations, seed, rank
        self._heads: tuple[str, ...] = tuple(streams)

    def mark(
        self, experiences: Sequence[AugmentedExperience], *, iteration: int, progress: float, reducer: Reducer
    ) -> tuple[list[AugmentedExperience], dict[str, float]]:
        """The experiences with the chosen steps marked, then demonstrations and prototypes, and metrics of all ranks.

        `progress` in [0, 1] is the share of training done. Every rank calls it, also one without experiences.
        """
        marked = list(experiences)
        metrics: dict[str, float] = {}
        if experiences:
            self._heads = tuple(experiences[0].stats.values)
        if self._steps is not None:
            marked, metrics = self._mark_steps(self._steps, marked, iteration, progress, reducer)
        if self._prototypes is not None:
            more, said = self._add_prototypes(self._prototypes, experiences, iteration, progress, reducer)
            marked, metrics = [*marked, *more], metrics | said
        return marked, metrics

    def _mark_steps(
        self,
        config: ImitationConfig,
        experiences: list[AugmentedExperience],
        iteration: int,
        progress: float,
        reducer: Reducer,
    ) -> tuple[list[AugmentedExperience], dict[str, float]]:
        fade = faded(progress, config.fade_until)
        logged = self._logged(config, iteration) if fade else []
        pool = [*experiences, *logged]
        steps = _found(pool, config.gain) if fade else []
        clusters = self._clusters(steps, config)
        chosen = best(steps, clusters, config.top)
        weights: list[float] = []
        arrays: dict[int, Floats] = {}
        for number in chosen:
            step = steps[number]
            one = pool[step.owner]
            array = arrays.setdefault(step.owner, np.full(len(one.weights), np.nan))
            array[step.start : step.end] = fade * self._weights(config, one)[step.start : step.end]
            weights.append(float(array[step.start : step.end].mean()))
        marked = [replace(one, imitation=arrays[n]) if n in arrays else one for n, one in enumerate(pool)]
        kept = marked[: len(experiences)] + [one for one in marked[len(experiences) :] if one.imitation is not None]
        apart, watched = self._monitor(config, pool, steps, clusters, chosen)
        own = np.array(weights)
        gained = sum(one.gain is not None for one in steps)
        counts = (len(chosen), gained, len(kept) - len(experiences), own.sum(), np.square(own).sum(), apart, watched)
        sums = reducer.sum([float(count) for count in counts])
        metrics = {
            "imitation/fade": fade,
            "imitation/steps": sums[0],
            "imitation/candidates": sums[1],
            "imitation/demonstrations": sums[2],
        }
        if sums[4]:
            metrics["imitation/ess"] = sums[3] ** 2 / sums[4]
        if sums[6]:
            metrics["imitation/cluster_kl"] = sums[5] / sums[6]
        return kept, metrics

    def _logged(self, config: ImitationConfig, iteration: int) -> list[AugmentedExperience]:
        """Demonstrations of this iteration, which carry no credit."""
        if self._demonstrations is None or not len(self._demonstrations):
            return []
        rng = np.random.default_rng([self._seed, self._rank, iteration])
        count = min(config.demonstrations_per_iteration, len(self._demonstrations))
        drawn = rng.choice(len(self._demonstrations), size=count, replace=False)
        return [self._bare(self._demonstrations[int(number)]) for number in sorted(drawn.tolist())]

    def _weights(self, config: ImitationConfig, one: AugmentedExperience) -> Floats:
        """(n,) what each token would weigh."""
        if config.form == "awr":
            return awr_weights(one.advantages, beta=config.beta, largest=config.max_weight)
        if config.form == "sil":
            if missing := sorted(self._streams.keys() - one.returns.keys()):
                raise CreditError(
                    f"trajectory {one.scored.trajectory.id} has no returns of stream {missing[0]!r}, which "
                    "imitation.form sil compares with values; use a credit method with a critic, or another form"
                )
            returns = sum(self._streams[name].weight * one.returns[name] for name in self._streams)
            read = _last_read(one)
            values = sum(self._streams[name].weight * one.stats.values[name][:-1][read] for name in self._streams)
            return sil_weights(np.asarray(returns), np.asarray(values))
        return np.ones(len(one.weights))

    def _vectors(self, texts: Sequence[str], config: ImitationConfig | PrototypeConfig) -> NDArray[np.float32]:
        return self._encoders[config.encoder].encode(texts)

    def _clusters(self, steps: Sequence[_Found], config: ImitationConfig | PrototypeConfig) -> list[tuple[str, int]]:
        """The cluster of each step: its kind, and the cluster of the state in which it was taken."""
        texts = list(dict.fromkeys(step.state for step in steps))
        if not texts:
            return []
        labels = dict(zip(texts, leader_clusters(self._vectors(texts, config), config.threshold).tolist(), strict=True))
        return [(step.step.kind, labels[step.state]) for step in steps]

    def _monitor(
        self,
        config: ImitationConfig,
        pool: Sequence[AugmentedExperience],
        steps: Sequence[_Found],
        clusters: Sequence[tuple[str, int]],
        chosen: Sequence[int],
    ) -> tuple[float, float]:
        """How far what today's policy says lies from what is imitated: sum of n KL(said || chosen), and of n.

        Both are Laplace-smoothed counts over clusters of steps, in each cluster of states where steps were chosen. It
        has no gradient; it is there to be watched.
        """
        total, watched = 0.0, 0.0
        best_of: dict[tuple[str, int], list[str]] = {}
        for number in chosen:
            best_of.setdefault(clusters[number], []).append(steps[number].step.text)
        for cluster, imitated in best_of.items():
            said = [
                step.step.text
                for step, own in zip(steps, clusters, strict=True)
                if own == cluster and _of_today(pool[step.owner])
            ]
            if said:
                texts = list(dict.fromkeys([*imitated, *said]))
                labels = leader_clusters(self._vectors(texts, config), config.threshold)
                label = dict(zip(texts, labels.tolist(), strict=True))
                size = int(labels.max()) + 1
                p, q = (
                    smoothed(np.bincount([label[text] for text in some], minlength=size)) for some in (said, imitated)
                )
                total, watched = total + len(said) * divergence(p, q), watched + len(said)
        return total, watched

    def _add_prototypes(
        self,
        config: PrototypeConfig,
        experiences: Sequence[AugmentedExperience],
        iteration: int,
        progress: float,
        reducer: Reducer,
    ) -> tuple[list[AugmentedExperience], dict[str, float]]:
        fade = faded(progress, config.fade_until)
        steps = _found(experiences, config.gain) if fade else []
        clusters = self._clusters(steps, config)
        members: dict[tuple[str, int], list[_Found]] = {}
        for step, cluster in zip(steps, clusters, strict=True):
            if step.gain is not None:
                members.setdefault(cluster, []).append(step)
        added: list[AugmentedExperience] = []
        for group in sorted(members.values(), key=len, reverse=True):
            if len(added) < config.states:
                name = f"prototypes-{iteration}-{self._rank}-{len(added)}"
                added += self._prototypes_of(config, group, experiences, name, fade)
        rows = sum(len(one.scored.trajectory.traces) for one in added)
        states, count = reducer.sum([float(len(added)), float(rows)])
        return added, {"imitation_prototypes/states": states, "imitation_prototypes/rows": count}

    def _prototypes_of(
        self,
        config: PrototypeConfig,
        group: Sequence[_Found],
        experiences: Sequence[AugmentedExperience],
        name: str,
        fade: float,
    ) -> list[AugmentedExperience]:
        """The best steps of a cluster of states behind the state of the very best; none when they are all alike."""
        texts = list(dict.fromkeys(one.step.text for one in group))
        labels = dict(zip(texts, leader_clusters(self._vectors(texts, config), config.threshold).tolist(), strict=True))
        alike: dict[int, list[_Found]] = {}
        for one in sorted(group, key=_gain, reverse=True):
            alike.setdefault(labels[one.step.text], []).append(one)
        kinds = sorted(alike.values(), key=lambda some: -float(np.mean([_gain(one) for one in some])))
        context = _context(max(group, key=_gain), experiences)
        longest = max(len(trace) for one in experiences for trace in one.scored.trajectory.traces)
        fitting = [some for some in kinds if len(context) + some[0].end - some[0].start <= longest][: config.prototypes]
        if len(fitting) < 2:
            return []
        gains = np.array([np.mean([_gain(one) for one in some]) for some in fitting])
        shares = np.exp((gains - gains.max()) / config.temperature)
        shares = (1 - config.smoothing) * shares / shares.sum() + config.smoothing / len(fitting)
        rows = [(some[0].step.text, _tokens(some[0], experiences)) for some in fitting]
        bare = self._bare(_behind(context, rows, name=name))
        return [replace(bare, imitation=np.full(len(bare.weights), fade), prototypes=shares)]

    def _bare(self, scored: ScoredTrajectory) -> AugmentedExperience:
        """An experience that is in no policy and no value loss."""
        n = scored.trajectory.sampled_tokens
        off, zeros = np.zeros(n, bool), np.zeros(n)
        stats = TokenStats(
            proximal=zeros,
            reference=zeros,
            values={head: np.zeros(n + 1) for head in self._heads},
            policy_version=scored.trajectory.policy_version,
            critic_version=0,
        )
        return AugmentedExperience(
            scored=scored,
            stats=stats,
            rewards={},
            advantages=zeros,
            returns=dict.fromkeys(self._heads, zeros),
            weights=np.ones(n),
            value_mask=off,
            policy_mask=off,
        )


def _last_read(one: AugmentedExperience) -> NDArray[np.int64]:
    """(n,) the last token up to each at which the critic is read: inside a unit it is not, nor is it trained there."""
    places = np.flatnonzero(one.value_mask)
    if not len(places):
        return np.arange(len(one.value_mask))
    behind = np.searchsorted(places, np.arange(len(one.value_mask)), side="right") - 1
    read: NDArray[np.int64] = places[behind.clip(min=0)]
    return read


def best(steps: Sequence[_Found], clusters: Sequence[tuple[str, int]], top: float) -> list[int]:
    """Numbers of the best share of the steps with a gain in every cluster, one at least; the earlier wins a tie."""
    groups: dict[tuple[str, int], list[int]] = {}
    for number, (step, cluster) in enumerate(zip(steps, clusters, strict=True)):
        if step.gain is not None:
            groups.setdefault(cluster, []).append(number)
    chosen: list[int] = []
    for numbers in groups.values():
        ranked = sorted(numbers, key=lambda number: -_gain(steps[number]))
        chosen += ranked[: max(1, int(np.ceil(top * len(ranked) - 1e-9)))]
    return sorted(chosen)


def _found(experiences: Sequence[AugmentedExperience], gain: str) -> list[_Found]:
    """Every leaf step that has tokens, in order."""
    found = []
    for owner, one in enumerate(experiences):
        trajectory = one.scored.trajectory
        states = {turn.index: _state(turn) for turn in trajectory.turns}
        gains = _gains(one, gain)
        steps = {(step.turn, step.index): step for step in one.scored.leaves()}
        for place in lay_out(one.scored).steps:
            if place.end > place.start:
                value = gains.get(place.key)
                found.append(
                    _Found(
                        owner=owner,
                        step=steps[place.key],
                        start=place.start,
                        end=place.end,
                        state=states[place.key[0]],
                        gain=value if value is not None and value > 0 else None,
                    )
                )
    return found


def _gains(one: AugmentedExperience, gain: str) -> dict[tuple[int, int], float]:
    """What each leaf step gained; nothing in a dialogue that is not to be imitated."""
    trajectory = one.scored.trajectory
    if not trajectory.counts_as_success or gain in one.scored.shut:
        return {}
    if gain != ADVANTAGE:
        return {key: said.score for key, said in one.scored.scores_of(gain).items() if said.score is not None}
    places = [place for place in lay_out(one.scored).steps if one.policy_mask[place.start : place.end].any()]
    return {
        place.key: float(one.advantages[place.start : place.end][one.policy_mask[place.start : place.end]].mean())
        for place in places
    }


def _state(turn: Turn) -> str:
    """What the state of a turn reads: the environment's public state, or what was said since the last reply."""
    if turn.state_before:
        return json.dumps(turn.state_before, sort_keys=True, ensure_ascii=False, default=str)
    return "\n".join(message.content for message in turn.context)


def _of_today(one: AugmentedExperience) -> bool:
    trajectory = one.scored.trajectory
    return not is_tokenised(trajectory) and trajectory.policy_version == one.stats.policy_version


def _gain(found: _Found) -> float:
    return found.gain if found.gain is not None else 0.0


def _trace(found: _Found, experiences: Sequence[AugmentedExperience]) -> tuple[TokenTrace, TokenSpan]:
    span = found.step.tokens or TokenSpan(0, 0, 0)
    return experiences[found.owner].scored.trajectory.traces[span.row], span


def _context(found: _Found, experiences: Sequence[AugmentedExperience]) -> tuple[int, ...]:
    """The tokens before a step."""
    trace, span = _trace(found, experiences)
    return trace.token_ids[: span.start]


def _tokens(found: _Found, experiences: Sequence[AugmentedExperience]) -> tuple[int, ...]:
    trace, span = _trace(found, experiences)
    return trace.token_ids[span.start : span.end]


def _behind(context: tuple[int, ...], rows: Sequence[tuple[str, tuple[int, ...]]], *, name: str) -> ScoredTrajectory:
    """The steps as rows behind one context. Marked: no policy sampled them there."""
    turns, traces = [], []
    for number, (text, ids) in enumerate(rows):
        mask = (False,) * len(context) + (True,) * len(ids)
        traces.append(TokenTrace(token_ids=context + ids, sampled_mask=mask, logprobs=(0.0,) * len(mask)))
        turns.append(Turn(index=number, context=(), text=text, span=TokenSpan(number, len(context), len(mask))))
    trajectory = Trajectory(
        id=name,
        task={},
        environment="",
        seed=0,
        policy_version=0,
        turns=tuple(turns),
        traces=tuple(traces),
        outcome=0.0,
        termination="success",
        provenance={TOKENISED: "good steps, put behind one of the states in which they were taken"},
    )
    return ScoredTrajectory(trajectory=trajectory, steps=(), scores=(), parser="")
