"""The composition root: the one place that hands one room to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slea_llm.config import ComponentSpec, Recipe, RefereeRecipe, ScoringRecipe, component_config
from slea_llm.crediting import Crediting
from slea_llm.endpoints import Endpoint
from slea_llm.errors import UnsupportedError
from slea_llm.interfaces import Augmenter, Environment, LossTerm, SimulatedUser, StepEvaluator, StepWeigher
from slea_llm.scoring import Scorer, TokenDecoder

if TYPE_CHECKING:
    from slea_llm.imitation import Imitation
    from slea_llm.referee import Referee


def component(kind: str, spec: ComponentSpec, available: Mapping[str, Any] | None = None) -> Any:
    """Build a component from its spec, handing it what its `needs` ask for, and a chat model that runs in this process.

    Raises UnsupportedError when it needs something that is not to be had here (a live environment in offline scoring).
    """
    cls, config = component_config(kind, spec)
    given = available or {}
    needs: frozenset[str] = getattr(cls, "needs", frozenset())
    missing = sorted(needs - given.keys())
    if missing:
        raise UnsupportedError(f"{kind} {spec.name!r} needs {', '.join(missing)}, which is not to be had here")
    handed = {name: given[name] for name in sorted(needs)}
    endpoint = getattr(config, "endpoint", None)
    if isinstance(endpoint, Endpoint) and endpoint.in_process:
        handed["chat_model"] = given.get("chat_models", ChatModels()).of(endpoint)
    return cls(config, **handed)


class ChatModels:
    """The chat models of this process: components that name the same endpoint share one engine."""

    def __init__(self) -> None:
        self._made: dict[Endpoint, Any] = {}

    def of(self, endpoint: Endpoint) -> Any:
        """The model of an endpoint whose url is `engine`, loaded when it is first asked for.

        It is both a ChatModel and an AsyncChatModel.
        """
        if endpoint not in self._made:
            from slea_llm.generation.vllm_chat import VllmChat

            self._made[endpoint] = VllmChat(endpoint)
        return self._made[endpoint]


def environment(recipe: Recipe) -> Environment:
    built: Environment = component("environment", recipe.environment)
    return built


def user(recipe: Recipe, chat_models: ChatModels | None = None) -> SimulatedUser:
    """The simulated user; one whose endpoint is in this process shares its engine with others of `chat_models`."""
    built: SimulatedUser = component("user", recipe.user, {"chat_models": chat_models or ChatModels()})
    return built


def referee(recipe: Recipe | RefereeRecipe, chat_models: ChatModels | None = None) -> Referee:
    """Who lays failures to agent, user, environment or scorer."""
    built: Referee = component("referee", recipe.referee, {"chat_models": chat_models or ChatModels()})
    return built


def scorer(
    recipe: Recipe | ScoringRecipe,
    *,
    chat: TokenDecoder | None = None,
    available: Mapping[str, Any] | None = None,
) -> Scorer:
    """Parser and evaluators, as the trainer and offline scoring both use them; `chat` gives steps their tokens."""
    given = {
        "chat_models": ChatModels(),
        **(available or {}),
        "build_evaluator": lambda name, options: build(ComponentSpec(name=name, **options)),
    }

    def build(spec: ComponentSpec) -> StepEvaluator:
        evaluator: StepEvaluator = component("evaluator", spec, given)
        return evaluator

    evaluators = [build(spec) for spec in recipe.evaluators]
    return Scorer(component("parser", recipe.parser, given), evaluators, chat)


def crediting(recipe: Recipe | ScoringRecipe) -> Crediting:
    """Augmenters and the credit method over the recipe's reward streams.

    When a log is scored, an evaluator that feeds no stream is there to be read; in training it would be a mistake.
    """
    fed = {source for stream in recipe.streams.values() for source in stream.sources}
    read = (
        [spec.name for spec in recipe.evaluators if spec.name not in fed] if isinstance(recipe, ScoringRecipe) else []
    )
    augmenters: list[Augmenter | StepWeigher] = [component("augmenter", spec) for spec in recipe.augmenters]
    cls, config = component_config("credit", recipe.credit)
    return Crediting(
        recipe.streams,
        augmenters,
        cls(config, streams=recipe.streams),
        kl_coef=recipe.kl_in_reward,
        evaluators=[spec.name for spec in recipe.evaluators],
        weights=recipe.weights,
        logged_only=read,
    )


def heads(recipe: Recipe) -> tuple[str, ...]:
    """The value heads that the credit method of a recipe reads."""
    cls, config = component_config("credit", recipe.credit)
    found: tuple[str, ...] = getattr(cls(config, streams=recipe.streams), "heads", tuple(recipe.streams))
    return found


def losses(recipe: Recipe) -> tuple[LossTerm, ...]:
    return tuple(component("loss", spec) for spec in recipe.losses)


def imitation(
    recipe: Recipe, *, chat: Any, folder: Path, rank: int, world_size: int, report: Callable[[str], None]
) -> Imitation | None:
    """What the imitation losses of the recipe learn from, None without any. Demonstrations are kept in `folder`."""
    names = ("imitation", "imitation_prototypes")
    configs = {spec.name: component_config("loss", spec)[1] for spec in recipe.losses if spec.name in names}
    if not configs:
        return None
    from slea_llm.demonstrations import Demonstrations
    from slea_llm.encoders import CachingEncoder, load_encoder
    from slea_llm.imitation import Imitation

    steps = configs.get("imitation")
    shown = None
    if steps is not None and steps.demonstrations:
        shown = Demonstrations(
            steps.demonstrations, folder, chat, evaluator=steps.gain, rank=rank, world_size=world_size
        )
        if shown.skipped:
            report(f"{len(shown.skipped)} logged dialogues cannot be imitated, the first since {shown.skipped[0]}")
    return Imitation(
        steps,
        configs.get("imitation_prototypes"),
        encoders={
            name: CachingEncoder(load_encoder(name), size=4096)
            for name in sorted({config.encoder for config in configs.values()})
        },
        streams=recipe.streams,
        demonstrations=shown,
        seed=recipe.run.seed,
        rank=rank,
    )
