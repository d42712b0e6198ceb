"""Dialogues whose outcome hangs on what the reply says *to this message*: no rule without content can tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slea_llm.models.tiny import make_tiny
from slea_llm.types import Message, Trajectory, Turn
from tests.support.judged import drawn

LIGHTS = {"red": "wait", "green": "walk"}
GAIN = 10.0
TEXTS = [f"light {light} , I {act} now" for light in LIGHTS for act in LIGHTS.values()] * 20


def write_base(folder: Path, *, seed: int = 1) -> Path:
    """A random Llama whose layers are far from linear, so that its states tell combinations of words apart."""
    made = make_tiny(folder, TEXTS, vocab_size=300, hidden=64, layers=2, heads=2, seed=seed)
    weights = load_file(made / "model.safetensors")
    for name, tensor in weights.items():
        if ".layers." in name and tensor.ndim == 2:
            tensor.mul_(GAIN)
    save_file(
        {name: torch.clone(tensor) for name, tensor in weights.items()}, made / "model.safetensors", {"format": "pt"}
    )
    return made


def dialogue(name: str, light: str, act: str, *, success: bool | None = None) -> Trajectory:
    """One turn; it succeeds when the act is right for the light, or as told."""
    good = LIGHTS[light] == act if success is None else success
    turn = Turn(
        index=0, context=(Message(role="user", content=f"light {light}"),), text=f"<think>I see</think>I {act} now"
    )
    return Trajectory(
        id=name,
        task={},
        environment="signals",
        seed=0,
        policy_version=0,
        turns=(turn,),
        traces=(),
        outcome=float(good),
        termination="success" if good else "failure",
    )


def dialogues(count: int, *, seed: int = 0, shuffled: bool = False) -> Sequence[Trajectory]:
    """Lights and acts in every combination alike; `shuffled`: the outcome has nothing to do with them."""
    rng = drawn(seed)
    return [
        dialogue(
            f"{seed}-{number}",
            rng.choice(list(LIGHTS)),
            rng.choice(list(LIGHTS.values())),
            success=rng.random() < 0.5 if shuffled else None,
        )
        for number in range(count)
    ]
