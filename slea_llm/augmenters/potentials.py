"""What a potential asks of the stream that it feeds, so that it leaves the best policy the best."""

from __future__ import annotations

from slea_llm.errors import UnsupportedError
from slea_llm.settings import StreamSettings


def check_potential(augmenter: str, gamma: float, name: str, stream: StreamSettings) -> None:
    """Raise UnsupportedError unless the stream discounts as the potential does (Ng, Harada and Russell 1999).

    Between turns that is `gamma`; inside a turn nothing is discounted.
    """
    if gamma != stream.gamma_turn:
        raise UnsupportedError(
            f"augmenter {augmenter} discounts its potential by gamma {gamma}, stream {name} by "
            f"gamma_turn {stream.gamma_turn}; give both the same number"
        )
    for key in ("gamma_step", "gamma_substep", "gamma_token"):
        if getattr(stream, key) not in (None, 1.0):
            raise UnsupportedError(
                f"augmenter {augmenter} has a potential that is not discounted inside a turn, stream {name} has "
                f"{key} {getattr(stream, key)}; set it to 1"
            )
