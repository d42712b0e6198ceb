"""What samplers accept, versions that only grow, and the canary's rule."""

from __future__ import annotations

import pytest
import torch

from slea_llm.errors import GenerationError
from slea_llm.generation.requests import PROBE_TOKENS, Limits, ServedWeights, fingerprint, probe_ids
from slea_llm.types import GenerationRequest

LIMITS = Limits(max_context=16, vocab_size=50)


def request_of(prompt: tuple[int, ...], max_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(prompt_ids=prompt, key=(1, 2, 3), max_tokens=max_tokens)


def test_requests_at_the_limits_are_accepted() -> None:
    LIMITS.check(request_of((0, 49)))
    LIMITS.check(request_of((1,) * 12))
    LIMITS.check(request_of((1,), max_tokens=15))


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (request_of(()), "both must be at least 1"),
        (request_of((1,), max_tokens=0), "both must be at least 1"),
        (request_of((1,) * 13), "13 prompt tokens and max_tokens 4 exceed the context of 16"),
        (request_of((50,)), "the model has 0 to 49"),
        (request_of((-1,)), "span -1 to -1"),
    ],
)
def test_requests_beyond_are_refused_by_name(request_: GenerationRequest, match: str) -> None:
    with pytest.raises(GenerationError, match=match):
        LIMITS.check(request_)


def test_versions_only_grow_and_the_starting_version_may_be_loaded_once() -> None:
    served = ServedWeights(unmoved_allowed=0)
    served.check_version(0)
    served.accept(0, "a", [1.0], [1.0])
    for version in (0, -1):
        with pytest.raises(GenerationError, match="does not follow"):
            served.check_version(version)
    served.check_version(4)
    served.accept(4, "b", [1.0], [2.0])
    assert (served.version, served.loaded) == (4, True)
    with pytest.raises(GenerationError, match="policy version 3 does not follow 4"):
        served.check_version(3)


@pytest.mark.parametrize(
    ("known", "loaded", "moved", "fails"),
    [
        ("a", "a", False, False),  # equal weights, equal answers
        ("a", "a", True, False),
        ("a", "b", True, False),  # new weights, new answers
        ("a", "b", False, True),  # new weights, old answers: they did not arrive
        (None, "b", False, False),  # nothing is known of the starting weights
    ],
)
def test_the_canary_must_move_when_the_weights_do(known: str | None, loaded: str, moved: bool, fails: bool) -> None:
    served = ServedWeights(unmoved_allowed=0, fingerprint=known)
    after = [-1.0, -2.5] if moved else [-1.0, -2.0]
    if not fails:
        served.accept(1, loaded, [-1.0, -2.0], after)
        assert served.version == 1
        return
    with pytest.raises(GenerationError, match="canary: policy version 1 has other weights than version 0"):
        served.accept(1, loaded, [-1.0, -2.0], after)
    assert served.version == 0


def test_small_changes_may_go_unseen_for_a_while_and_not_for_ever() -> None:
    served = ServedWeights(unmoved_allowed=2, fingerprint=0)
    served.accept(1, 1, [0.0], [0.0])
    served.accept(2, 2, [0.0], [0.0])
    served.accept(3, 3, [0.0], [1.0])  # seen: counting starts again
    served.accept(4, 4, [0.0], [0.0])
    served.accept(5, 5, [0.0], [0.0])
    with pytest.raises(GenerationError, match="canary"):
        served.accept(6, 6, [0.0], [0.0])


def test_a_fingerprint_sees_any_changed_element_in_the_samplers_type() -> None:
    weights = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
    changed = weights.clone()
    changed[1, 2] += 1e-6
    assert fingerprint([("w", weights)], torch.float32) == fingerprint([("w", weights.clone())], torch.float32)
    assert fingerprint([("w", weights)], torch.float32) != fingerprint([("w", changed)], torch.float32)
    assert fingerprint([("w", weights)], torch.bfloat16) == fingerprint([("w", changed)], torch.bfloat16)
    assert fingerprint([("w", weights)], torch.float32) != fingerprint([("v", weights)], torch.float32)
    transposed = weights.T
    assert fingerprint([("w", transposed)], torch.float64) == fingerprint([("w", transposed.clone())], torch.float64)


@pytest.mark.parametrize("vocab_size", [7, 263, 512, 49152, 151936])
def test_the_probe_stays_inside_the_vocabulary(vocab_size: int) -> None:
    ids = probe_ids(vocab_size)
    assert len(ids) == PROBE_TOKENS
    assert all(0 <= token < vocab_size for token in ids)
    assert ids == probe_ids(vocab_size)
