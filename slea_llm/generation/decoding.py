"""Continuous batched decoding with a Hugging Face model: rows join and leave between steps, each at its own position.

Column t of a row holds position t, so rows of unequal length need no left padding, and what a dialogue has computed in
earlier turns is taken over as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from slea_llm.generation.forward import Forward
from slea_llm.generation.noise import uniforms
from slea_llm.types import GenerationRequest

LayerStates = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""Keys and values of one dialogue by layer, each of shape (heads, positions, size)."""

# A prefill group holds rows whose new tokens differ by no more than this factor (plus a constant): padding costs time.
GROUP_FACTOR = 2
GROUP_SLACK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a row sampled. `states` covers every token but the last, whose keys and values are not computed yet."""

    number: int
    request: GenerationRequest
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    states: LayerStates


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values, shape (rows, heads, columns, size). `rows` and `columns` say where to write next."""

    def __init__(self, shared: RowCache) -> None:
        super().__init__()
        self.shared = shared

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the shared capacity; sizes are known from the first states of this layer."""
        rows, columns = self.shared.shape
        for name, states in (("keys", key_states), ("values", value_states)):
            _, heads, _, size = states.shape
            setattr(self, name, states.new_zeros(rows, heads, columns, size))
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write states of shape (b, heads, q, size) and return what these rows may see: (b, heads, width, size)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        shared = self.shared
        self.keys[shared.rows[:, None], :, shared.columns] = key_states.transpose(1, 2)
        self.values[shared.rows[:, None], :, shared.columns] = value_states.transpose(1, 2)
        if shared.whole:  # a view; a choice of rows is a copy
            return self.keys[:, :, : shared.width], self.values[:, :, : shared.width]
        return self.keys[shared.rows, :, : shared.width], self.values[shared.rows, :, : shared.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        return self.shared.width, 0

    def get_seq_length(self) -> int:
        return self.shared.width

    def get_max_length(self) -> int:
        return self.shared.shape[1]


class RowCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Where the next forward pass writes and what it sees, shared by all layers."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[RowLayer(self) for _ in range(layers)])
        self.shape = (0, 0)
        self.rows = torch.zeros(0, dtype=torch.long)
        self.columns = torch.zeros(0, 0, dtype=torch.long)
        self.width = 0
        self.whole = False

    def point(self, rows: torch.Tensor, columns: torch.Tensor, *, width: int) -> None:
        """Set where to write, columns of shape (len(rows), queries), and how many columns are seen. Rows ascend."""
        self.rows, self.columns, self.width = rows, columns, width
        self.whole = len(rows) == self.shape[0]

    def rearrange(self, keep: torch.Tensor, added: int, columns: int, *, used: int) -> None:
        """Keep the first `used` columns of these rows in this order, add empty rows, make room for so many columns."""
        rows = len(keep) + added
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros(rows, old.shape[1], columns, old.shape[3])
                new[: len(keep), :, :used] = old[keep, :, :used]
                setattr(layer, name, new)
        self.shape = (rows, columns)

    def take(self, row: int, length: int) -> LayerStates:
        """Copies of the first positions of a row."""
        return tuple(
            (layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone()) for layer in self.layers
        )

    def put(self, row: int, states: LayerStates, length: int) -> None:
        """Write the first positions of a row."""
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.keys[row, :, :length] = keys[:, :length]
            layer.values[row, :, :length] = values[:, :length]


class DialogueStates:
    """Keys and values of dialogues between their turns, the least recently used dropped above a size in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0
        self._kept: OrderedDict[tuple[int, ...], tuple[tuple[int, ...], LayerStates]] = OrderedDict()

    def keep(self, key: tuple[int, ...], ids: tuple[int, ...], states: LayerStates) -> None:
        """Keep the states of these ids for the dialogue of this key."""
        self._drop(key)
        size = _bytes(states)
        if size > self._limit:
            return
        self._kept[key] = (ids, states)
        self._size += size
        while self._size > self._limit:
            self._drop(next(iter(self._kept)))

    def match(self, key: tuple[int, ...], prompt: tuple[int, ...]) -> tuple[int, LayerStates]:
        """How many leading tokens of the prompt are kept for this dialogue (0: none), and their states."""
        if key not in self._kept:
            return 0, ()
        self._kept.move_to_end(key)
        ids, states = self._kept[key]
        length = min(len(ids), len(prompt) - 1)
        if ids[:length] != prompt[:length]:
            length = next(index for index, (a, b) in enumerate(zip(ids, prompt, strict=False)) if a != b)
        return length, states

    def clear(self) -> None:
        """Forget everything: other weights give other states."""
        self._kept.clear()
        self._size = 0

    def _drop(self, key: tuple[int, ...]) -> None:
        if key in self._kept:
            self._size -= _bytes(self._kept.pop(key)[1])


