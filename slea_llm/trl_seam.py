"""What this library takes from TRL, in one place: supervised fine-tuning. `tests/integration/test_trl_seam.py` says
what moved when a release changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from trl import SFTConfig, SFTTrainer

IGNORED = -100
"""Label of a token that is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow:
    """Token ids of one dialogue and which of them are trained; equally long."""

    ids: tuple[int, ...]
    trained: tuple[bool, ...]

    def labels(self) -> list[int]:
        return [token if train else IGNORED for token, train in zip(self.ids, self.trained, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """How to imitate. `batch`: rows of an update; `learning_rate` falls to 0 along half a cosine."""

    epochs: int
    batch: int
    learning_rate: float
    seed: int
    progress: bool = False


LINES = 10
"""Lines of a warm start whose output is no terminal."""


class _SftTrainer(SFTTrainer):  # type: ignore[misc]  # trl has no types
    def _send_telemetry(self) -> None:
        """Nothing leaves the machine."""


class _Watch(TrainerCallback):  # type: ignore[misc]  # transformers' callbacks have no types here
    """A progress bar, or lines where output is no terminal, and the loss of each log line."""

    def __init__(self, *, progress: bool) -> None:
        self._progress = progress
        self._bar: tqdm[Any] | None = None
        self.losses: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        self._bar = tqdm(
            total=state.max_steps, desc="warm start", unit="update", disable=None if self._progress else True
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        if self._bar is not None:
            self._bar.update()
            if self._progress and self._bar.disable and state.global_step % -(-state.max_steps // LINES) == 0:
                tqdm.write(f"warm start: update {state.global_step} of {state.max_steps}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        del args, state, control
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state, control
        if self._bar is not None:
            self._bar.close()


def make_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TrainingRow],
    settings: SftSettings,
    *,
    folder: Path,
) -> SFTTrainer:
    """An SFTTrainer over rows that are already tokens and labels: nothing is tokenised, cut or masked again.

    The labels are explicit, so that a pad token which is also the end of a turn hides no real one.
    """
    columns = {"input_ids": [list(row.ids) for row in rows], "labels": [row.labels() for row in rows]}
    config = SFTConfig(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        adam_beta2=0.98,
        seed=settings.seed,
        # Rows of like length share a batch: less padding.
        train_sampling_strategy="group_by_length",
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )
    watch = _Watch(progress=settings.progress)
    trainer = _SftTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def supervise(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TrainingRow],
    settings: SftSettings,
    *,
    folder: Path,
) -> list[float]:
    """Train `model` in place on the trained tokens of `rows`; the mean loss of each update, in nats a token.

    `folder` is TRL's scratch folder; nothing of use is written there.
    """
    trainer = make_trainer(model, tokenizer, rows, settings, folder=folder)
    trainer.train()
    (watch,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, _Watch)]
    return watch.losses
