"""Weigh or pay steps by the attention of a reader that was trained to predict the return of whole dialogues."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from slea_llm.augmenters import attention_reader
from slea_llm.augmenters.learnt import Arrays, Floats, Held, LearntAugmenter
from slea_llm.augmenters.places import Place, row_size, rows, step_places
from slea_llm.errors import ConfigError, CreditError, StorageError, UnsupportedError
from slea_llm.measures import rank_correlation
from slea_llm.settings import StreamSettings
from slea_llm.types import ScoredTrajectory

MIN_PROBES = 30
"""Steps with a counterfactual score, from which agreement with them is told."""


class AttentionCredit(LearntAugmenter):
    """Attention says what a reader looked at, not what moved the outcome: it is used where it is proved, else replaced.

    The reader predicts the return of a dialogue from its steps: softmax(q k / sqrt(width)) over the steps weighs their
    values. Its attention is trusted when its rank correlation with the size of the counterfactual scores of dialogues
    that it had not learnt from reaches `min_rank`. Otherwise the size of g(all steps) - g(all but this one) takes its
    place, g being the prediction (Jain and Wallace 2019).

    As a weight (`weights.sources`) a step weighs its share times the number of steps, mean 1. As a payer it moves
    `share` of the outcome from the end to the steps: share (alpha_k R) there, minus share R on the last one (Chan et
    al. 2024, attention-based credit). The sum over the dialogue is 0, so it belongs beside `outcome` in one stream. The
    best policy stays the best at a discount of 1 alone. Nothing is moved or weighed until its gate opens.
    """

    name: ClassVar[str] = "attention_credit"
    bound: ClassVar[tuple[str, ...]] = ("width",)

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        share: float = 0.5
        """Of the outcome that is moved to the steps, when it pays; in [0, 1]."""
        read: Literal["auto", "attention", "leave_one_out"] = "auto"
        """`auto`: attention where counterfactuals prove it. `attention`: in any case, whatever it means."""
        probe: str = "counterfactual"
        """Evaluator whose scores prove the attention."""
        min_rank: float = 0.3
        """Rank correlation (Spearman) from which attention is trusted; in [-1, 1]."""
        encoder: str = "hashing"
        """Sentence encoder of what was said and heard; `use-multilingual` reads meaning, at some 10 ms a new text."""
        width: int = 32
        """Of keys and values, 1 or more."""
        refresh_every: int = 32
        """Finished dialogues after which the reader learns again. 0: never."""
        window: int = 256
        """Newest dialogues that it learns from, 1 or more."""
        model: str = ""
        """Folder of a copy that an earlier run fitted, `<run>/augmenters/attention_credit/iteration-N`, to start
        from."""

        def __post_init__(self) -> None:
            if self.read not in ("auto", "attention", "leave_one_out"):
                raise ConfigError(f"read {self.read!r} is not one of auto, attention, leave_one_out")
            if not 0.0 <= self.share <= 1.0:
                raise ConfigError(f"share {self.share} is not in [0, 1]")
            if not -1.0 <= self.min_rank <= 1.0:
                raise ConfigError(f"min_rank {self.min_rank} is not in [-1, 1]")
            for key, least in (("width", 1), ("window", 1), ("refresh_every", 0)):
                if getattr(self, key) < least:
                    raise ConfigError(f"{key} {getattr(self, key)} must be {least} or more")

    def __init__(self, config: Config) -> None:
        self.config: AttentionCredit.Config = config
        super().__init__(encoder=config.encoder, refresh_every=config.refresh_every, window=config.window)
        self.reads = frozenset({config.probe} if config.probe else ())
        self.agreement: float | None = None
        """Rank correlation of attention and the size of counterfactual scores; None for too few of them."""
        if config.model:
            self.load(Path(config.model))

    @classmethod
    def fits(cls, config: Config, name: str, stream: StreamSettings) -> list[str]:
        """What is odd about feeding this stream. Raises UnsupportedError when it has no outcome that can be moved."""
        del config
        if "outcome" not in stream.sources:
            raise UnsupportedError(
                f"augmenter {cls.name} moves the outcome from the end to the steps, but stream {name} has no outcome; "
                "name both among the sources of one stream, or use it as a weight"
            )
        if stream.gamma_turn != 1.0:
            return [
                f"augmenter {cls.name} moves the outcome to earlier turns, where it is worth more under gamma_turn "
                f"{stream.gamma_turn} of stream {name}: set gamma_turn to 1, or use it as a weight"
            ]
        return []

    def augment(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> reward`, of sum 0 over the dialogue; nothing before there is a copy."""
        del progress
        trajectory = scored.trajectory
        if self._arrays is None or trajectory.failed or trajectory.outcome is None:
            return {}
        shares = self.shares(scored)
        return moved(shares, outcome=trajectory.outcome, share=self.config.share)

    def weights(self, scored: ScoredTrajectory, progress: float) -> Mapping[tuple[int, int], float]:
        """`(turn, step) -> weight` of mean 1; nothing before there is a copy."""
        del progress
        if self._arrays is None or scored.trajectory.failed:
            return {}
        shares = self.shares(scored)
        return {key: share * len(shares) for key, share in shares.items()}

    def shares(self, scored: ScoredTrajectory) -> dict[tuple[int, int], float]:
        """`(turn, step) -> share`, of sum 1: attention where it is trusted, else by what leaving the step out does."""
        if self._arrays is None:
            raise CreditError(f"{self.name}: nothing was fitted yet")
        found = step_places(scored)
        if not found:
            return {}
        table = self._rows(found)
        if self.trusts_attention:
            shares = attention_reader.attention(self._arrays, table)
        else:
            sizes = np.abs(attention_reader.leave_one_out(self._arrays, table))
            total = float(sizes.sum())
            shares = sizes / total if total > 0.0 else np.full(len(sizes), 1.0 / len(sizes))
        return dict(zip(found, (float(share) for share in shares), strict=True))

    @property
    def trusts_attention(self) -> bool:
        """Whether attention itself is used, by the settings or by its agreement with counterfactuals."""
        if self.config.read != "auto":
            return self.config.read == "attention"
        return self.agreement is not None and self.agreement >= self.config.min_rank

    def _rows(self, found: Mapping[tuple[int, int], Place]) -> NDArray[np.float32]:
        return rows(list(found.values()), self.encoder)

    def _learn(
        self, data: Sequence[ScoredTrajectory], *, present: Arrays | None, fresh: Sequence[ScoredTrajectory], seed: int
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        from slea_llm.augmenters.reader_learning import learn

        probes = self._probes(fresh)
        data = [one for one in data if not one.trajectory.truncated]
        if not data:
            raise ConfigError(f"{self.name}: every dialogue was cut; none has a return to learn from")
        wanted = np.array([_return(one) for one in data])
        if present is None:
            start = attention_reader.initial(row_size(self.encoder), self.config.width, seed=seed)
            scale = np.array([wanted.mean(), wanted.std() or 1.0])
        else:
            start = {name: np.array(present[name]) for name in attention_reader.initial(1, 1, seed=0)}
            scale = present["scale"]
        tables = [self._rows(step_places(one)) for one in data]
        learnt = learn(start, tables, (wanted - scale[0]) / scale[1], seed=seed)
        agreement = _agreement(probes)
        card = {
            "settings": {name: getattr(self.config, name) for name in self.bound},
            "probes": len(probes["probe.effect"]),
            "agreement": None if agreement is None else round(agreement, 6),
        }
        return {**learnt, **probes, "scale": scale}, card

    def _probes(self, fresh: Sequence[ScoredTrajectory]) -> dict[str, Floats]:
        """What the present copy said of steps that it had not learnt from and that a counterfactual scored, the newest
        `window` dialogues' worth at most."""
        known = {name: np.zeros(0) for name in ("probe.attention", "probe.effect")}
        if self._arrays is None:
            return known
        looked: list[float] = list(self._arrays["probe.attention"])
        effects: list[float] = list(self._arrays["probe.effect"])
        for scored in fresh:
            found = step_places(scored)
            scores = {key: one.score for key, one in scored.scores_of(self.config.probe).items()}
            if not any(scores.get(key) is not None for key in found):
                continue
            alpha = attention_reader.attention(self._arrays, self._rows(found)) * len(found)
            for key, weight in zip(found, alpha, strict=True):
                if (score := scores.get(key)) is not None:
                    looked.append(float(weight))
                    effects.append(score)
        most = 8 * self.window
        return {"probe.attention": np.array(looked[-most:]), "probe.effect": np.array(effects[-most:])}

    def _predict(self, data: Sequence[ScoredTrajectory]) -> Held:
        """The return of whole dialogues that ended; the place of one is its number of steps."""
        if self._arrays is None:
            raise CreditError(f"{self.name}: nothing was fitted yet")
        centre, scale = (float(one) for one in self._arrays["scale"])
        ended = [one for one in data if not one.trajectory.truncated]
        tables = [self._rows(step_places(one)) for one in ended]
        said = [centre + scale * attention_reader.predict(self._arrays, table) for table in tables]
        return Held(
            predicted=np.array(said),
            wanted=np.array([_return(one) for one in ended]),
            success=np.array([float(one.trajectory.success) for one in ended]),
            place=np.array([float(len(table)) for table in tables]),
            dialogue=np.arange(len(ended), dtype=np.float64),
        )

    def _open(self, arrays: Arrays) -> None:
        size = row_size(self.encoder)
        expected = {name: one.shape for name, one in attention_reader.initial(size, self.config.width, seed=0).items()}
        for name, shape in expected.items():
            if name not in arrays or arrays[name].shape != shape:
                raise StorageError(f"weight {name!r} of {self.name} is not of shape {shape}; let the run fit it again")
        self.agreement = _agreement(arrays)


def _agreement(arrays: Arrays) -> float | None:
    if len(arrays["probe.attention"]) < MIN_PROBES:
        return None
    return rank_correlation(arrays["probe.attention"], np.abs(arrays["probe.effect"]))


def moved(shares: Mapping[tuple[int, int], float], *, outcome: float, share: float) -> dict[tuple[int, int], float]:
    """share alpha_k R for every step, less share R on the last one: with R at the end the steps earn what ABC gives.

    >>> {key: round(pay, 2) for key, pay in moved({(0, 0): .25, (1, 0): .75}, outcome=2., share=.5).items()}
    {(0, 0): 0.25, (1, 0): -0.25}
    """
    total = math.fsum(shares.values())
    if not shares or not total > 0.0:
        return {}
    paid = {key: share * outcome * one / total for key, one in shares.items()}
    last = next(reversed(paid))
    paid[last] -= share * outcome
    return paid


def _return(scored: ScoredTrajectory) -> float:
    return math.fsum(turn.reward for turn in scored.trajectory.turns)
