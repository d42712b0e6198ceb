"""What learnt augmenters do alike: held-out judgement and gate, weights in a folder, a frozen copy in between."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from slea_llm import folders
from slea_llm.encoders import CachingEncoder, SentenceEncoder, load_encoder
from slea_llm.errors import ConfigError, StorageError
from slea_llm.measures import area_under_curve
from slea_llm.types import ScoredTrajectory, Verdict

Floats = NDArray[np.float64]
Arrays = Mapping[str, NDArray[Any]]

WEIGHTS, CARD = "weights.safetensors", "card.json"
FORMAT = 1
MIN_DIALOGUES = 32
"""Dialogues that a copy must have judged unseen before its gate can open."""
MOST_DIALOGUES = 128
"""The newest of them that the gate goes by: the first copies know little, and the policy moves on."""
MIN_AUC = 0.70
CACHE = 20_000
"""Texts whose vectors are kept (2 kB each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What frozen copies predicted of dialogues that they had not learnt from, one row a prediction.

    `predicted` and `wanted` (n,) in units of reward, `success` (n,) 0 or 1, `place` (n,) what a rule without content
    would go by (the turn, the number of steps), `dialogue` (n,) numbers the dialogues in the order of arrival.
    """

    predicted: Floats
    wanted: Floats
    success: Floats
    place: Floats
    dialogue: Floats

    @classmethod
    def empty(cls) -> Held:
        return cls(**{name: np.zeros(0) for name in cls.__slots__})

    @classmethod
    def of_arrays(cls, arrays: Arrays) -> Held:
        return cls(**{name: np.asarray(arrays[f"held.{name}"], np.float64) for name in cls.__slots__})

    def arrays(self) -> dict[str, Floats]:
        return {f"held.{name}": getattr(self, name) for name in self.__slots__}

    @property
    def dialogues(self) -> int:
        return len(np.unique(self.dialogue))

    def extended(self, other: Held, *, most: int) -> Held:
        """These and the other's, whose dialogues come after them; the newest `most` dialogues."""
        shift = self.dialogue.max(initial=-1.0) + 1.0
        numbers = np.concatenate([self.dialogue, other.dialogue + shift])
        kept = numbers > numbers.max(initial=-1.0) - most
        joined = {
            name: np.concatenate([getattr(self, name), getattr(other, name)])[kept]
            for name in self.__slots__
            if name != "dialogue"
        }
        return Held(**joined, dialogue=numbers[kept] - numbers[kept].min(initial=0.0))

    def facts(self) -> dict[str, float | None]:
        """AUC against success; explained variance of the return, and that of the mean return at the same place in the
        other dialogues, which knows no content. None where it cannot be told."""
        return {
            "auc": area_under_curve(self.predicted, self.success > 0.5),
            "explained": explained(self.wanted, self.predicted),
            "explained_by_place": explained(self.wanted, self._by_place()),
        }

    def _by_place(self) -> Floats:
        total, count = float(self.wanted.sum()), len(self.wanted)
        found = np.zeros(count)
        for place in np.unique(self.place):
            here = self.place == place
            same, number = float(self.wanted[here].sum()), int(here.sum())
            others = (same - self.wanted[here]) / (number - 1) if number > 1 else total / count
            found[here] = others
        return found


def explained(wanted: Floats, predicted: Floats) -> float | None:
    """1 - Var(wanted - predicted) / Var(wanted); None when nothing varies.

    >>> round(explained(np.array([1., 0, 1, 1]), np.array([.8, .3, .6, .9])), 8)
    0.65333333
    """
    spread = float(np.var(wanted)) if len(wanted) else 0.0
    return 1.0 - float(np.var(wanted - predicted)) / spread if spread > 0.0 else None


def judge(name: str, held: Held | None) -> Verdict:
    """The gate: on unseen dialogues the predictions tell success from failure, and the return better than the place."""
    if held is None:
        return Verdict(open=False, line=f"{name}: gate shut, weight 0: nothing was fitted yet")
    return _verdict(name, held.dialogues, held.facts())


def _verdict(name: str, dialogues: int, facts: Mapping[str, float | None]) -> Verdict:
    if dialogues < MIN_DIALOGUES:
        line = f"{dialogues} unseen dialogues were judged, {MIN_DIALOGUES} are needed"
        return Verdict(open=False, line=f"{name}: gate shut, weight 0: {line}")
    auc, known, rule = facts["auc"], facts["explained"], facts["explained_by_place"]
    said = (
        f"on {dialogues} unseen dialogues AUC {_number(auc)} (needs {MIN_AUC:.2f}), explained variance "
        f"{_number(known)}, by the place alone {_number(rule)}"
    )
    reasons = []
    if auc is None:
        reasons.append("all of them ended alike")
    elif auc < MIN_AUC:
        reasons.append("AUC too low")
    if known is None or known <= max(0.0, rule or 0.0):
        reasons.append("returns are told no better than by the place")
    if reasons:
        return Verdict(open=False, line=f"{name}: gate shut, weight 0: {'; '.join(reasons)}; {said}")
    return Verdict(open=True, line=f"{name}: gate open: {said}")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def returns(scored: ScoredTrajectory, *, gamma: float) -> list[float]:
    """Discounted reward from each turn on, to the end of what was played.

    >>> from types import SimpleNamespace as N
    >>> returns(N(trajectory=N(turns=[N(reward=r) for r in (0., 0., 10.)])), gamma=.99)
    [9.801, 9.9, 10.0]
    """
    found: list[float] = []
    following = 0.0
    for turn in reversed(scored.trajectory.turns):
        following = turn.reward + gamma * following
        found.append(following)
    return found[::-1]


def finished(data: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """The dialogues that can be learnt from: not broken, with at least one turn."""
    return [one for one in data if not one.trajectory.failed and one.trajectory.turns]


class LearntAugmenter(ABC):
    """Weights of a folder behind a gate: `_learn` makes them, `_predict` is what is judged."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    reads: frozenset[str] = frozenset()
    """Evaluators whose scores a fit reads."""
    config: Any
    """With `encoder`, with `model`, the folder of a copy to start from, and with what `bound` names."""
    bound: ClassVar[tuple[str, ...]] = ()
    """Settings under which weights were learnt, and without which they say something else."""

    def __init__(self, *, encoder: str, refresh_every: int, window: int) -> None:
        self._encoder_name, self.refresh_every, self.window = encoder, refresh_every, window
        self._encoder: CachingEncoder | None = None
        self._arrays: Arrays | None = None
        self._held: Held | None = None
        self._version = "unfitted"
        self._gate = judge(self.name, None)

    @classmethod
    def preflight(cls, config: Any) -> Verdict | None:
        """The gate of the copy that a run is to start from, by its card; None when it starts from nothing.

        Reads no weights. Raises StorageError when the folder holds no copy that these settings can go on from.
        """
        if not config.model:
            return None
        folder = Path(config.model)
        card = cls._card(folder, config)
        if not (folder / WEIGHTS).is_file():
            raise StorageError(f"{folder} holds a card and no {WEIGHTS}; copy the whole folder")
        unseen = card.get("unseen")
        told = unseen if isinstance(unseen, dict) else {}
        facts = [told.get(key, "") for key in ("auc", "explained", "explained_by_place")]
        if not isinstance(told.get("dialogues"), int) or any(isinstance(fact, str) for fact in facts):
            raise StorageError(f"the card in {folder} does not say how its copy was judged; take another copy")
        return _verdict(cls.name, told["dialogues"], told)

    @classmethod
    def _card(cls, folder: Path, config: Any) -> dict[str, Any]:
        """The card of a copy of this kind and these settings. Raises StorageError."""
        try:
            card = json.loads((folder / CARD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(f"{folder} holds no fitted {cls.name}: {error}") from error
        found = card if isinstance(card, dict) else {}
        settings = found.get("settings")
        learnt = settings if isinstance(settings, dict) else {}
        wanted = {"kind": cls.name, "format": FORMAT, "encoder": config.encoder}
        pairs = [(key, found.get(key), value) for key, value in wanted.items()]
        pairs += [(key, learnt.get(key), getattr(config, key)) for key in cls.bound]
        for key, there, value in pairs:
            if there != value:
                raise StorageError(
                    f"{folder}: {key} is {there!r}, should be {value!r}; give the copy of a run with these settings, "
                    "or let the run fit one of its own"
                )
        return found

    @property
    def version(self) -> str:
        """Hash of the weights in use; it changes with every fit."""
        return self._version

    @property
    def gate(self) -> Verdict:
        """Whether it may move training, by what it said of dialogues before it learnt from them."""
        return self._gate

    @property
    def encoder(self) -> SentenceEncoder:
        """Loaded when it is first needed."""
        if self._encoder is None:
            self._encoder = CachingEncoder(load_encoder(self._encoder_name), size=CACHE)
        return self._encoder

    def fit(
        self, known: Sequence[ScoredTrajectory], fresh: Sequence[ScoredTrajectory], *, seed: int, folder: Path
    ) -> None:
        """Judge the present copy on `fresh`, learn from both, write the next copy; see `Fittable`."""
        known, fresh = finished(known), finished(fresh)
        if not known and not fresh:
            raise ConfigError(f"{self.name}: there is no finished dialogue to learn from")
        held = self._held or Held.empty()
        if self._arrays is not None and fresh:
            held = held.extended(self._predict(fresh), most=MOST_DIALOGUES)
        data = [*known, *fresh][-self.window :]
        arrays, card = self._learn(data, present=self._arrays, fresh=fresh, seed=seed)
        held_arrays = held.arrays() if self._arrays is not None else Held.empty().arrays()
        facts = {key: None if value is None else round(value, 6) for key, value in held.facts().items()}
        document = {
            "format": FORMAT,
            "kind": self.name,
            "encoder": self._encoder_name,
            "dialogues": len(data),
            "unseen": {"dialogues": held.dialogues, **facts},
            **card,
        }
        with folders.whole_folder(folder, overwrite=True) as partial:
            # Through bytes: what safetensors writes itself cannot be read by other users of the machine.
            merged = {key: np.ascontiguousarray(one) for key, one in {**arrays, **held_arrays}.items()}
            (partial / WEIGHTS).write_bytes(save(merged))
            document["weights"] = folders.sha256_of(partial / WEIGHTS)
            text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
            (partial / CARD).write_text(text + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on with the copy in this folder. Raises StorageError when it holds none of this kind or was changed."""
        card = self._card(folder, self.config)
        try:
            version, arrays = folders.sha256_of(folder / WEIGHTS), load_file(folder / WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise StorageError(f"{folder} holds no fitted {self.name}: {error}") from error
        if card.get("weights") != version:
            raise StorageError(
                f"{folder}: weights is {version!r}, should be {card.get('weights')!r}; let the run fit it again"
            )
        if odd := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
            raise StorageError(f"{folder / WEIGHTS}: {odd[0]!r} is not finite; let the run fit it again")
        held = Held.of_arrays(arrays)
        self._open(arrays)
        self._arrays, self._held, self._version = arrays, held, version[:16]
        self._gate = judge(self.name, held)

    @abstractmethod
    def _learn(
        self, data: Sequence[ScoredTrajectory], *, present: Arrays | None, fresh: Sequence[ScoredTrajectory], seed: int
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Arrays and facts for the card, learnt from these finished dialogues, going on from the present arrays.

        `fresh` are those among them that the present copy has not learnt from.
        """

    @abstractmethod
    def _predict(self, data: Sequence[ScoredTrajectory]) -> Held:
        """What the present copy says of finished dialogues."""

    @abstractmethod
    def _open(self, arrays: Arrays) -> None:
        """Take over what these arrays say. Raises StorageError when they do not fit the settings."""