class DecodingBatch:
    """The rows that are being decoded. Not thread-safe; one caller at a time."""

    def __init__(
        self,
        forward: Forward,
        device: torch.device,
        *,
        temperature: float,
        stop_ids: frozenset[int],
        vocab_size: int,
        layers: int,
    ) -> None:
        self._forward = forward
        self._device = device
        self._cache = RowCache(layers)
        self._temperature = temperature
        self._stops = torch.zeros(vocab_size, dtype=torch.bool, device=self._device)
        self._stops[sorted(stop_ids)] = True
        self._jobs: list[tuple[int, GenerationRequest]] = []
        self._alive = self._long([])
        self._reset()

    def _reset(self) -> None:
        """Per row: last token, its position, tokens sampled so far, their limit, whether it still samples."""
        self._last, self._position, self._count, self._limit = (self._long([]) for _ in range(4))
        self._alive = self._stopped = self._greedy = torch.zeros(0, dtype=torch.bool, device=self._device)
        self._noise = torch.zeros(0, 0, dtype=torch.float64, device=self._device)
        self._tokens = torch.zeros(0, 0, dtype=torch.long, device=self._device)
        self._logprobs = torch.zeros(0, 0, dtype=torch.float64, device=self._device)

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def finished(self) -> int:
        """Rows that are done and still here."""
        return len(self._jobs) - int(self._alive.sum())

    def admit(self, jobs: Sequence[tuple[int, GenerationRequest]], states: DialogueStates) -> None:
        """Add rows and compute what their prompts need beyond what is kept; the last prompt token is left to `step`."""
        if not jobs:
            return
        old = len(self._jobs)
        requests = [request for _, request in jobs]
        matches = [states.match(request.key[:-1], request.prompt_ids) for request in requests]
        width = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        longest = max(len(r.prompt_ids) - 1 - length for r, (length, _) in zip(requests, matches, strict=True))
        columns = max(self._cache.shape[1] if old else 0, width + longest)  # right-padded prefill overshoots
        self._cache.rearrange(torch.arange(old, device=self._device), len(jobs), columns, used=self._used())
        for row, (length, kept) in enumerate(matches, start=old):
            if length:
                self._cache.put(row, kept, length)
        self._jobs.extend(jobs)
        self._append_rows(requests)
        self._prefill(old, requests, [length for length, _ in matches])

    @torch.inference_mode()
    def step(self) -> None:
        """Sample one token in every row that is not done."""
        positions = self._position[:, None]
        width = int(self._position.max()) + 1
        every = torch.arange(max(width, len(self._jobs)), device=self._device)
        self._cache.point(every[: len(self._jobs)], positions, width=width)
        seen = every[:width] <= positions
        logits = self._forward.logits(self._last[:, None], positions, seen[:, None], self._cache)
        place, alive = self._count[:, None], self._alive
        tokens, logprobs = sample(logits, self._noise.gather(1, place), self._greedy, self._temperature)
        self._last = torch.where(alive, tokens, self._last)  # of a finished row what stands at its place already
        self._tokens.scatter_(1, place, self._last[:, None])
        self._logprobs.scatter_(1, place, torch.where(alive, logprobs, self._logprobs.gather(1, place)[:, 0])[:, None])
        self._stopped = self._stopped | (alive & self._stops[tokens])
        count = self._count + alive
        self._alive = alive & ~self._stopped & (count < self._limit)
        # A finished row stays for a while: it keeps its count and writes its last token, each time the same, to the
        # column after all that it has computed.
        self._count = torch.where(self._alive, count, self._count)
        self._position = self._position + alive

    def retire(self, stopped: frozenset[int] = frozenset()) -> list[Reply]:
        """Take finished rows out and return them; rows of these numbers are dropped without a reply."""
        alive = self._alive.tolist()
        keep = [row for row, (number, _) in enumerate(self._jobs) if alive[row] and number not in stopped]
        replies = [
            self._reply(row) for row, (number, _) in enumerate(self._jobs) if not alive[row] and number not in stopped
        ]
        if len(keep) == len(self._jobs):
            return replies
        self._jobs = [self._jobs[row] for row in keep]
        index = self._long(keep)
        self._cache.rearrange(index, 0, self._cache.shape[1], used=self._used())
        for name in ("_last", "_position", "_count", "_limit", "_alive", "_stopped", "_greedy"):
            setattr(self, name, getattr(self, name)[index])
        for name in ("_noise", "_tokens", "_logprobs"):
            setattr(self, name, getattr(self, name)[index])
        return replies

    def _used(self) -> int:
        """Columns that any row has written and may yet see."""
        return int(self._position.max()) + 1 if len(self._position) else 0

    def _reply(self, row: int) -> Reply:
        number, request = self._jobs[row]
        count = int(self._count[row]) + 1
        return Reply(
            number=number,
            request=request,
            token_ids=tuple(self._tokens[row, :count].tolist()),
            logprobs=tuple(self._logprobs[row, :count].tolist()),
            stopped=bool(self._stopped[row]),
            states=self._cache.take(row, len(request.prompt_ids) + count - 1),
        )

    def _append_rows(self, requests: Sequence[GenerationRequest]) -> None:
        most = max(self._noise.shape[1], *(request.max_tokens for request in requests))
        noise = torch.zeros(len(requests), most, dtype=torch.float64)
        for row, request in enumerate(requests):
            noise[row, : request.max_tokens] = torch.from_numpy(uniforms(request.key, request.max_tokens))
        new = len(requests)
        self._noise = torch.cat([_widen(self._noise, most), noise.to(self._device)])
        self._tokens = torch.cat([_widen(self._tokens, most), self._tokens.new_zeros(new, most)])
        self._logprobs = torch.cat([_widen(self._logprobs, most), self._logprobs.new_zeros(new, most)])
        self._last = torch.cat([self._last, self._long([request.prompt_ids[-1] for request in requests])])
        self._position = torch.cat([self._position, self._long([len(r.prompt_ids) - 1 for r in requests])])
        self._count = torch.cat([self._count, self._long([0] * new)])
        self._limit = torch.cat([self._limit, self._long([request.max_tokens for request in requests])])
        self._alive = torch.cat([self._alive, self._alive.new_ones(new)])
        self._stopped = torch.cat([self._stopped, self._stopped.new_zeros(new)])
        self._greedy = torch.cat([self._greedy, self._greedy.new_tensor([request.greedy for request in requests])])

    @torch.inference_mode()
    def _prefill(self, first_row: int, requests: Sequence[GenerationRequest], known: Sequence[int]) -> None:
        """Compute the states of all prompt tokens but the last, in groups of rows with similar lengths."""
        news = [len(request.prompt_ids) - 1 - length for request, length in zip(requests, known, strict=True)]
        for group in length_groups(news):
            longest = max(news[index] for index in group)
            ids = torch.zeros(len(group), longest, dtype=torch.long)
            for row, index in enumerate(group):
                ids[row, : news[index]] = torch.tensor(requests[index].prompt_ids[known[index] : -1])
            start = self._long([known[index] for index in group])
            columns = start[:, None] + torch.arange(longest, device=self._device)
            width = int(start.max()) + longest
            self._cache.point(self._long([first_row + index for index in group]), columns, width=width)
            seen = torch.arange(width, device=self._device) <= columns[..., None]
            self._forward.states(ids.to(self._device), columns, seen, self._cache)

    def _long(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def sample(
    logits: torch.Tensor, noise: torch.Tensor, greedy: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B,) and their log-probabilities (B,) from logits (B, V), by inverting the distribution at noise (B, 1).

    One uniform number a token, so that a sample depends on its own noise and logits alone. The most likely token, with
    its log-probability at temperature 1, where `greedy` (B,) is true.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    heat = torch.where(greedy, 1.0, temperature).to(wide)[:, None]
    logprobs = torch.log_softmax(logits.to(wide) / heat, dim=-1)
    mass = logprobs.double().exp_().cumsum(-1)
    total = mass[:, -1:]
    # Below the total even after rounding: a token without probability is never drawn.
    target = torch.minimum(noise * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(mass, target, right=True).squeeze(1)
    tokens = torch.where(greedy, logprobs.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1).double()


def length_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of positive lengths in groups of similar length, so that padding stays small; each once, in order."""
    groups: list[list[int]] = []
    for index in sorted((i for i, length in enumerate(lengths) if length > 0), key=lambda i: (lengths[i], i)):
        if groups and lengths[index] <= GROUP_FACTOR * lengths[groups[-1][0]] + GROUP_SLACK:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [sorted(group) for group in groups]


def _widen(values: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, columns - values.shape[1]))


def _bytes(states: LayerStates) -> int:
    return sum(tensor.nbytes for pair in states for tensor in pair)
