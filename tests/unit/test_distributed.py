"""Who plays what, and whether as many processes run as were asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.distributed import assert_world_size, make_accelerator, shard
from slea_llm.errors import ConfigError, MissingDependencyError, StartupCheckError
from slea_llm.settings import TrainerSettings


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(1, 9))
def test_shards_are_consecutive_whole_and_even(groups: int, world_size: int) -> None:
    pieces = [shard(groups, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [group for piece in pieces for group in piece] == list(range(groups))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 2"):
        shard(4, rank=2, world_size=2)


@pytest.mark.parametrize(
    ("running", "expected", "environment"),
    [
        (1, None, {}),
        (2, 2, {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "no"}),
        (1, 1, {"ACCELERATE_MIXED_PRECISION": "no"}),
        (1, None, {"MASTER_ADDR": "set by the cluster for other reasons"}),
    ],
)
def test_the_right_number_of_processes_passes(running: int, expected: int | None, environment: dict[str, str]) -> None:
    assert_world_size(running, expected=expected, environment=environment)


@pytest.mark.parametrize(
    ("running", "expected", "environment", "words"),
    [
        (1, 2, {}, "1 process.es. run where 2"),
        (1, None, {"WORLD_SIZE": "2"}, "started 2 processes"),
        (1, None, {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "more than one process"),
    ],
)
def test_a_launcher_that_starts_too_few_is_refused(
    running: int, expected: int | None, environment: dict[str, str], words: str
) -> None:
    with pytest.raises(StartupCheckError, match=words) as caught:
        assert_world_size(running, expected=expected, environment=environment)
    assert "--multi_gpu --num_processes" in str(caught.value)


def test_a_tracker_that_is_not_there_is_refused() -> None:
    with pytest.raises(MissingDependencyError, match="'no_such_tracker'"):
        make_accelerator(TrainerSettings(trackers=("no_such_tracker",)))
