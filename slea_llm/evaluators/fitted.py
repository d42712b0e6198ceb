"""What is learnt from logged dialogues: data, held-out quality beside plain baselines, gate, folder, evaluator."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from slea_llm.errors import ConfigError, EvaluatorError, StorageError, nearest
from slea_llm.evaluators.gate import MAX_ECE, MIN_AUC, too_few
from slea_llm.evaluators.ridge import Floats, Ridge, fit_ridge, fold_of
from slea_llm.evaluators.step_features import Moment, moments, words
from slea_llm.evaluators.words import word_on
from slea_llm.folders import sha256_of, whole_folder
from slea_llm.measures import area_under_curve, brier, calibration_error
from slea_llm.types import STEP_KINDS, ScoredStep, ScoredTrajectory, Step, Trajectory, Verdict, leaf_steps

WEIGHTS, CARD = "weights.safetensors", "card.json"
FORMAT = 1
FOLDS = 5
"""Parts of the groups; each is predicted by a fit that has not seen it."""
INNER_FOLDS = 4
"""Parts of the training side by which a penalty is chosen."""
AUXILIARY = 0.5
"""Weight of the mean error over all prefixes beside the error of the last one, in RUDDER's loss."""
PRIOR = 2.0
"""Dialogues at the rate of its kind that every text starts with, in the baseline of popularity."""

Predict = Callable[[int], Floats]
"""Number of an example -> its predicted success at every step, shape (steps,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One finished dialogue to learn from; those of one task share a group."""

    group: str
    moments: tuple[Moment, ...]
    success: bool


def examples(data: Sequence[ScoredTrajectory]) -> list[Example]:
    """The dialogues that ended and have steps. Raises EvaluatorError when they did not end in both ways."""
    found = []
    for scored in finished(data):
        trajectory = scored.trajectory
        group = str(trajectory.task.get("id", trajectory.id))
        made = tuple(moments(trajectory, scored.steps))
        found.append(Example(group=group, moments=made, success=trajectory.success))
    successes = sum(example.success for example in found)
    if not 0 < successes < len(found):
        raise EvaluatorError(
            f"{len(found)} finished dialogues with {successes} successes; a fit needs both successes and failures"
        )
    return found


def finished(data: Sequence[ScoredTrajectory]) -> list[ScoredTrajectory]:
    """The dialogues of which `examples` are made, in the same order."""
    return [one for one in data if one.trajectory.termination not in ("error", "unknown") and one.steps]


def outcomes(data: Sequence[Example]) -> Floats:
    """The outcome (1 or 0) of its dialogue for every step, in order."""
    return np.array([float(example.success) for example in data for _ in example.moments])


def cross_predict(data: Sequence[Example], fit: Callable[[Sequence[int]], Predict], *, seed: int) -> list[Floats]:
    """For every example what a fit on the other groups predicts at each of its steps.

    `fit(numbers)` learns from the examples of these numbers. Raises EvaluatorError when a side lacks an outcome.
    """
    folds = np.array([fold_of(example.group, folds=FOLDS, seed=seed) for example in data])
    found: dict[int, Floats] = {}
    for fold in np.unique(folds):
        kept = [int(number) for number in np.flatnonzero(folds != fold)]
        if len({data[number].success for number in kept}) < 2:
            raise EvaluatorError(
                f"{len({example.group for example in data})} tasks in {len(np.unique(folds))} parts: without one of "
                "them the rest does not end in both ways; give more dialogues"
            )
        predict = fit(kept)
        found.update({int(number): predict(int(number)) for number in np.flatnonzero(folds == fold)})
    return [found[number] for number in range(len(data))]


def ridge_of(data: Sequence[Example], rows: Sequence[Floats], numbers: Sequence[int], *, seed: int) -> Ridge:
    """A ridge of the outcome on one row a step (each example: (steps, features)), fitted on the numbered examples."""
    folds = [inner_fold(data[number], seed=seed) for number in numbers for _ in data[number].moments]
    targets = outcomes([data[number] for number in numbers])
    return fit_ridge(
        np.concatenate([rows[number] for number in numbers]), targets, np.ones(len(targets)), np.array(folds)
    )


def fit_prefixes(data: Sequence[Example], rows: Sequence[Floats], numbers: Sequence[int], *, seed: int) -> Ridge:
    """Regress success on the rows of every prefix of `numbers`, by RUDDER's loss (Arjona-Medina et al. 2019).

    The loss of a dialogue is (g_(T-1) - R)^2 + AUXILIARY mean_t (g_t - R)^2. The opening is a prefix too, so that the
    first step is compared with something that was learnt.
    """
    targets, weights, folds = [], [], []
    for number in numbers:
        count = len(rows[number])
        weights += [AUXILIARY / count] * (count - 1) + [AUXILIARY / count + 1.0]
        targets += [float(data[number].success)] * count
        folds += [inner_fold(data[number], seed=seed)] * count
    table = np.concatenate([rows[number] for number in numbers])
    return fit_ridge(table, np.array(targets), np.array(weights), np.array(folds))


