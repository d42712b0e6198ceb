"""A causal language model that judges prefixes of a dialogue: LoRA on a frozen base, two numbers at a step's end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from slea_llm.errors import ConfigError, EvaluatorError, TemplateError
from slea_llm.models import adapters as lora
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import check_vocabulary, load_base, load_stop_ids, load_tokenizer
from slea_llm.settings import ModelSettings
from slea_llm.types import Message, Step, Trajectory, Turn

ADAPTER = "reward"
_SILENCE = Message(role="user", content="")
HEADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A dialogue as tokens. `places[k]` is the index of the last token of prefix k: 0 before the first step, k + 1 the
    one that ends with step k. Only the first places are there when the dialogue is longer than was allowed; what
    follows the last one is left out of `ids`. `beyond` counts the places that are missing.
    """

    ids: tuple[int, ...]
    places: tuple[int, ...]
    beyond: int = 0

    def __len__(self) -> int:
        return len(self.ids)


def row_of(chat: ChatTokenizer, trajectory: Trajectory, leaves: Sequence[Step], *, longest: int) -> Row:
    """The tokens of a dialogue through the model's own chat template, each step encoded alone.

    The place of a step is known from how many ids its text became, so no marker is looked for among them. The end of
    turn belongs to the last step of a reply that ended by itself. An agent that speaks first answers an empty message
    of the user, since no template opens with nothing. Raises EvaluatorError when the steps are not those of the turns,
    TemplateError when the template refuses the dialogue.
    """
    by_turn: dict[int, list[Step]] = {}
    for step in leaves:
        by_turn.setdefault(step.turn, []).append(step)
    ids: list[int] = []
    places: list[int] = []
    for turn in trajectory.turns:
        context = [_as_text(message) for message in turn.context]
        ids += chat.extend(ids, context) if ids else chat.prompt(context or [_SILENCE])
        if not places:
            places.append(len(ids) - 1)
        texts = _texts(trajectory, turn, by_turn.pop(turn.index, []))
        for piece in chat.encode_pieces(texts):
            ids += piece
            places.append(len(ids) - 1)
        if turn.finish_reason == "stop":
            ids.append(chat.end_of_turn.id)
            places[-1] += bool(texts)
    if by_turn:
        raise EvaluatorError(f"trajectory {trajectory.id!r} has no turn {min(by_turn)}, of which a step was given")
    kept = [place for place in places if place < longest]
    return Row(ids=tuple(ids[: kept[-1] + 1] if kept else ()), places=tuple(kept), beyond=len(places) - len(kept))


def _texts(trajectory: Trajectory, turn: Turn, steps: Sequence[Step]) -> list[str]:
    texts = [step.text for step in steps]
    if steps and "".join(texts) != turn.text:
        raise EvaluatorError(
            f"trajectory {trajectory.id!r}, turn {turn.index}: its steps do not make up its text, {turn.text[:60]!r}"
        )
    return texts


def _as_text(message: Message) -> Message:
    """Structured calls written out as an agent samples them."""
    if not message.tool_calls:
        return message
    calls = "".join(
        f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'
        for call in message.tool_calls
    )
    return replace(message, content=message.content + calls, tool_calls=())


