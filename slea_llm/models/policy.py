"""Policy, critic and reference on one frozen base model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slea_llm.errors import ConfigError
from slea_llm.models import adapters as lora
from slea_llm.models.adapters import Adapters
from slea_llm.models.llama_blocks import Shape, blocks_of, decode, small_shape
from slea_llm.models.loading import check_vocabulary, load_base, load_tokenizer, trained_dtype
from slea_llm.models.packing import Layout, attend_by_rows
from slea_llm.models.token_logprobs import project_logprobs
from slea_llm.settings import ModelSettings
from slea_llm.tensors import Batch, ModelOutputs

POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"


class PolicyCritic(nn.Module):
    """A frozen base with a LoRA adapter for the policy, perhaps one for the critic, and perhaps a value head a stream.

    One `forward` serves policy and critic, so that data-parallel wrappers see every trainable parameter used once an
    update. Logits are made only where a loss reads them. Heads start at zero: the first values are 0.

    The reference is the policy that training started from: the bare base when the policy's adapter is fresh, a frozen
    copy of the starting adapter otherwise. Rows must be padded on the right.
    """

    def __init__(
        self, base: PreTrainedModel, settings: ModelSettings, *, streams: Sequence[str], temperature: float, seed: int
    ) -> None:
        super().__init__()
        self.settings = settings
        self.streams = tuple(streams)
        self.temperature = temperature
        self.dtype = trained_dtype(settings)
        self._adapters = _make_adapters(base, settings, dtype=self.dtype, seed=seed)
        self.model = self._adapters.model
        width = int(base.get_output_embeddings().in_features)
        device = base.get_output_embeddings().weight.device
        headed = self.streams if settings.critic != "none" else ()
        self._heads: dict[str, nn.Linear] = {name: _zero_head(width, self.dtype, device) for name in headed}
        self.value_heads = nn.ModuleDict(self._heads)
        if settings.gradient_checkpointing:
            base.gradient_checkpointing_enable(
                {"use_reentrant": False, "context_fn": self._adapters.checkpoint_contexts}
            )
            base.disable_input_require_grads()  # only reentrant checkpoints need it; it costs a backward pass more
        self.train()  # transformers checkpoints in training mode only, which changes nothing else: no dropout is left
        self._plain = not _shortcut_is_exact(base)
        if self._plain:
            warnings.warn(
                f"{type(base).__name__} changes its logits after the output layer or reads its padding: every logit "
                "of every position will be computed, which is slower and takes more memory",
                stacklevel=2,
            )
        self._packs = not self._plain and attend_by_rows(base)
        self._shape = self._small_shape()

    @property
    def base_name(self) -> str:
        """The name that exported adapters give as their base."""
        return self.settings.declared_base or self.settings.base

    def forward(self, batch: Batch) -> ModelOutputs:
        """Log-probabilities and entropies under the policy and imitation masks, values under the value mask."""
        rows = self._rows(batch.input_ids, batch.attention_mask)
        chosen = batch.policy_mask | batch.imitation_mask
        policy, read = self._policy_and_values(rows, rows.before(chosen), rows.before(batch.value_mask))
        logprobs, entropy = self._chosen_logprobs(policy, rows.ids, chosen)
        empty = torch.zeros((*rows.ids.shape, len(self.streams)), dtype=self.dtype, device=rows.ids.device)
        values = empty.masked_scatter(batch.value_mask.unsqueeze(-1), read)
        return ModelOutputs(logprobs=logprobs, entropy=entropy, values=values)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """The reference's log-probabilities (B, T) where the policy or imitation mask is true, 0 elsewhere."""
        chosen = batch.policy_mask | batch.imitation_mask
        return self.reference_pass(batch.input_ids, batch.attention_mask, chosen)

    @torch.no_grad()
    def reference_pass(self, ids: torch.Tensor, attention_mask: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The reference's log-probabilities (B, T) of the chosen tokens, 0 elsewhere."""
        name = REFERENCE if self.settings.adapter else None
        rows = self._rows(ids, attention_mask)
        return self._chosen_logprobs(self._states(rows, name, rows.before(chosen)), rows.ids, chosen)[0]

    @torch.no_grad()
    def policy_pass(
        self, ids: torch.Tensor, attention_mask: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (B, T) of the chosen tokens, and the value *after* every attended token (B, T, S)."""
        rows = self._rows(ids, attention_mask)
        policy, values = self._policy_and_values(rows, rows.before(chosen), None)
        logprobs, _ = self._chosen_logprobs(policy, ids, chosen)
        return logprobs, rows.spread(values)

    def policy_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that the policy's losses train."""
        return [(f"{POLICY}.{key}", parameter) for key, parameter in self._adapters.parameters(POLICY)]

    def critic_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of what only the value loss trains: the critic's adapter (if it has one) and the heads."""
        heads = [(f"value_head.{name}.weight", head.get_parameter("weight")) for name, head in self._heads.items()]
        if self.settings.critic != "own_adapter":
            return heads
        return [(f"{CRITIC}.{key}", parameter) for key, parameter in self._adapters.parameters(CRITIC)] + heads

    def save_adapter(self, folder: Path) -> Path:
        """Write the policy's adapter in PEFT layout (no critic, no heads); equal weights give equal bytes.

        With sharded parameters every rank must call.
        """
        return self._adapters.save(folder, name=POLICY, base=self.base_name, revision=self.settings.revision)

    def merged_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Hugging Face names and tensors of the policy with its adapter merged in, in the base's type.

        The live weights stay as they are; those that carry no adapter are handed out without a copy.
        """
        return self._adapters.merged(POLICY)

    def trainable_state(self) -> dict[str, torch.Tensor]:
        """Everything that is not the base: adapters (the frozen reference too) and heads, whole, on the CPU, copied."""
        return {key: lora.whole(tensor).cpu().clone() for key, tensor in self._state_parameters().items()}

    def load_trainable_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `trainable_state` gave. Raises CheckpointError, before any change, if one is missing or odd.

        A head that a checkpoint lacks is an error, never a fresh head.
        """
        lora.copy_into(self._state_parameters(), state, source="the checkpoint")

    def _state_parameters(self) -> dict[str, torch.Tensor]:
        parameters: dict[str, torch.Tensor] = dict(self.policy_parameters() + self.critic_parameters())
        if self.settings.adapter:
            parameters |= {f"{REFERENCE}.{key}": tensor for key, tensor in self._adapters.parameters(REFERENCE)}
        return parameters

    @property
    def _base(self) -> Any:
        return self.model.base_model.model

    def _policy_and_values(
        self, rows: _Rows, told: torch.Tensor, valued: torch.Tensor | None
    ) -> tuple[_States, torch.Tensor]:
        """The policy's states at the places `told`, and the values (n, S) of those `valued` (None: of all tokens)."""
        if self.settings.critic == "shared_trunk":
            both = self._states(rows, POLICY)
            return both.at(told), self._values(both.hidden if valued is None else both.at(valued).hidden)
        policy = self._states(rows, POLICY, told)
        if self.settings.critic == "own_adapter":
            return policy, self._values(self._states(rows, CRITIC, valued).hidden)
        count = rows.tokens if valued is None else len(valued)
        return policy, torch.zeros((count, len(self.streams)), dtype=self.dtype, device=rows.ids.device)

    def _rows(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> _Rows:
        # A GPU would wait for a kernel per row; a CPU only saves the padding.
        packs = self._packs and ids.device.type == "cpu"
        return _Rows(ids, attention_mask, Layout.of(attention_mask) if packs else None)

    def _states(self, rows: _Rows, adapter: str | None, at: torch.Tensor | None = None) -> _States:
        """The decoder's last states of all tokens, or of those at these places."""
        with self._adapters.active(adapter):
            if rows.layout is not None and self._shape is not None and self._blocks_serve():
                decoder = self._base.get_decoder()
                blocks = blocks_of(decoder, self._adapters.added)
                return _States(decode(decoder, self._shape, blocks, rows.ids, rows.layout, at), None)
            states = self._states_by_modules(rows)
        return states if at is None else states.at(at)

    def _states_by_modules(self, rows: _Rows) -> _States:
        if self._plain:
            output = self._base(
                input_ids=rows.ids, attention_mask=rows.attention_mask, use_cache=False, output_hidden_states=True
            )
            return _States(output.hidden_states[-1].flatten(0, 1), output.logits.flatten(0, 1))
        # Padding is on the right and attention is causal, so that no real token ever sees it: without a mask the
        # attention kernel takes its causal shortcut.
        given = {"input_ids": rows.ids} if rows.layout is None else rows.layout.arguments(rows.ids)
        return _States(self._base.get_decoder()(**given, use_cache=False).last_hidden_state.flatten(0, 1), None)

    def _blocks_serve(self) -> bool:
        return not self._adapters.sharded and not torch.is_autocast_enabled("cpu")

    def _small_shape(self) -> Shape | None:
        """The decoder's sizes where it may be run by `llama_blocks` and gives the same states; None elsewhere."""
        if not self._packs or self.settings.gradient_checkpointing or not self._adapters.addable():
            return None
        return small_shape(self._base, self._adapters.added)

    def _chosen_logprobs(
        self, states: _States, ids: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (B, T) of the chosen tokens from the states that predict them."""
        head = self._base.get_output_embeddings()
        logprobs, entropy = project_logprobs(
            states.hidden if states.logits is None else states.logits,
            ids[chosen],
            head=head if states.logits is None else nn.Identity(),
            vocabulary=head.out_features,
            temperature=self.temperature,
            dtype=self.dtype,
        )
        empty = torch.zeros(ids.shape, dtype=self.dtype, device=ids.device)
        return empty.masked_scatter(chosen, logprobs), empty.masked_scatter(chosen, entropy)

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        # Values are regression targets of any size: bfloat16's three digits are too few, whatever autocast says.
        with torch.autocast(hidden.device.type, enabled=False):
            states = hidden.to(self.dtype)
            return torch.cat([head(states) for head in self._heads.values()], dim=-1)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Right-padded rows (B, T) on their way through the decoder, without their padding where there is a layout."""

    ids: torch.Tensor
    attention_mask: torch.Tensor
    layout: Layout | None

    @property
    def tokens(self) -> int:
        """How many states there are."""
        return self.ids.numel() if self.layout is None else len(self.layout.places)

    def before(self, mask: torch.Tensor) -> torch.Tensor:
        """Where the states are that predict the tokens of a mask (B, T), in their order."""
        # The state that predicts token t is that of token t - 1, in the same row.
        before = mask.flatten().nonzero().squeeze(1) - 1
        return before if self.layout is None else self.layout.index[before]

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) of values in the order of the states, 0 where there is none."""
        if self.layout is not None:
            empty = values.new_zeros(self.ids.numel(), *values.shape[1:])
            values = empty.index_copy(0, self.layout.places, values)
        return values.view(*self.ids.shape, *values.shape[1:])


@dataclass(frozen=True, slots=True)
class _States:
    """What the decoder gave: (n, H), and (n, V) where the model has to make its logits itself."""

    hidden: torch.Tensor
    logits: torch.Tensor | None

    def at(self, places: torch.Tensor) -> _States:
        logits = None if self.logits is None else self.logits.index_select(0, places)
        return _States(self.hidden.index_select(0, places), logits)


def build(settings: ModelSettings, *, streams: Sequence[str], temperature: float, seed: int) -> PolicyCritic:
    """Load the base, put adapters and heads on it, and check that its tokenizer fits.

    Equal settings and seed give equal weights. Raises ConfigError for everything the base or the adapter cannot do.
    """
    if not streams:
        raise ConfigError("a policy needs at least one reward stream; name one under `streams`")
    odd = [name for name in streams if "." in name or not name]
    if odd or len(set(streams)) != len(streams):
        raise ConfigError(f"stream names {list(streams)} must be distinct, not empty and without a dot")
    if temperature <= 0:
        raise ConfigError(f"temperature {temperature} is not above 0")
    with torch.random.fork_rng(devices=[]):  # modules draw from the global generator when made; nobody else notices
        base = load_base(settings)
        check_vocabulary(load_tokenizer(settings), base)
        return PolicyCritic(base, settings, streams=streams, temperature=temperature, seed=seed)


def _make_adapters(base: PreTrainedModel, settings: ModelSettings, *, dtype: torch.dtype, seed: int) -> Adapters:
    tensors: dict[str, torch.Tensor] = {}
    config = lora.fresh_config(settings)
    if settings.adapter:
        config, tensors = lora.read_adapter(settings)
    try:
        adapters = Adapters(base, config, name=POLICY, dtype=dtype, seed=seed)
    except ValueError as error:
        raise ConfigError(f"model.lora_targets {settings.lora_targets!r} fit no module: {error}") from error
    lora.check_targets(adapters, config, base)
    targets = adapters.target_modules
    if settings.adapter:
        adapters.load(tensors, name=POLICY, source=f"the adapter in {settings.adapter!r}")
        adapters.add(lora.lora_config(rank=config.r, alpha=config.lora_alpha, targets=targets), name=REFERENCE)
        adapters.load(tensors, name=REFERENCE, source=f"the adapter in {settings.adapter!r}")
    trained = [POLICY]
    if settings.critic == "own_adapter":
        rank = settings.critic_rank
        adapters.add(lora.lora_config(rank=rank, alpha=2 * rank, targets=targets), name=CRITIC)
        trained.append(CRITIC)
    adapters.freeze_all_but(*trained)
    return adapters


def _zero_head(width: int, dtype: torch.dtype, device: torch.device) -> nn.Linear:
    head = nn.Linear(width, 1, bias=False, dtype=dtype, device=device)
    nn.init.zeros_(head.weight)
    return head


@torch.no_grad()
def _shortcut_is_exact(base: PreTrainedModel) -> bool:
    """Whether hidden states without a mask, then the output layer, give the model's own logits of a padded batch.

    They do not where logits are capped or scaled after the output layer, or where attention is not causal.
    """
    device = base.get_output_embeddings().weight.device
    length, padding = 12, 5
    ids = torch.arange(2 * length, device=device).view(2, length) % base.get_input_embeddings().num_embeddings
    mask = torch.ones_like(ids)
    mask[1, -padding:] = 0
    logits = base(input_ids=ids, attention_mask=mask, use_cache=False).logits
    decoder, head = base.get_decoder(), base.get_output_embeddings()
    same_states = head(decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state)
    without_mask = head(decoder(input_ids=ids, use_cache=False).last_hidden_state)
    real = mask.bool()
    scale = logits[real].abs().max() * torch.finfo(logits.dtype).eps
    exact = (logits - same_states)[real].abs().max() <= 4 * scale
    causal = (logits - without_mask)[real].abs().max() <= 256 * scale
    return bool(exact) and bool(causal)
