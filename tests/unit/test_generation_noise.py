"""Sampling noise by key: stable, prefix-closed, uniform, independent of everything else."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.generation.noise import uniforms

KEYS = st.lists(st.integers(min_value=-(2**70), max_value=2**70), max_size=4).map(tuple)


@given(key=KEYS, short=st.integers(0, 40), more=st.integers(0, 40))
@settings(deadline=None, max_examples=50)
def test_a_longer_draw_begins_with_the_shorter_one(key: tuple[int, ...], short: int, more: int) -> None:
    long = uniforms(key, short + more)
    assert np.array_equal(uniforms(key, short), long[:short])
    assert long.shape == (short + more,)
    assert np.all((long >= 0.0) & (long < 1.0))


@given(one=KEYS, other=KEYS)
@settings(deadline=None, max_examples=50)
def test_keys_that_differ_give_other_noise(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert np.array_equal(uniforms(one, 4), uniforms(other, 4)) == (one == other)


def test_digits_do_not_run_together() -> None:
    draws = {tuple(uniforms(key, 2)) for key in [(1, 23), (12, 3), (123,), (1, 2, 3), (), (0,), (-1,)]}
    assert len(draws) == 7


def test_the_noise_is_uniform_along_keys_and_along_tokens() -> None:
    along_tokens = uniforms((7, 1, 2), 20_000)
    along_keys = np.array([uniforms((7, episode, 0), 1)[0] for episode in range(4_000)])
    for draws in (along_tokens, along_keys):
        grid = (np.arange(len(draws)) + 0.5) / len(draws)
        distance = np.max(np.abs(np.sort(draws) - grid))
        assert distance < 1.95 / np.sqrt(len(draws))  # Kolmogorov-Smirnov at 0.1 %


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox 4x64-10 written out from the paper (Salmon et al. 2011): four 64-bit words."""
    mask = 2**64 - 1
    words = [counter & mask, counter >> 64, 0, 0]
    keys = list(key)
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(right >> 64) ^ words[1] ^ keys[0], right & mask, (left >> 64) ^ words[3] ^ keys[1], left & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words


def test_the_noise_is_philox_and_will_stay_so() -> None:
    """What a run was recorded with is what it is repeated with, on any machine and with any numpy."""
    assert philox(0, (0, 0))[0] == 0x16554D9ECA36314C  # the known answer published with Random123
    digest = hashlib.blake2b(b"7,-1,3", digest_size=16).digest()
    key = (int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))
    words = philox(1, key) + philox(2, key)
    assert uniforms((7, -1, 3), 8).tolist() == [(word >> 11) / 2**53 for word in words]
