"""The rank table of the engine."""

from __future__ import annotations

import pytest

from slea_llm.errors import ConfigError
from slea_llm.models.lora_ranks import check_rank, engine_rank


@pytest.mark.parametrize(
    ("rank", "limit"), [(1, 1), (3, 8), (8, 8), (20, 32), (64, 64), (129, 256), (600, None), (321, 512), (0, None)]
)
def test_br_038_smallest_limit_that_serves_the_rank(rank: int, limit: int | None) -> None:
    assert engine_rank(rank) == limit


def test_br_038_a_rank_above_all_limits_is_refused_early() -> None:
    with pytest.raises(ConfigError, match="600 cannot be served; allowed: 1 to 512"):
        check_rank(600)
    assert check_rank(129) == 256
