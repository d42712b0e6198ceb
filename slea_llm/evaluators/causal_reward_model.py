"""Score steps by a fitted language model: LoRA on a causal base, two numbers read at every step's end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slea_llm.checks import check_choices, check_least
from slea_llm.errors import CheckpointError, ConfigError, EvaluatorError, SleaError
from slea_llm.evaluators.reward_model_card import CARD, WEIGHTS, Card, Head, judge, preflight_folder
from slea_llm.evaluators.reward_model_words import NOT_FITTED, READS, UNFITTED, Read, head_of, unscored, words_of
from slea_llm.settings import ModelSettings
from slea_llm.types import ScoredStep, Step, Trajectory, Verdict, leaf_steps

if TYPE_CHECKING:
    from slea_llm.models.step_reader import Opened, Row

PROBE_TOLERANCE = 0.05
"""Most that a number of the probe (of size 1) may differ from the card's: types and machines round otherwise."""


class CausalRewardModel:
    """The second form of `reward_model`: it reads the dialogue itself, through the chat template of its base.

    A prefix ends with the last token of a step; there two heads say whether it was a good step and how likely the
    dialogue succeeds from here. Scores, gate and card are as for `reward_model`. A step that lies beyond the tokens the
    model was fitted for is unscored, and so is a dialogue that the template refuses; nothing is cut out in silence.
    """

    name: ClassVar[str] = "causal_reward_model"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        model: str = ""
        """Folder that `slea fit-evaluator --evaluator causal_reward_model` wrote. Empty: every step is unscored."""
        base: str = ""
        """Folder or name of the base model, where it is not what the card says. Empty: as on the card."""
        read: Read = "auto"
        """`progress`, `label`, or `auto`: progress where the model was fitted on outcomes, else label."""
        batch_tokens: int = 16_384
        """Padded tokens of one forward pass, 1 or more; a longer dialogue makes a pass of its own."""
        device: str = "auto"
        """Where it runs: `auto` takes a GPU when there is one."""

        def __post_init__(self) -> None:
            check_choices(self, read=READS)
            check_least(self, batch_tokens=1)

    def __init__(self, config: Config) -> None:
        """Load folder and base. Raises EvaluatorError when the folder holds no whole model or the base is another one,
        ConfigError or TemplateError when the base cannot be loaded or read by."""
        self.config = config
        self._model: _Fitted | None = _load(Path(config.model), config) if config.model else None

    @classmethod
    def preflight(cls, config: Config) -> Verdict:
        """What `slea plan` asks: the gate by the card alone; no weights are read.

        Raises ConfigError without a folder, EvaluatorError when the folder holds no such model.
        """
        if not config.model:
            raise ConfigError(f"evaluator {cls.name!r} has no model; give the folder of a fitted one")
        folder = Path(config.model)
        card = preflight_folder(folder, cls.name)
        head = head_of(card, config.read, source=folder)
        return judge(cls.name, head, card.reliability[head])

    @property
    def version(self) -> str:
        """Hash of weights, card and the head that is read: it changes with every fit."""
        return UNFITTED if self._model is None else self._model.version

    @property
    def gate(self) -> Verdict:
        """Whether these scores may move training, by the card."""
        if self._model is None:
            return judge(self.name, "success", None)
        return judge(self.name, self._model.head, self._model.card.reliability[self._model.head])

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        return self.score_many([(trajectory, steps)])[0]

    def score_many(self, trajectories: Sequence[tuple[Trajectory, Sequence[Step]]]) -> list[tuple[ScoredStep, ...]]:
        """The scores of several trajectories, in order; faster than one by one, and equal to it within rounding."""
        leaves = [leaf_steps(steps) for _, steps in trajectories]
        model = self._model
        if model is None:
            return [unscored(self.name, self.version, one, NOT_FITTED) for one in leaves]
        rows: list[Row | str] = [
            model.row(trajectory, one) if one else "no step"
            for (trajectory, _), one in zip(trajectories, leaves, strict=True)
        ]
        found = iter(model.chances([row for row in rows if not isinstance(row, str)], self.config.batch_tokens))
        beyond = f"it ends beyond the {model.opened.longest} tokens that the model reads"
        return [
            unscored(self.name, model.version, one, row)
            if isinstance(row, str)
            else words_of(self.name, model.version, model.head, one, next(found), beyond=beyond)
            for row, one in zip(rows, leaves, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fitted:
    card: Card
    head: Head
    opened: Opened
    version: str

    def row(self, trajectory: Trajectory, leaves: Sequence[Step]) -> Row | str:
        """The dialogue as tokens, or the reason why it cannot be read."""
        from slea_llm.models.step_reader import row_of

        try:
            return row_of(self.opened.chat, trajectory, leaves, longest=self.opened.longest)
        except SleaError as error:
            return f"{type(error).__name__}: {error}"

    def chances(self, rows: Sequence[Row], batch_tokens: int) -> list[list[tuple[float, float]]]:
        """(label, success) probabilities at every place of each row."""
        import torch

        from slea_llm.models.step_reader import batches

        found: list[list[tuple[float, float]]] = [[] for _ in rows]
        slopes = torch.tensor([self.card.calibration.get(head, (1.0, 0.0)) for head in ("label", "success")]).double()
        with torch.inference_mode():
            for batch in batches(rows, batch_tokens):
                logits = self.opened.reader([rows[index] for index in batch]).double().cpu()
                table = torch.sigmoid(logits * slopes[:, 0] + slopes[:, 1]).tolist()
                for index, row in zip(batch, table, strict=True):
                    found[index] = [(one[0], one[1]) for one in row[: len(rows[index].places)]]
        return found


def _load(folder: Path, config: CausalRewardModel.Config) -> _Fitted:
    card = preflight_folder(folder, CausalRewardModel.name)
    head = head_of(card, config.read, source=folder)
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from slea_llm.models.step_reader import open_reader, probe

    shape: Any = card.network
    try:
        settings = ModelSettings(
            base=config.base or card.encoder,
            revision=None if config.base else shape["revision"],
            dtype=shape["dtype"],
            lora_rank=shape["rank"],
            lora_alpha=shape["alpha"],
        )
        longest, expected = int(shape["longest"]), [float(one) for one in shape["probe"]]
        content = (folder / WEIGHTS).read_bytes()
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise EvaluatorError(f"{folder} does not hold a whole {CausalRewardModel.name}: {error}") from error
    if odd := [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
        raise EvaluatorError(f"{folder / WEIGHTS}: weight {odd[0]!r} is not finite; fit the evaluator again")
    opened = open_reader(settings, longest=longest, device=config.device)
    try:
        opened.reader.load(tensors, source=str(folder / WEIGHTS))
    except CheckpointError as error:
        raise EvaluatorError(f"{folder} was fitted on another base than {settings.base!r}: {error}") from error
    found = probe(opened)
    if len(found) != len(expected) or max(abs(one - other) for one, other in zip(found, expected, strict=True)) > (
        PROBE_TOLERANCE
    ):
        raise EvaluatorError(
            f"{folder}: on the base {settings.base!r} the probe reads {found[:3]}, when it was fitted it read "
            f"{expected[:3]}; base model, tokenizer or chat template are not those that it was fitted on"
        )
    card_bytes = (folder / CARD).read_bytes()
    version = hashlib.sha256(content + card_bytes + head.encode()).hexdigest()[:16]
    return _Fitted(card=card, head=head, opened=opened, version=version)