def inner_fold(example: Example, *, seed: int) -> int:
    """The part, inside a training side, by which a penalty is chosen."""
    return fold_of(example.group, folds=INNER_FOLDS, seed=seed + 1)


def _position(moment: Moment) -> list[float]:
    return [moment.position, math.sqrt(moment.position), moment.turn]


def _length(moment: Moment) -> list[float]:
    count = len(words(moment.text))
    return [count, math.log1p(count)]


def _kind(moment: Moment) -> list[float]:
    return [float(moment.kind == kind) for kind in STEP_KINDS]


def baselines(data: Sequence[Example], *, seed: int) -> dict[str, float | None]:
    """Held-out AUC, on the same parts, of rules that know nothing of the state: position, length, kind, popularity."""
    truth = outcomes(data)
    found: dict[str, float | None] = {}
    forms: Mapping[str, Callable[[Moment], list[float]]] = {"position": _position, "length": _length, "kind": _kind}
    for name, form in forms.items():
        rows = [np.array([form(moment) for moment in example.moments], dtype=float) for example in data]

        def fit(numbers: Sequence[int], rows: Sequence[Floats] = rows) -> Predict:
            model = ridge_of(data, rows, numbers, seed=seed)
            return lambda number: model.predict(rows[number])

        found[name] = _rounded(area_under_curve(np.concatenate(cross_predict(data, fit, seed=seed)), truth > 0.5))
    rates = cross_predict(data, lambda numbers: _popularity(data, numbers), seed=seed)
    found["popularity"] = _rounded(area_under_curve(np.concatenate(rates), truth > 0.5))
    return found


