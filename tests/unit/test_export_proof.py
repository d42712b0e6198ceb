"""The arithmetic of the proof: what is equal, what is the base, and what cannot be told."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.errors import ExportError
from slea_llm.export_proof import TOLERANCES, Change, Reading, check_link, default_probes


def vectors(seed: int, *, change: float, tokens: int = 400) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Base, trained and unit noise."""
    generator = torch.Generator().manual_seed(seed)
    base = -torch.rand(tokens, generator=generator, dtype=torch.float64) * 5
    trained = base + change * torch.randn(tokens, generator=generator, dtype=torch.float64)
    return base, trained, torch.randn(tokens, generator=generator, dtype=torch.float64)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), change=st.sampled_from([2e-5, 1e-3, 0.5]))
def test_a_link_that_serves_the_adapter_holds_and_one_that_serves_the_base_does_not(seed: int, change: float) -> None:
    base, trained, noise = vectors(seed, change=change)
    rounding = 1e-6 * noise
    figures = check_link(
        "adapter", "link", dtype="float32", served=trained + rounding, reading=Reading(trained=trained, base=base)
    )
    assert figures.share == pytest.approx(1, abs=0.05)
    assert figures.largest == pytest.approx(float(rounding.abs().max()))
    with pytest.raises(ExportError, match="it serves the base model, without the adapter"):
        check_link(
            "adapter", "link", dtype="float32", served=base + rounding, reading=Reading(trained=trained, base=base)
        )


def test_the_base_is_told_from_the_adapter_far_below_the_tolerance() -> None:
    base, trained, noise = vectors(0, change=1e-3)
    rounding = 1e-3 * noise
    assert float((base - trained).abs().max()) < TOLERANCES["bfloat16"]["engine"].mean
    check_link(
        "engine", "link", dtype="bfloat16", served=trained + rounding, reading=Reading(trained=trained, base=base)
    )
    with pytest.raises(ExportError, match="without the adapter"):
        check_link(
            "engine", "link", dtype="bfloat16", served=base + rounding, reading=Reading(trained=trained, base=base)
        )


def test_a_change_lost_in_rounding_is_said_and_not_passed() -> None:
    base, trained, noise = vectors(0, change=1e-4)
    served, reading = trained + 0.03 * noise, Reading(trained=trained, base=base)
    with pytest.raises(ExportError, match="too small to be told from rounding"):
        check_link("engine", "link", dtype="bfloat16", served=served, reading=reading)
    figures = check_link("engine", "link", dtype="bfloat16", served=served, reading=reading, allow_unseen=True)
    assert figures.mean == pytest.approx(float((0.03 * noise).abs().mean()))


def test_rounding_as_large_as_the_change_is_no_excuse_for_the_base() -> None:
    base, trained, noise = vectors(0, change=0.05)
    reading = Reading(trained=trained, base=base)
    check_link("engine", "link", dtype="bfloat16", served=trained + 0.05 * noise, reading=reading)
    with pytest.raises(ExportError, match="without the adapter"):
        check_link("engine", "link", dtype="bfloat16", served=base + 0.05 * noise, reading=reading)


def test_a_link_in_the_trainer_s_type_is_held_to_the_trainer_s_own_output() -> None:
    base, trained, noise = vectors(0, change=0.2)
    reading, own = Reading(trained=trained, base=base), trained + 0.05 * noise
    assert check_link("adapter", "link", dtype="bfloat16", served=own, reading=reading, trainer=own).largest == 0.0
    with pytest.raises(ExportError, match="is not what was trained"):
        check_link("adapter", "link", dtype="bfloat16", served=own, reading=reading)


@pytest.mark.parametrize("scale", [2.0, -1.0])
def test_a_wrong_scale_is_another_model(scale: float) -> None:
    base, trained, _ = vectors(0, change=1e-2)
    served = base + scale * (trained - base)
    with pytest.raises(ExportError, match="it is another model"):
        check_link("adapter", "link", dtype="float32", served=served, reading=Reading(trained=trained, base=base))


def test_one_token_beyond_the_tolerance_is_enough() -> None:
    base, trained, _ = vectors(0, change=1.0)
    served = trained.clone()
    served[17] += 2e-4
    with pytest.raises(ExportError, match=r"link serves is not what was trained.*allowed 0.0001"):
        check_link("adapter", "link", dtype="float32", served=served, reading=Reading(trained=trained, base=base))
    check_link("engine", "link", dtype="float32", served=served, reading=Reading(trained=trained, base=base))


def test_nan_is_an_error_and_not_a_difference() -> None:
    base, trained, _ = vectors(0, change=1.0)
    served = trained.clone()
    served[3] = torch.nan
    with pytest.raises(ExportError, match="1 of 400 log-probabilities not finite"):
        check_link("engine", "link", dtype="float32", served=served, reading=Reading(trained=trained, base=base))


def test_no_change_has_no_share() -> None:
    base, _, _ = vectors(0, change=1.0)
    same = Reading(trained=base, base=base)
    assert check_link("adapter", "link", dtype="float32", served=base, reading=same).share is None
    assert same.change == Change(largest=0.0, mean=0.0)
    assert same.change.none


def test_every_type_and_link_has_a_tolerance() -> None:
    links = {"adapter", "merge", "merged", "engine"}
    assert {dtype: set(rows) for dtype, rows in TOLERANCES.items()} == dict.fromkeys(
        ("float64", "float32", "bfloat16"), links
    )


@pytest.mark.parametrize("number", [1, 8, 40])
def test_probes_are_distinct_dialogues_that_end_with_the_user(number: int) -> None:
    probes = default_probes(number)
    assert len(probes) == number
    assert len({tuple(message.content for message in probe) for probe in probes}) == number
    assert all([m.role for m in probe] == (["user", "assistant"] * 3)[: len(probe)] for probe in probes)
    assert all(probe[-1].role == "user" for probe in probes)
    if number > 4:
        assert max(map(len, probes)) > 1
