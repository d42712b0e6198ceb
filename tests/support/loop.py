"""The whole loop on a tiny policy: real environment, user, sampler, scores, credit and losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator

from slea_llm import registry
from slea_llm.buffer import ReplayBuffer
from slea_llm.collection import OnlineCollector, Rank
from slea_llm.credit.nested_gae import NestedGae
from slea_llm.crediting import Crediting
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.interfaces import (
    Environment,
    Generator,
    Imitator,
    LossTerm,
    SimulatedUser,
    StepEvaluator,
    StepParser,
)
from slea_llm.losses.ppo import PpoConfig, PpoLoss
from slea_llm.losses.value import ValueConfig, ValueLoss
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import load_tokenizer
from slea_llm.models.policy import PolicyCritic, build
from slea_llm.models.tiny import make_tiny
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.rollout import Rollout
from slea_llm.scoring import Scorer
from slea_llm.settings import (
    ModelSettings,
    ReplaySettings,
    RolloutSettings,
    StreamSettings,
    TrainerSettings,
    WarmStartSettings,
)
from slea_llm.storage import ScoredLog
from slea_llm.trainer import Parts, Trainer, TrainerOptions
from slea_llm.users.scripted import ScriptedUser
from slea_llm.warm_start import messages_of, scripted_dialogues

STREAMS = {
    "outcome": StreamSettings(sources=("outcome",)),
    "scores": StreamSettings(sources=("knowledge_base",), gamma_step=0.0, gamma_turn=0.0),
}
ROLLOUT = RolloutSettings(episodes=4, max_turns=3, max_reply_tokens=10, max_context_tokens=512, tasks=10)
ENVIRONMENT = OrderTaking.Config(prompt="terse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """What is played and how it is paid; by default taking orders, as far as a random policy gets."""

    environment: Environment = field(default_factory=lambda: OrderTaking(ENVIRONMENT))
    user: SimulatedUser = field(default_factory=lambda: ScriptedUser(ScriptedUser.Config()))
    parser: StepParser = field(default_factory=lambda: TaggedParser(TaggedParser.Config()))
    evaluators: Sequence[StepEvaluator] = field(default_factory=lambda: [KnowledgeBase(KnowledgeBase.Config())])
    streams: Mapping[str, StreamSettings] = field(default_factory=lambda: STREAMS)
    credit: NestedGae.Config = field(default_factory=NestedGae.Config)
    losses: Sequence[LossTerm] = field(default_factory=lambda: [PpoLoss(PpoConfig()), ValueLoss(ValueConfig())])
    rollout: RolloutSettings = ROLLOUT


def write_base(folder: Path) -> Path:
    """A random Llama whose tokenizer knows the words of order taking."""
    environment, user = OrderTaking(ENVIRONMENT), ScriptedUser(ScriptedUser.Config())
    played = scripted_dialogues(environment, user, WarmStartSettings(dialogues=20), seed=0, max_turns=12)
    texts = [message.content for one in played for message in messages_of(one)]
    return make_tiny(folder, texts, vocab_size=500, hidden=128, layers=1, heads=2, seed=1)


@contextlib.contextmanager
def running(
    base: Path,
    output_dir: Path,
    settings: TrainerSettings,
    *,
    engine: str,
    accelerator: Accelerator,
    replay: ReplaySettings | None = None,
    imitation: Imitator | None = None,
    kit: Kit | None = None,
    report: Callable[[str], None] = lambda _line: None,
) -> Iterator[tuple[Trainer, PolicyCritic, ScoredLog]]:
    """Trainer, model and log of a run; the sampler is closed at the end."""
    kit = kit or Kit()
    rollout = kit.rollout
    model_settings = ModelSettings(base=str(base), lora_rank=8, lora_alpha=16, critic_rank=8)
    chat = ChatTokenizer(load_tokenizer(model_settings))
    cls = registry.load("generator", engine)
    generator: Generator = cls(
        cls.Config(),
        model=model_settings,
        max_context=rollout.max_context_tokens,
        temperature=rollout.temperature,
        stop_ids=chat.stop_ids,
        seed=0,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(generator.close)
        crediting = Crediting(kit.streams, [], NestedGae(kit.credit, streams=kit.streams))
        model = build(model_settings, streams=crediting.heads, temperature=rollout.temperature, seed=0)
        rank = Rank(index=int(accelerator.process_index), world_size=int(accelerator.num_processes))
        log = stack.enter_context(ScoredLog(output_dir / "rollouts" / f"rank{rank.index}.jsonl"))
        collector = OnlineCollector(
            environment=kit.environment,
            rollout=Rollout(
                kit.environment, kit.user, generator, chat, rollout, environment_name=kit.environment.name, seed=0
            ),
            scorer=Scorer(kit.parser, kit.evaluators, chat),
            settings=rollout,
            seed=0,
            log=log,
            rank=rank,
        )
        buffer = None
        if replay is not None:
            folder = output_dir / "replay" / f"rank{rank.index}"
            buffer = ReplayBuffer(replay, folder, seed=0, rank=rank.index, world_size=rank.world_size)
            stack.callback(buffer.close)
        parts = Parts(
            losses=kit.losses,
            collector=collector,
            crediting=crediting,
            generator=generator,
            replay=buffer,
            imitation=imitation,
        )
        pad = int(load_tokenizer(model_settings).pad_token_id)
        options = TrainerOptions(output_dir=output_dir, seed=0, pad_id=pad, report=report)
        yield Trainer(model, settings, rollout, parts, accelerator=accelerator, options=options), model, log
