"""The card of a fitted reward model: what it was fitted on, how reliable it proved, and whether its gate opens."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from slea_llm.errors import EvaluatorError, nearest
from slea_llm.evaluators.gate import MAX_ECE, MIN_AUC, too_few
from slea_llm.types import Verdict

FORMAT = 2
CARD = "card.json"
WEIGHTS = "reward_model.safetensors"

Head = Literal["success", "label"]
HEADS: tuple[str, ...] = get_args(Head)


CAUSAL = "causal"
"""`encoding` of a card whose model reads tokens; `encoder` then names the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """One head on groups that it was not fitted on. `baselines`: AUC of rules that know nothing of the content.

    `pair_accuracy`: mean over contexts of the share of (good, bad) alternatives ordered rightly, None without any.
    """

    steps: int
    dialogues: int
    positive_dialogues: int
    """Those most of whose labelled steps are positive; under an outcome, the successes."""
    positive_share: float
    auc: float | None
    ece: float
    brier: float
    baselines: Mapping[str, float | None]
    pair_accuracy: float | None = None
    pair_contexts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """`calibration[head]` = (a, b): the probability is sigmoid(a logit + b) (Platt 1999), fitted on held-out logits."""

    encoder: str
    encoding: str
    network: Mapping[str, Any]
    seed: int
    data: Mapping[str, Any]
    labels: Mapping[str, int]
    settings: Mapping[str, Any]
    calibration: Mapping[str, tuple[float, float]]
    reliability: Mapping[str, Reliability]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2, sort_keys=True, allow_nan=False)

    @classmethod
    def read(cls, path: Path) -> Card:
        """Raises EvaluatorError when the file is missing, is no card, or has another format."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise EvaluatorError(
                f"no card of a fitted reward model at {path}: {error}; `slea fit-evaluator` makes one"
            ) from error
        except ValueError as error:
            raise EvaluatorError(f"{path} is not JSON: {error}") from error
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format") if isinstance(document, dict) else type(document).__name__
            raise EvaluatorError(f"{path} has format {found!r}, this version reads {FORMAT}; fit the evaluator again")
        known = {one.name for one in dataclasses.fields(cls)}
        values = {key: value for key, value in document.items() if key != "format"}
        if odd := sorted(values.keys() ^ known):
            raise EvaluatorError(f"{path}: key {odd[0]!r} is unknown or missing{nearest(odd[0], known)}")
        try:
            values["reliability"] = {head: Reliability(**one) for head, one in values["reliability"].items()}
            values["calibration"] = {head: (float(a), float(b)) for head, (a, b) in values["calibration"].items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise EvaluatorError(f"{path} is not a card of a reward model: {error}") from error
        return cls(**values)

    def head(self) -> Head:
        """The head that is read when nothing says otherwise: success where it was fitted, else the step label."""
        return "success" if "success" in self.reliability else "label"

    def cut_by(self, parser: Mapping[str, Any]) -> Card:
        """With the parser, as a recipe names it: what reads the card can then tell when steps are cut otherwise."""
        return dataclasses.replace(self, data={**self.data, "parser": dict(parser)})


def preflight_folder(folder: Path, name: str) -> Card:
    """The card of a folder, whose model the evaluator `name` can read; the weights are only looked for.

    Raises EvaluatorError when there is no card, it belongs to the other form, or the weights are not beside it.
    """
    card = Card.read(folder / CARD)
    owner = "causal_reward_model" if card.encoding == CAUSAL else "reward_model"
    if owner != name:
        raise EvaluatorError(f"{folder} holds a {owner}, not a {name}; name that evaluator in the recipe")
    if not (folder / WEIGHTS).is_file():
        raise EvaluatorError(
            f"{folder} holds a card and no {WEIGHTS}; fit the evaluator again, or copy the whole folder"
        )
    return card


def judge(name: str, head: str, reliability: Reliability | None) -> Verdict:
    """The gate: AUC and calibration on held-out groups, better than every rule that ignores the content, and not on a
    handful of dialogues."""
    if reliability is None:
        return Verdict(open=False, line=f"{name}: gate shut, weight 0: nothing was fitted yet")
    successes = reliability.positive_dialogues
    facts = (
        f"held-out AUC {_number(reliability.auc)} (needs {MIN_AUC:.2f}), "
        f"ECE {reliability.ece:.3f} (at most {MAX_ECE:.2f})"
    )
    reasons = []
    if head == "success" and (few := too_few(successes, reliability.dialogues - successes)):
        reasons.append(few)
    if reliability.auc is None:
        reasons.append("only one kind of label was held out")
    elif reliability.auc < MIN_AUC:
        reasons.append("AUC too low")
    if reliability.ece > MAX_ECE:
        reasons.append("badly calibrated")
    known = {rule: value for rule, value in reliability.baselines.items() if value is not None}
    if known:
        best = max(known, key=lambda rule: known[rule])
        facts += f", best rule without content {best} {known[best]:.3f}"
        if reliability.auc is not None and reliability.auc <= known[best]:
            reasons.append(f"no better than {best}")
    if head != "success":
        reasons.append("step labels are no differences of success: they would pay a text for being cut into more steps")
    if reasons:
        return Verdict(open=False, line=f"{name}: gate shut, weight 0: {'; '.join(reasons)}; {facts}")
    return Verdict(open=True, line=f"{name}: gate open: {facts}")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