def _popularity(data: Sequence[Example], numbers: Sequence[int]) -> Predict:
    """How often dialogues with just this text succeeded, drawn towards the rate of its kind."""
    seen: dict[str, list[float]] = defaultdict(list)
    for number in numbers:
        for moment in data[number].moments:
            seen[moment.kind].append(float(data[number].success))
            seen[" ".join((moment.kind, *words(moment.text)))].append(float(data[number].success))

    def rate(moment: Moment) -> float:
        kind, text = seen[moment.kind], seen[" ".join((moment.kind, *words(moment.text)))]
        prior = sum(kind) / len(kind) if kind else 0.5
        return (sum(text) + PRIOR * prior) / (len(text) + PRIOR)

    return lambda number: np.array([rate(moment) for moment in data[number].moments])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def card_of(data: Sequence[Example], predicted: Sequence[Floats], *, seed: int) -> dict[str, Any]:
    """What a card says of data, held-out quality and baselines."""
    stated, truth = np.concatenate(predicted), outcomes(data)
    return {
        "data": {
            "dialogues": len(data),
            "successes": sum(example.success for example in data),
            "steps": len(truth),
            "groups": len({example.group for example in data}),
        },
        "seed": seed,
        "labels": "outcome of the dialogue, for every step",
        "held_out": {
            "auc": _rounded(area_under_curve(stated, truth > 0.5)),
            "ece": _rounded(calibration_error(stated, truth)),
            "brier": _rounded(brier(stated, truth)),
        },
        "baselines": baselines(data, seed=seed),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Arrays and card of one learnt part. `card["held_out"]` holds auc, ece and brier, `card["baselines"]` AUCs."""

    kind: str
    arrays: Mapping[str, NDArray[Any]]
    card: Mapping[str, Any]
    version: str = field(default="")

    def save(self, folder: Path, *, overwrite: bool = False) -> None:
        """Write weights and card, whole or not at all. Raises StorageError."""
        with whole_folder(folder, overwrite=overwrite) as partial:
            save_file({name: np.ascontiguousarray(array) for name, array in self.arrays.items()}, partial / WEIGHTS)
            document = {**self.card, "format": FORMAT, "kind": self.kind, "weights": sha256_of(partial / WEIGHTS)}
            text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
            (partial / CARD).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path, kind: str) -> Fitted:
        """Read what `save` wrote. Raises StorageError when a file is missing, changed, or of another kind."""
        card = read_card(folder, kind)
        try:
            version, arrays = sha256_of(folder / WEIGHTS), load_file(folder / WEIGHTS)
        except (OSError, ValueError, SafetensorError) as error:
            raise StorageError(f"{folder} holds no fitted {kind}: {error}") from error
        if card.get("weights") != version:
            raise StorageError(f"{folder / WEIGHTS} is not the file that {CARD} was written for; fit again")
        return cls(kind=kind, arrays=arrays, card=card, version=version[:16])


def read_card(folder: Path, kind: str) -> dict[str, Any]:
    """The card of a folder. Raises StorageError when there is none of that kind."""
    try:
        card = json.loads((folder / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder} holds no fitted {kind}: {error}") from error
    if not isinstance(card, dict) or card.get("kind") != kind or card.get("format") != FORMAT:
        found = str(card.get("kind")) if isinstance(card, dict) else "nothing known"
        raise StorageError(f"{folder} holds {found}, not {kind} of format {FORMAT}{nearest(found, [kind])}")
    for part, names in (("held_out", ("auc", "ece")), ("baselines", ())):
        if not isinstance(card.get(part), dict) or any(name not in card[part] for name in names):
            raise StorageError(f"the card in {folder} says nothing of {part}; fit again")
    return card


def lines(card: Mapping[str, Any]) -> list[str]:
    """Data, held-out quality and baselines of a card, to be printed."""
    data, held_out = card["data"], card["held_out"]
    return [
        f"{data['dialogues']} dialogues, {data['successes']} of them successes, of {data['groups']} tasks",
        f"success: {data['steps']} held-out steps: AUC {_shown(held_out['auc'])}, ECE {_shown(held_out['ece'])}, "
        f"Brier {_shown(held_out['brier'])}",
        *(f"  rule {name:<24} AUC {_shown(value)}" for name, value in card["baselines"].items()),
    ]


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def judge(kind: str, card: Mapping[str, Any]) -> Verdict:
    """The gate: AUC and calibration on held-out groups, better than every rule that ignores the state, and not on a
    handful of dialogues."""
    if not card:
        return Verdict(open=False, line=f"{kind}: gate shut, weight 0: nothing was fitted yet")
    auc, ece = card["held_out"]["auc"], card["held_out"]["ece"]
    rules = {name: value for name, value in card["baselines"].items() if value is not None}
    best = max(rules, key=lambda name: rules[name])
    data = card["data"]
    few = too_few(data["successes"], data["dialogues"] - data["successes"])
    facts = (
        f"held-out AUC {auc:.3f} (needs {MIN_AUC:.2f}), ECE {ece:.3f} (at most {MAX_ECE:.2f}), "
        f"best rule without state {best} {rules[best]:.3f}"
    )
    reasons = [
        reason
        for holds, reason in (
            (bool(few), few),
            (auc < MIN_AUC, "AUC too low"),
            (ece > MAX_ECE, "badly calibrated"),
            (auc <= rules[best], f"no better than {best}"),
        )
        if holds
    ]
    if reasons:
        return Verdict(open=False, line=f"{kind}: gate shut, weight 0: {'; '.join(reasons)}; {facts}")
    return Verdict(open=True, line=f"{kind}: gate open: {facts}")


class FittedEvaluator(ABC):
    """What evaluators do alike that score by weights of a folder: `_open` reads the weights, `_say` uses them.

    Without a fitted model every step is unscored, with that reason; so is every step of a dialogue that broke.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, model: str) -> None:
        """Raises StorageError when the folder holds none of this kind."""
        self.card: Mapping[str, Any] = {}
        self._weights = "unfitted"
        if model:
            self.load(Path(model))

    def load(self, folder: Path) -> None:
        """Score with the weights of this folder from now on; those before stay when this raises StorageError."""
        fitted = Fitted.load(folder, self.name)
        self._open(fitted)
        self.card, self._weights = fitted.card, fitted.version

    @classmethod
    def preflight(cls, config: Any) -> Verdict:
        """The gate by the card; no weights are read. Raises ConfigError or StorageError when there is nothing to score
        by."""
        if not config.model:
            raise ConfigError(f"evaluator {cls.name!r} has no model; give the folder of a fitted one")
        folder = Path(config.model)
        card = read_card(folder, cls.name)
        if not (folder / WEIGHTS).is_file():
            raise StorageError(f"{folder} holds a card and no {WEIGHTS}; fit again, or copy the whole folder")
        return judge(cls.name, card)

    @property
    def version(self) -> str:
        """Changes with weights and settings."""
        return f"{self._weights}{self._settings()}"

    @property
    def gate(self) -> Verdict:
        """Whether these scores may move training, by the card."""
        return judge(self.name, self.card)

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        """A word on every leaf step, each score a difference of success probability."""
        leaves = leaf_steps(steps)
        reason = None
        if not self.card:
            reason = "no fitted model: `model` names its folder"
        elif trajectory.failed:
            reason = f"the dialogue broke: {trajectory.error}"
        if reason is not None:
            return tuple(word_on(step, self.name, self.version, reason=reason) for step in leaves)
        return self._say(trajectory, leaves, moments(trajectory, steps)) if leaves else ()

    @abstractmethod
    def _open(self, fitted: Fitted) -> None:
        """Take over weights that belong to `fitted.card`."""

    @abstractmethod
    def _say(self, trajectory: Trajectory, leaves: Sequence[Step], made: Sequence[Moment]) -> tuple[ScoredStep, ...]:
        """A word on every leaf step of a dialogue that did not break."""

    def _settings(self) -> str:
        """What of the settings changes a score, as part of the version."""
        return ""
