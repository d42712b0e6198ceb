"""How the value function learns: squared error to temporal-difference targets of a copy that follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from slea_llm.augmenters.value_function import Arrays, Floats, polyak, predict

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-2
EPOCHS = 6
"""Passes over the window at every refresh; a dialogue is seen at each refresh while it is in the window."""
BATCH = 128


def learn(
    online: Arrays,
    target: Arrays,
    rows: NDArray[np.float32],
    targets_of: Callable[[Floats], Floats],
    *,
    tau: float,
    seed: int,
) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]]]:
    """Squared-error steps of the online network towards targets, and the target network that follows it.

    `targets_of(values)` gives the targets (n,) from the target network's values (n,) of all rows, NaN where a row is
    no place to learn from; it is asked anew every epoch. `tau`: Polyak rate of every step; 0: a hard copy at the end.
    """
    names = list(online)
    parameters = {name: nn.Parameter(torch.from_numpy(np.array(online[name], np.float32))) for name in names}
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    following = {name: np.array(target[name], np.float32) for name in names}
    inputs = torch.from_numpy(rows)
    rng = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        wanted = targets_of(predict(following, rows))
        known = np.flatnonzero(np.isfinite(wanted))
        goal = torch.from_numpy(np.nan_to_num(wanted).astype(np.float32))
        order = rng.permutation(known)
        for start in range(0, len(order), BATCH):
            picked = torch.from_numpy(order[start : start + BATCH])
            loss = (_forward(parameters, inputs[picked]) - goal[picked]).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
            optimizer.step()
            if tau:
                following = polyak(following, _arrays(parameters), tau)
    learnt = _arrays(parameters)
    return learnt, following if tau else learnt


def _forward(parameters: Mapping[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    inner = rows
    if "in.weight" in parameters:
        inner = torch.tanh(nn.functional.linear(rows, parameters["in.weight"], parameters["in.bias"]))
    return nn.functional.linear(inner, parameters["out.weight"], parameters["out.bias"]).squeeze(-1)


def _arrays(parameters: Mapping[str, torch.Tensor]) -> dict[str, NDArray[np.float32]]:
    return {name: one.detach().numpy().copy() for name, one in parameters.items()}