class StepReader(nn.Module):
    """`forward(rows)` gives (B, P, 2) float32: logits of the step label and of success at every place, P the most
    places of a row. Entries beyond a row's own places are 0.

    Only the adapter and the heads train. Rows are padded on the right and masked by length, so a padding id that is
    also a real token hides nothing, and the read place is an index into the row, whatever else is in the batch.
    """

    def __init__(self, base: PreTrainedModel, *, rank: int, alpha: int, seed: int) -> None:
        super().__init__()
        config = lora.lora_config(rank=rank, alpha=alpha, targets="all-linear")
        self._adapters = lora.Adapters(base, config, name=ADAPTER, dtype=torch.float32, seed=seed)
        self._adapters.freeze_all_but(ADAPTER)
        self.base = self._adapters.model
        self.width = int(base.get_input_embeddings().weight.shape[1])
        # The size of states differs by orders of magnitude between bases; the heads see them at one size.
        self.norm = nn.LayerNorm(self.width, elementwise_affine=False)
        self.heads = nn.Linear(self.width, HEADS)
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)
        self._fresh = self.tensors()

    @property
    def device(self) -> torch.device:
        return self.heads.weight.device

    def forward(self, rows: Sequence[Row]) -> torch.Tensor:
        logits: torch.Tensor = self.heads(self.states(rows)) * self._real(rows)
        return logits

    def states(self, rows: Sequence[Row]) -> torch.Tensor:
        """(B, P, width) float32: what the heads see at every place."""
        longest, most = max(map(len, rows)), max(len(row.places) for row in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.long)
        places = torch.zeros((len(rows), most), dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row.ids)
            mask[index, : len(row)] = 1
            places[index, : len(row.places)] = torch.tensor(row.places)
        decoder: Any = self.base.base_model.model.get_decoder()
        hidden = decoder(
            input_ids=ids.to(self.device), attention_mask=mask.to(self.device), use_cache=False
        ).last_hidden_state
        chosen = places.to(self.device).unsqueeze(-1).expand(-1, -1, self.width)
        states: torch.Tensor = self.norm(hidden.gather(1, chosen).float())
        return states

    def _real(self, rows: Sequence[Row]) -> torch.Tensor:
        counts = torch.tensor([len(row.places) for row in rows], device=self.device)
        return (torch.arange(int(counts.max()), device=self.device) < counts[:, None]).unsqueeze(-1)

    def adapter_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._adapters.parameters(ADAPTER)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that was trained, whole, on the CPU, copied."""
        found = {f"adapter.{key}": tensor.clone() for key, tensor in self._adapters.tensors(ADAPTER).items()}
        return found | {
            f"heads.{key}": tensor.detach().cpu().clone() for key, tensor in self.heads.state_dict().items()
        }

    def load(self, tensors: Mapping[str, torch.Tensor], *, source: str) -> None:
        """Take over what `tensors` gave. Raises CheckpointError unless names and shapes are exactly those."""
        own: dict[str, torch.Tensor] = {
            f"adapter.{key}": parameter for key, parameter in self._adapters.parameters(ADAPTER)
        }
        own |= {f"heads.{key}": tensor for key, tensor in self.heads.state_dict().items()}
        lora.copy_into(own, tensors, source=source)

    def reset(self) -> None:
        """Back to the untrained state: it reads the bare base, and says 0 everywhere."""
        self.load(self._fresh, source="the untrained reader")


def batches(rows: Sequence[Row], tokens: int) -> Iterator[list[int]]:
    """Numbers of rows of like length, at most `tokens` padded tokens a batch (one row is always let through)."""
    order = sorted((index for index, row in enumerate(rows) if row.places), key=lambda index: (len(rows[index]), index))
    batch: list[int] = []
    for index in order:
        if batch and len(rows[index]) * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A reader with its tokenizer; `longest`: tokens that it may read at once."""

    reader: StepReader
    chat: ChatTokenizer
    longest: int


def open_reader(settings: ModelSettings, *, longest: int, seed: int = 0, device: str = "auto") -> Opened:
    """Load base and tokenizer, and check the template.

    Raises ConfigError for what cannot be loaded, for more tokens than the model has positions and for an unknown
    device, TemplateError when the template rewrites earlier messages.
    """
    if longest < 2:
        raise ConfigError(f"{longest} tokens hold no dialogue; give 2 or more")
    tokenizer = load_tokenizer(settings)
    chat = ChatTokenizer(tokenizer, stop_ids=load_stop_ids(settings))
    try:
        chat.check(system=False)
    except TemplateError as error:
        raise TemplateError(f"{settings.base!r} cannot read dialogues as one growing row: {error}") from error
    with torch.random.fork_rng(devices=[]):
        base = load_base(settings)
        check_vocabulary(tokenizer, base)
        positions = getattr(base.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and longest > positions:
            raise ConfigError(f"{longest} tokens are more than the {positions} positions of {settings.base!r}")
        reader = StepReader(base, rank=settings.lora_rank, alpha=settings.lora_alpha, seed=seed)
    return Opened(reader=reader.to(_device(device)), chat=chat, longest=longest)


PROBED = 16
"""Coordinates of the state that `probe` gives; each is of size 1."""


@torch.inference_mode()
def probe(opened: Opened) -> list[float]:
    """Part of the state at the end of a fixed short dialogue: another base, tokenizer, template or adapter moves it."""
    chat = opened.chat
    ids = (*chat.prompt([Message(role="user", content="Is it 12 o'clock? 好吗?")]), *chat.encode_reply("Yes, it is."))
    states = opened.reader.states([Row(ids=ids, places=(len(ids) - 1,))])
    return [round(float(one), 4) for one in states[0, 0, :PROBED]]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {name!r} is not to be had here: {error}; auto takes a GPU when there is one"
        ) from error
    return device
