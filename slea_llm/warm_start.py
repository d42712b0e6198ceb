"""Imitation of scripted dialogues, so that training starts from a policy that can already talk in the task's format."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import get_peft_model
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from slea_llm.errors import ConfigError
from slea_llm.folders import refuse_existing, whole_folder
from slea_llm.interfaces import Environment, SimulatedUser
from slea_llm.models.adapters import fresh_config
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import base_dtype, check_vocabulary, load_base, load_tokenizer
from slea_llm.rollout import play
from slea_llm.settings import ModelSettings, WarmStartSettings
from slea_llm.trl_seam import SftSettings, TrainingRow, supervise
from slea_llm.types import Message, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartReport:
    """What was imitated and how it went. Losses are nats a trained token, over the first and last tenth of updates."""

    folder: Path
    dialogues: int
    successes: int
    tokens: int
    trained_tokens: int
    updates: int
    loss_before: float
    loss_after: float
    play_seconds: float
    train_seconds: float

    def line(self) -> str:
        """The report in one line."""
        return (
            f"warm start: {self.dialogues} scripted dialogues ({self.successes} succeed), {self.trained_tokens} of "
            f"{self.tokens} tokens trained in {self.updates} updates, loss {self.loss_before:.3f} -> "
            f"{self.loss_after:.3f} nats a token; played in {self.play_seconds:.1f} s, trained in "
            f"{self.train_seconds:.1f} s; saved in {self.folder}"
        )


def warm_start(
    environment: Environment,
    user: SimulatedUser,
    chat: ChatTokenizer,
    model: ModelSettings,
    warm: WarmStartSettings,
    folder: Path,
    *,
    seed: int,
    max_turns: int = 12,
    progress: bool = True,
) -> WarmStartReport:
    """Imitate `warm.dialogues` dialogues of the environment's scripted expert, on what the expert says alone.

    All weights are trained and saved as a plain Hugging Face folder, which the run then names as its base; with
    `warm.lora` an adapter is trained and its folder becomes `model.adapter`. `folder` appears whole or not at all.

    Raises ConfigError when there is nothing to imitate or `folder` cannot become the result, TemplateError when the
    template leaves no token to train.
    """
    if not warm.dialogues:
        raise ConfigError("warm_start.dialogues is 0, so there is nothing to imitate; set it to 500 or more")
    refuse_existing(folder, overwrite=False)
    started = time.perf_counter()
    played = scripted_dialogues(environment, user, warm, seed=seed, max_turns=max_turns, progress=progress)
    rows = [
        TrainingRow(ids=ids, trained=trained) for one in played for ids, trained in chat.encode_rows(messages_of(one))
    ]
    trained_at = time.perf_counter()
    policy, tokenizer = _load(model, lora=warm.lora, seed=seed)
    settings = SftSettings(
        epochs=warm.epochs, batch=warm.batch, learning_rate=warm.learning_rate, seed=seed, progress=progress
    )
    with tempfile.TemporaryDirectory() as scratch:
        losses = supervise(policy, tokenizer, rows, settings, folder=Path(scratch))
    with whole_folder(folder) as partial:
        _save(policy, tokenizer, model, partial, lora=warm.lora)
    tenth = max(1, len(losses) // 10)
    return WarmStartReport(
        folder=folder,
        dialogues=len(played),
        successes=sum(one.success for one in played),
        tokens=sum(len(row.ids) for row in rows),
        trained_tokens=sum(sum(row.trained) for row in rows),
        updates=len(losses),
        loss_before=sum(losses[:tenth]) / tenth,
        loss_after=sum(losses[-tenth:]) / tenth,
        play_seconds=trained_at - started,
        train_seconds=time.perf_counter() - trained_at,
    )


def scripted_dialogues(
    environment: Environment,
    user: SimulatedUser,
    warm: WarmStartSettings,
    *,
    seed: int,
    max_turns: int,
    progress: bool = False,
) -> list[Trajectory]:
    """Dialogues between the scripted user and an expert that errs in `warm.error_rate` of its replies."""
    dialogues = []
    for number in tqdm(
        range(warm.dialogues), desc="scripted dialogues", unit="dialogue", disable=None if progress else True
    ):
        task = environment.task(number)
        expert = environment.expert(task, error_rate=warm.error_rate)
        dialogues.append(play(environment, user, expert, task, seed=seed + number, max_turns=max_turns))
    return dialogues


def messages_of(trajectory: Trajectory) -> list[Message]:
    """All messages of a dialogue in order, the agent's as it wrote them."""
    messages: list[Message] = []
    for turn in trajectory.turns:
        messages += [*turn.context, Message(role="assistant", content=turn.text)]
    return messages


def _load(model: ModelSettings, *, lora: bool, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Base and tokenizer, ready to be trained: all weights in float32, or a fresh adapter on the frozen base."""
    tokenizer = load_tokenizer(model)
    if lora:
        base = load_base(model)
        check_vocabulary(tokenizer, base)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return get_peft_model(base, fresh_config(model)), tokenizer
    # Small updates vanish in bfloat16 weights: train in float32, round once when saving.
    whole = model if model.dtype == "float64" else dataclasses.replace(model, dtype="float32")
    base = load_base(whole)
    check_vocabulary(tokenizer, base)
    return base.requires_grad_(True), tokenizer


def _save(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, model: ModelSettings, folder: Path, *, lora: bool
) -> None:
    if lora:
        config = policy.peft_config["default"]
        config.base_model_name_or_path = model.declared_base or model.base
        config.revision = model.revision
        # Said, not found out: PEFT would ask the hub about the base's name to learn whether its vocabulary changed.
        policy.save_pretrained(folder, save_embedding_layers=False)
        return
    policy.to(base_dtype(model)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
