"""Score steps by a fitted model: how much each changes the chance of success, or how likely it is a good step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from slea_llm.checks import check_choices, check_least
from slea_llm.errors import ConfigError, EvaluatorError
from slea_llm.evaluators.reward_model_card import CARD, WEIGHTS, Card, Head, judge, preflight_folder
from slea_llm.evaluators.reward_model_words import NOT_FITTED, READS, UNFITTED, Read, head_of, unscored, words_of
from slea_llm.types import ScoredStep, Step, Trajectory, Verdict, leaf_steps

if TYPE_CHECKING:
    from slea_llm.evaluators.reward_model_memory import Memory
    from slea_llm.evaluators.reward_model_network import RewardNetwork

CHUNK = 64
"""Trajectories of one forward pass: what is held in memory at a time, however many are scored."""


class RewardModel:
    """A small Transformer over sentence vectors, fitted by `slea fit-evaluator` and read from its folder.

    `progress`: score of step k = p_k - p_(k-1), p being the calibrated chance of success given everything up to the
    step; the scores of a dialogue add up to p_last - p_start, so that cutting a text into more steps earns nothing.
    `label`: score = 2 P(good step) - 1. Both are in [-1, 1]. Without a fitted model every step is unscored, with that
    reason. `gate` says whether the scores may move training.
    """

    name: ClassVar[str] = "reward_model"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        model: str = ""
        """Folder that `slea fit-evaluator` wrote. Empty: nothing is fitted yet, and every step is unscored."""
        read: Read = "auto"
        """`progress`, `label`, or `auto`: progress where the model was fitted on outcomes, else label."""
        cache: int = 20_000
        """Texts whose sentence vectors are kept, 0 or more (2 kB each)."""
        refresh_every: int = 0
        """Iterations of a training after which it is refitted on the run's own dialogues. 0: never."""
        window: int = 256
        """Newest dialogues that a refit looks at, 64 or more."""
        encoder: str = "use-multilingual"
        """Sentence encoder of a refit; a fitted model brings its own."""

        def __post_init__(self) -> None:
            check_choices(self, read=READS)
            check_least(self, refresh_every=0, window=64, cache=0)

    def __init__(self, config: Config) -> None:
        """Load the folder. Raises EvaluatorError when it holds no whole model, ConfigError for an unfitted `read`."""
        self.config = config
        self._model: _Fitted | None = None
        if config.model:
            self.load(Path(config.model))

    def load(self, folder: Path) -> None:
        """Score with the model of this folder from now on; the one before stays when this raises."""
        self._model = _load(folder, self.config)

    @classmethod
    def preflight(cls, config: Config) -> Verdict | None:
        """What `slea plan` asks: the gate by the card alone; no weights are read.

        Raises ConfigError when nothing is fitted and nothing will be, EvaluatorError when the folder holds no model.
        """
        if config.model:
            folder = Path(config.model)
            card = preflight_folder(folder, cls.name)
            head = head_of(card, config.read, source=folder)
            return judge(cls.name, head, card.reliability[head])
        if not config.refresh_every:
            raise ConfigError(
                f"evaluator {cls.name!r} has no model and is never fitted: give model, a folder that "
                "`slea fit-evaluator` wrote, or refresh_every"
            )
        return None

    @property
    def version(self) -> str:
        """Hash of weights, card and the head that is read: it changes with every fit."""
        return UNFITTED if self._model is None else self._model.version

    @property
    def gate(self) -> Verdict:
        """Whether these scores may move training, by the card."""
        if self._model is None:
            return judge(self.name, "success", None)
        head = self._model.head
        return judge(self.name, head, self._model.card.reliability.get(head))

    def score(self, trajectory: Trajectory, steps: Sequence[Step]) -> tuple[ScoredStep, ...]:
        return self.score_many([(trajectory, steps)])[0]

    def score_many(self, trajectories: Sequence[tuple[Trajectory, Sequence[Step]]]) -> list[tuple[ScoredStep, ...]]:
        """The scores of several trajectories, in order; faster than one by one, and equal to it within rounding."""
        leaves = [leaf_steps(steps) for _, steps in trajectories]
        if self._model is None:
            return [unscored(self.name, self.version, one, NOT_FITTED) for one in leaves]
        found: list[tuple[ScoredStep, ...]] = []
        for start in range(0, len(trajectories), CHUNK):
            part = trajectories[start : start + CHUNK]
            for one, chances in zip(leaves[start : start + CHUNK], self._model.chances(part), strict=True):
                found.append(words_of(self.name, self._model.version, self._model.head, one, chances))
        return found


class _Fitted:
    """A network with its encoder, calibration and version."""

    def __init__(
        self, card: Card, head: Head, network: RewardNetwork, memory: Memory, encoder: Any, version: str
    ) -> None:
        self.card, self.head, self.version = card, head, version
        self._network, self._memory, self._encoder = network, memory, encoder

    def chances(self, trajectories: Sequence[tuple[Trajectory, Sequence[Step]]]) -> list[list[tuple[float, float]]]:
        """(label, success) probabilities at every position of each trajectory."""
        import torch

        from slea_llm.evaluators.reward_model_features import prefixes
        from slea_llm.evaluators.reward_model_network import collate

        rows = prefixes(trajectories, self._encoder, self.card.encoding)  # type: ignore[arg-type]
        with torch.inference_mode():
            logits = self._network(collate([self._memory.attached(row) for row in rows])).double()
        slopes = torch.tensor([self.card.calibration.get(head, (1.0, 0.0)) for head in ("label", "success")]).double()
        table = torch.sigmoid(logits * slopes[:, 0] + slopes[:, 1]).tolist()
        return [[(one[0], one[1]) for one in row[: len(part)]] for row, part in zip(table, rows, strict=True)]


def _load(folder: Path, config: RewardModel.Config) -> _Fitted:
    card = preflight_folder(folder, RewardModel.name)
    head = head_of(card, config.read, source=folder)
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from slea_llm.encoders import CachingEncoder, load_encoder
    from slea_llm.evaluators.reward_model_memory import Memory
    from slea_llm.evaluators.reward_model_network import NetworkShape, RewardNetwork

    path = folder / WEIGHTS
    try:
        content = path.read_bytes()
        tensors = load_file(path)
        keys, tallies = (tensors.pop(f"memory.{name}") for name in ("keys", "tallies"))
        memory = Memory.from_arrays(keys.numpy(), tallies.numpy())
        network = RewardNetwork(NetworkShape(**card.network))
        network.load_state_dict(tensors)
    except (OSError, SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise EvaluatorError(f"{path} does not hold the weights that {CARD} describes: {error}") from error
    if odd := [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
        raise EvaluatorError(f"{path}: weight {odd[0]!r} is not finite; fit the evaluator again")
    encoder = CachingEncoder(load_encoder(card.encoder), size=config.cache)
    version = hashlib.sha256(content + (folder / CARD).read_bytes() + head.encode()).hexdigest()[:16]
    return _Fitted(card, head, network.eval(), memory, encoder, version)
