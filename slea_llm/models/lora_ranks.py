"""Which LoRA ranks the engine can serve: its limit is one of a few sizes, none below the rank."""

from __future__ import annotations

from slea_llm.errors import ConfigError

ENGINE_LIMITS: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes as `max_lora_rank`; its default is 16."""


def engine_rank(rank: int) -> int | None:
    """The smallest engine limit that serves an adapter of this rank; None when none does."""
    return next((limit for limit in ENGINE_LIMITS if limit >= rank), None) if rank >= 1 else None


def check_rank(rank: int, *, name: str = "model.lora_rank") -> int:
    """The engine limit for this rank. Raises ConfigError when the engine can serve no such adapter."""
    limit = engine_rank(rank)
    if limit is None:
        raise ConfigError(f"{name} {rank} cannot be served; allowed: 1 to {ENGINE_LIMITS[-1]}")
    return limit
