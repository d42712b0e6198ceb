"""Frozen settings of the fixed parts of a run. Components keep their own `Config` beside their code.

Ranges are stated under each field and checked when one is made; 0 means what the line under the field says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{name} {value!r} is out of range; allowed: {allowed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    output_dir: str = "runs/default"
    """Folder of this run: resolved recipe, logs, rollouts, checkpoints, adapter."""
    seed: int = 0
    """Seeds tasks, sampling noise, initial weights and the order of minibatches; 0 to 2^63 - 1."""

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63 - 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    base: str
    """Hub name or local folder of a Hugging Face causal language model with a chat template."""
    revision: str | None = None
    """Revision of the hub model; recorded in the exported adapter."""
    declared_base: str | None = None
    """Name that the exported adapter gives as its base when `base` is a temporary folder. None: `base` itself."""
    adapter: str | None = None
    """Folder of a PEFT adapter to start from (a warm start). None: a fresh one, which changes nothing yet."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the base weights; adapters and value heads are kept in float32 (float64 with float64)."""
    trust_remote_code: bool = False
    """Run Python files that come with the model. Off: a model that needs them is refused."""
    lora_rank: int = 16
    """1 to 512; must be a rank that the engine can serve."""
    lora_alpha: int = 32
    lora_targets: str | tuple[str, ...] = "all-linear"
    """`all-linear` or module names."""
    critic: Literal["own_adapter", "shared_trunk", "none"] = "own_adapter"
    """`own_adapter`: value heads on the base with their own adapter. `shared_trunk`: heads on the policy's trunk,
    cheap, but the value loss moves the policy too. `none`: all values are 0."""
    critic_rank: int = 16
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.base), "base", self.base, "a hub name or a folder")
        _require(1 <= self.lora_rank <= 512, "lora_rank", self.lora_rank, "1 to 512")
        _require(1 <= self.critic_rank <= 512, "critic_rank", self.critic_rank, "1 to 512")
        _require(self.lora_alpha > 0, "lora_alpha", self.lora_alpha, "above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    episodes: int = 32
    """Dialogues an iteration, over all ranks."""
    tasks: int = 10_000
    """Distinct training tasks, drawn in a seeded order; stays below `evaluation.panel_seed`."""
    group_size: int = 1
    """Dialogues of the same task; groups stay on one rank. Divides `episodes`."""
    max_turns: int = 12
    """Replies of the agent after which a dialogue is cut (termination max_turns)."""
    max_reply_tokens: int = 64
    max_context_tokens: int = 2048
    """Prompt and reply together; a dialogue that would exceed it is cut (termination budget)."""
    temperature: float = 1.0
    """Above 0. Log-probabilities everywhere are those of the tempered distribution."""
    concurrency: int = 128
    """Dialogues in flight at once, per rank."""
    deadline_s: float = 600.0
    """Seconds after which one dialogue becomes a record with termination error."""
    max_error_rate: float = 0.2
    """Share of failed dialogues in one iteration above which the run stops."""
    scoring_batch: int = 0
    """Dialogues, per rank, that are played and then scored together. 0: all of an iteration at once."""
    scoring_ahead: int = 0
    """Scored batches that may lag behind: a second thread scores one while the next is played. 0: one after the other,
    with the same result."""
    thoughts: Literal["keep", "strip", "split"] = "keep"
    """Earlier thoughts in later prompts: kept (a row a dialogue), stripped (a row a turn), or as the template does."""

    def __post_init__(self) -> None:
        for name in (
            "episodes",
            "tasks",
            "group_size",
            "max_turns",
            "max_reply_tokens",
            "max_context_tokens",
            "concurrency",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("scoring_batch", "scoring_ahead"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        _require(
            self.scoring_batch > 0 or not self.scoring_ahead, "scoring_ahead", self.scoring_ahead, "0 without batches"
        )
        _require(0 < self.temperature < math.inf, "temperature", self.temperature, "above 0, finite")
        _require(self.deadline_s > 0, "deadline_s", self.deadline_s, "above 0")
        _require(0 <= self.max_error_rate <= 1, "max_error_rate", self.max_error_rate, "0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """One reward stream: its sources meet only inside it; streams meet only as whitened advantages."""

    sources: tuple[str, ...]
    """Parts that feed it: `outcome`, `reference_kl`, or the name of an evaluator or augmenter."""
    weight: float = 1.0
    """Share of this stream's whitened advantages in the sum over streams, 0 or above."""
    fade_until: float = 0.0
    """Share of the training after which the weight has fallen to 0, in a straight line; in [0, 1]. 0: it does not fall.
    For scores that shall only start the learning, such as those of written knowledge (weight 0.3, 0.33)."""
    reward_scale: float = 1.0
    """Factor on the stream's rewards, above 0. Whitening undoes it for the policy; the critic's heads share a trunk, so
    streams should be of like size (0.1 for an outcome of 10 beside scores of 1), or the largest drowns the others."""
    kinds: tuple[str, ...] = ()
    """Step kinds whose tokens receive this stream's advantage; empty: all."""
    gamma_step: float = 1.0
    lam_step: float = 1.0
    """Discount and lambda from the last token of a step to the next step of the same turn; inside a step both are 1."""
    gamma_substep: float | None = None
    lam_substep: float | None = None
    """The same between two sub-steps that refine one step. None: as between steps."""
    gamma_turn: float = 0.99
    lam_turn: float = 0.95
    """Discount and lambda from the last token of a turn to the next turn."""
    gamma_token: float = 1.0
    lam_token: float = 1.0
    whiten: bool = True

    def __post_init__(self) -> None:
        _require(bool(self.sources), "sources", self.sources, "at least one part, such as outcome")
        _require(0 < self.reward_scale < math.inf, "reward_scale", self.reward_scale, "above 0, finite")
        for name in ("fade_until", "gamma_step", "lam_step", "gamma_turn", "lam_turn", "gamma_token", "lam_token"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "0 to 1")
        for name in ("gamma_substep", "lam_substep"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= 1, name, value, "0 to 1, or null")

    def weight_at(self, progress: float) -> float:
        """The weight when this share of the training, in [0, 1], is done."""
        if not self.fade_until:
            return self.weight
        return self.weight * max(0.0, 1.0 - progress / self.fade_until)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Earlier dialogues in later batches. docs/experience.md says what it costs and what corrects it."""

    share: float = 0.0
    """Most that replayed dialogues may make up of a batch, in [0, 0.75]. 0: no buffer."""
    capacity: int = 4096
    """Dialogues kept, over all ranks; the oldest leave first."""
    max_age: int = 5
    """Policy versions after which a dialogue is no longer drawn, 1 or more."""
    priority: Literal["error", "success", "weights", "uniform"] = "error"
    """`error`: mean absolute error of the critic at the last draw. `success`: successes twice as often as the others.
    `weights`: mean weight of the steps, when weights are used in the sampler. `uniform`: all alike."""
    max_draws: int = 0
    """Draws after which a dialogue leaves the buffer. 0: no such limit."""
    overrides: str = ""
    """JSONL file in which reviewers change the reward of a dialogue while the run goes on. Empty: none."""

    def __post_init__(self) -> None:
        _require(0 <= self.share <= 0.75, "share", self.share, "0 to 0.75")
        for name in ("capacity", "max_age"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(self.max_draws >= 0, "max_draws", self.max_draws, "0 or more")
        _require(self.share > 0 or not self.overrides, "overrides", self.overrides, "none while share is 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """Lambda, the weight of a step: which augmenters say it, how it is shaped, and where it acts."""

    sources: tuple[str, ...] = ()
    """Augmenters whose weights are multiplied. Empty: every step weighs 1."""
    use: tuple[Literal["loss", "sampler"], ...] = ("loss",)
    """`loss`: multiplies the policy loss of the step's tokens. `sampler`: is a trajectory's priority in replay. Both
    at once would count it squared and are refused."""
    power: float = 0.6
    """In the loss: weights are raised to it before they are brought to mean 1; in [0, 1]."""
    temperature: float = 0.0
    """In the loss: above 0, softmax of weight / temperature over the trajectory takes the place of the power."""
    floor: float = 0.1
    """The least raw weight, 0 or above: no step is forgotten."""
    clip: tuple[float, float] = (0.5, 2.0)
    """Least and largest weight in the loss after it was brought to mean 1; 0 to 1, and 1 or above."""

    def __post_init__(self) -> None:
        _require(len(set(self.sources)) == len(self.sources), "sources", self.sources, "each name once")
        _require(bool(self.use), "use", self.use, "loss or sampler")
        _require(0 <= self.power <= 1, "power", self.power, "0 to 1")
        _require(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 or above")
        _require(0 <= self.floor < math.inf, "floor", self.floor, "0 or above")
        low, high = self.clip
        _require(0 <= low <= 1 <= high < math.inf, "clip", self.clip, "0 to 1, then 1 or above")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    iterations: int = 50
    """Rounds of rollout and update."""
    epochs: int = 2
    """Passes over the dialogues of an iteration."""
    minibatch: int = 16
    """Trajectories of one update, over all ranks; divides the episodes of an iteration."""
    microbatch: int = 16
    """Trajectories of one forward pass on one rank."""
    proximal: Literal["trainer", "sampler"] = "trainer"
    """Whose log-probabilities PPO's ratio starts from. `trainer`: a pass over the dialogues before the updates of every
    iteration. `sampler`: those that the sampler gave, which saves the pass; without critic and reference only."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-5
    critic_learning_rate: float = 1e-4
    weight_decay: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    """Updates over which the learning rate rises from 0."""
    critic_warmup_iterations: int = 0
    """First iterations in which only the critic is updated."""
    max_grad_norm: float = 1.0
    """Clip of the policy's and of the critic's gradient norm, each on its own. 0: no clip."""
    target_kl: float = 0.03
    """Mean k3 to the proximal policy above which the rest of the iteration's policy updates are left out. 0: never."""
    precision: Literal["no", "bf16"] = "no"
    """Autocast of forward passes."""
    save_every: int = 0
    """Iterations between checkpoints. 0: only at the end."""
    keep_checkpoints: int = 2
    trackers: tuple[str, ...] = ()
    """Names of experiment trackers as transformers and accelerate spell them; none by default."""

    def __post_init__(self) -> None:
        for name in ("iterations", "epochs", "minibatch", "microbatch", "keep_checkpoints"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in (
            "learning_rate",
            "critic_learning_rate",
            "weight_decay",
            "warmup_updates",
            "critic_warmup_iterations",
            "max_grad_norm",
            "target_kl",
            "save_every",
        ):
            _require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "0 or more, finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    tasks: int = 256
    """Size of the fixed panel of unseen tasks. 0: no evaluation."""
    panel_seed: int = 1_000_000
    """First task seed of the panel; training seeds stay below it."""
    temperature: float = 1.0
    """0: greedy."""
    every: int = 0
    """Iterations between evaluations. 0: before the first and after the last only."""

    def __post_init__(self) -> None:
        for name in ("tasks", "panel_seed", "temperature", "every"):
            _require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "0 or more, finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySettings:
    """A model made from nothing: a Llama with random weights and a tokenizer trained on scripted dialogues."""

    hidden: int = 128
    layers: int = 2
    heads: int = 2
    """Each of size 64, which engines serve on every device, whatever the width."""
    vocab_size: int = 2048

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(self.vocab_size >= 300, "vocab_size", self.vocab_size, "300 or more (256 bytes and control tokens)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    dialogues: int = 0
    """Scripted dialogues to imitate before training. 0: no warm start."""
    output: str = "runs/warm-start"
    """Folder of the warm-started model or adapter, which `model.base` or `model.adapter` of the training names."""
    from_scratch: TinySettings | None = None
    """Make a tiny model first and warm-start that; None: start from `model.base`."""
    error_rate: float = 0.0
    """Share of replies in which the scripted expert errs, in [0, 1]."""
    epochs: int = 1
    batch: int = 32
    learning_rate: float = 1e-3
    lora: bool = False
    """Train an adapter instead of all weights; it becomes the reference of the run."""

    def __post_init__(self) -> None:
        _require(self.dialogues >= 0, "dialogues", self.dialogues, "0 or more")
        _require(0 <= self.error_rate <= 1, "error_rate", self.error_rate, "0 to 1")
        for name in ("epochs", "batch"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "above 0, finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    form: Literal["adapter", "merged", "both"] = "adapter"
    probes: int = 8
    """Prompts on which trainer, reload, merged weights and engine are compared."""
    verify_engine: bool = True
    """Also compare with the engine named under `generation`."""

    def __post_init__(self) -> None:
        _require(self.probes >= 1, "probes", self.probes, "1 or more")
