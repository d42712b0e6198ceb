"""What training, evaluation and rollout build alike: tokenizer, chat, sampler, rollouts."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slea_llm.adjudication import Playing, RefereedRollout
from slea_llm.cli import compose
from slea_llm.config import Recipe, component_config
from slea_llm.continuations import BranchingPlay, PolicyPlayer
from slea_llm.errors import ConfigError, MissingDependencyError, StorageError
from slea_llm.folders import make_folder
from slea_llm.interfaces import Continuations, Environment, Generator, SimulatedUser
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import load_stop_ids, load_tokenizer
from slea_llm.redaction import RedactingFormatter, environment_secrets, refuse_secrets
from slea_llm.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THIRD_PARTIES = ("transformers", "vllm", "accelerate", "peft", "trl", "datasets", "torch", "httpx", "huggingface_hub")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The parts that play dialogues."""

    recipe: Recipe
    environment: Environment
    user: SimulatedUser
    chat_models: compose.ChatModels
    tokenizer: PreTrainedTokenizerFast
    chat: ChatTokenizer
    generator: Generator
    plain_rollout: Rollout
    rollout: Playing
    panel_rollout: Playing
    template: str

    @property
    def continuations(self) -> Continuations:
        """Plays dialogues of `rollout` on from a place in a reply, with the policy that is served then."""
        settings = self.recipe.rollout
        return BranchingPlay(
            self.environment,
            self.user,
            PolicyPlayer(self.plain_rollout, self.chat.heard),
            max_turns=settings.max_turns,
            concurrency=settings.concurrency,
            deadline_s=settings.deadline_s,
        )

    @property
    def pad_id(self) -> int:
        """Any valid id: every mask is explicit, so what padding holds is never read."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id)


def check_secrets(recipe: Recipe) -> None:
    """A recipe is written to the run folder and given to trackers: it must hold no secret."""
    refuse_secrets(recipe.model_dump(mode="json"), source="recipe", secrets=environment_secrets())


def open_session(recipe: Recipe, *, seed_offset: int = 0) -> Session:
    """Load the tokenizer and start the sampler. The caller closes `session.generator`."""
    if not recipe.model.base:
        raise ConfigError("model.base is empty; give a hub name or a folder")
    environment = compose.environment(recipe)
    tokenizer = load_tokenizer(recipe.model)
    chat = chat_of(recipe)
    template = chat.check()
    generator = start_generator(recipe, chat, seed=recipe.run.seed + seed_offset)
    chat_models = compose.ChatModels()
    user = compose.user(recipe, chat_models)
    referee = compose.referee(recipe, chat_models)
    settings, name = recipe.rollout, recipe.environment.name
    rollout = Rollout(environment, user, generator, chat, settings, environment_name=name, seed=recipe.run.seed)
    panel_rollout = Rollout(
        environment,
        user,
        generator,
        chat,
        settings,
        environment_name=name,
        seed=recipe.evaluation.panel_seed + recipe.run.seed,
        greedy=recipe.evaluation.temperature == 0,
    )
    return Session(
        recipe=recipe,
        environment=environment,
        user=user,
        chat_models=chat_models,
        tokenizer=tokenizer,
        chat=chat,
        generator=generator,
        plain_rollout=rollout,
        rollout=RefereedRollout(rollout, referee),
        panel_rollout=RefereedRollout(panel_rollout, referee),
        template=template.line(recipe.rollout.thoughts),
    )


def chat_of(recipe: Recipe) -> ChatTokenizer:
    """The tokenizer of the base with its chat template and the declared fate of earlier thoughts."""
    tokenizer = load_tokenizer(recipe.model)
    return ChatTokenizer(tokenizer, thoughts=recipe.rollout.thoughts, stop_ids=load_stop_ids(recipe.model))


def start_generator(recipe: Recipe, chat: ChatTokenizer, *, seed: int) -> Generator:
    cls, config = component_config("generator", recipe.generation)
    generator: Generator = cls(
        config,
        model=recipe.model,
        max_context=recipe.rollout.max_context_tokens,
        temperature=recipe.rollout.temperature,
        stop_ids=chat.stop_ids,
        seed=seed,
    )
    return generator


@contextmanager
def quiet_third_parties(log: Path) -> Iterator[None]:
    """Send what other libraries log to a file, secrets taken out; keep their bars and warnings off the terminal."""
    try:
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise MissingDependencyError("transformers is not installed; run make install or make install-cpu") from error
    make_folder(log.parent)
    try:
        handler = logging.FileHandler(log, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{log} cannot be written: {error.strerror or error}; name another folder") from error
    handler.setFormatter(
        RedactingFormatter("%(asctime)s %(levelname)s %(name)s %(message)s", secrets=environment_secrets())
    )
    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    loggers = [logging.getLogger(name) for name in THIRD_PARTIES]
    before = [(logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [handler], False
    try:
        with warnings.catch_warnings():
            # What they say of their own code helps nobody here; a warning of this library still shows.
            warnings.filterwarnings("ignore", module=rf"({'|'.join(THIRD_PARTIES)})(\.|$)")
            yield
    finally:
        for logger, (handlers, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
        handler.close()
