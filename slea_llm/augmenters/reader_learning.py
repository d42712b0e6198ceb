"""How the attention reader learns: squared error of the return that it predicts of whole dialogues."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slea_llm.augmenters.attention_reader import Arrays, Floats, Rows

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
EPOCHS = 6
"""Passes over the window at every refresh; a dialogue is seen at each refresh while it is in the window."""
BATCH = 16


def learn(present: Arrays, dialogues: Sequence[Rows], wanted: Floats, *, seed: int) -> dict[str, NDArray[np.float32]]:
    """Weights after some passes; `dialogues` are rows (T, size) of their steps, `wanted` (n,) in the reader's units."""
    parameters = {
        name: nn.Parameter(torch.from_numpy(np.array(one, np.float32))) for name, one in sorted(present.items())
    }
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    rng = np.random.default_rng(seed)
    goal = torch.from_numpy(wanted.astype(np.float32))
    for _ in range(EPOCHS):
        order = rng.permutation(len(dialogues))
        for start in range(0, len(order), BATCH):
            picked = order[start : start + BATCH]
            read = _read(parameters, [dialogues[place] for place in picked])
            loss = (read - goal[torch.from_numpy(picked)]).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
            optimizer.step()
    return {name: one.detach().numpy().copy() for name, one in parameters.items()}


def _read(parameters: dict[str, nn.Parameter], dialogues: Sequence[Rows]) -> torch.Tensor:
    """(n,) predictions of dialogues padded on the right; padding is masked out of the attention."""
    longest = max(len(one) for one in dialogues)
    steps = torch.zeros(len(dialogues), longest, dialogues[0].shape[1])
    mask = torch.zeros(len(dialogues), longest, dtype=torch.bool)
    for index, one in enumerate(dialogues):
        steps[index, : len(one)] = torch.from_numpy(one)
        mask[index, : len(one)] = True
    keys = nn.functional.linear(steps, parameters["key.weight"])
    logits = keys @ parameters["query"] / len(parameters["query"]) ** 0.5
    alpha = torch.softmax(logits.masked_fill(~mask, float("-inf")), dim=1)
    values = torch.tanh(nn.functional.linear(steps, parameters["value.weight"], parameters["value.bias"]))
    read = (alpha.unsqueeze(-1) * values).sum(dim=1)
    return read @ parameters["out.weight"] + parameters["out.bias"]
