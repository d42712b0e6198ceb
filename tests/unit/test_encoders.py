"""Sentence encoders: rows that depend on their own text alone, Chinese included, and a cache that stays small."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.encoders import CachingEncoder, HashingEncoder, Vectors, load_encoder, words
from slea_llm.errors import ConfigError

ORDER = ("How many pizzas would you like?", "你想要几个披萨？", "Where should we deliver it?", "我们应该送到哪里？")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(max_size=40), max_size=6))
def test_hashing_takes_any_text_and_rows_do_not_mix(texts: list[str]) -> None:
    encoder = HashingEncoder()
    rows = encoder.encode(texts)
    assert rows.shape == (len(texts), encoder.dimension)
    assert rows.dtype == np.float32
    lengths = np.linalg.norm(rows, axis=1)
    for text, row, length in zip(texts, rows, lengths, strict=True):
        assert length == pytest.approx(1.0, abs=1e-5) or not words(text) or length == 0.0
        np.testing.assert_array_equal(row, encoder.encode([text])[0])


def test_hashing_is_the_same_on_every_machine() -> None:
    row = HashingEncoder().encode(["ask for the address"])[0]
    assert np.flatnonzero(row).size > 20
    assert int(np.argmax(np.abs(row))) == int(np.argmax(np.abs(HashingEncoder().encode(["ask for the address"])[0])))
    near, far = HashingEncoder().encode(["ask for an address", "football tonight"])
    assert float(row @ near) > 0.5 > 0.2 > float(row @ far)


def test_words_of_scripts_without_spaces() -> None:
    assert words("Tisch für 2, 送餐到3号 ＡＢ") == ["tisch", "für", "2", "送", "餐", "到", "3", "号", "ab"]


def test_the_default_encoder_aligns_chinese_with_english() -> None:
    encoder = load_encoder("use-multilingual")
    rows = encoder.encode([*ORDER, "", "\ud800"])
    assert rows.shape == (6, 512)
    assert not rows[4].any()
    alike = rows[:4] @ rows[:4].T
    assert alike[0, 1] > max(alike[0, 2], alike[0, 3]) + 0.2
    assert alike[2, 3] > max(alike[2, 0], alike[2, 1]) + 0.1


class Counting:
    name = "counting"
    dimension = 2

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.asked += texts
        return np.array([[len(text), 1.0] for text in texts], np.float32)


def test_the_cache_asks_once_and_forgets_the_oldest() -> None:
    inner = Counting()
    encoder = CachingEncoder(inner, size=2)
    np.testing.assert_array_equal(encoder.encode(["a", "bb", "a"]), [[1, 1], [2, 1], [1, 1]])
    assert inner.asked == ["a", "bb"]
    encoder.encode(["a"])
    encoder.encode(["ccc"])  # "bb" was used last longest ago
    encoder.encode(["a", "bb"])
    assert inner.asked == ["a", "bb", "ccc", "bb"]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=6), max_size=8), st.integers(0, 4))
def test_a_cache_of_any_size_changes_no_row(batches: list[list[str]], size: int) -> None:
    plain, cached = HashingEncoder(), CachingEncoder(HashingEncoder(), size=size)
    for texts in batches:
        np.testing.assert_array_equal(cached.encode(texts), plain.encode(texts))
        assert len(cached) <= size


def test_an_encoder_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no name"):
        load_encoder("")
