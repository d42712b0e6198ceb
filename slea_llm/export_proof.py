"""Figures that tell one model from another: log-probabilities of fixed rows, their differences, and what is allowed.

A link of the chain (trainer, PEFT reload, merged weights, engine) holds when its log-probabilities stay within the
tolerance of its type AND when it shows the change that training made. The second is a number of its own: with d the
trained change (trained minus base) and e the link's change (link minus base) over all tokens, share = <e, d> / <d, d>,
1 for a link that serves the adapter and 0 for one that serves the base, even where the whole change is far below the
tolerance. d is read in at least float32: rounding of 16 bits in it would make every share look like one half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch

from slea_llm.errors import ExportError
from slea_llm.types import Message

if TYPE_CHECKING:
    from slea_llm.models.chat import ChatTokenizer

Link = Literal["adapter", "merge", "merged", "engine"]
Row = tuple[int, ...]

UNCHANGED = 1e-5
"""Nats. A largest change below it is none: two paths read the two, whose rounding in float32 differs by 2e-6."""
SHARE_SLACK = 0.5
"""How far the share of the trained change that a link shows may be from 1."""
SHARE_DOUBT = 0.25
"""Standard error of that share above which the rounding of the link's type hides the change."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed difference of log-probabilities in nats: of any token, and on average."""

    largest: float
    mean: float


def _row(*, reload: Tolerance, other: Tolerance, engine: Tolerance) -> Mapping[Link, Tolerance]:
    return MappingProxyType({"adapter": reload, "merge": other, "merged": other, "engine": engine})


TOLERANCES: Mapping[str, Mapping[Link, Tolerance]] = MappingProxyType(
    {
        "float64": _row(reload=Tolerance(1e-5, 1e-6), other=Tolerance(1e-5, 1e-6), engine=Tolerance(1e-5, 1e-6)),
        "float32": _row(reload=Tolerance(1e-4, 5e-5), other=Tolerance(1e-4, 5e-5), engine=Tolerance(1e-3, 1e-4)),
        "bfloat16": _row(reload=Tolerance(0.25, 0.02), other=Tolerance(1.0, 0.1), engine=Tolerance(1.0, 0.1)),
    }
)
"""By type of the base weights; docs/export.md says what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """One link that held: differences to the trainer in nats, and the share of the trained change that it shows."""

    name: str
    tokens: int
    largest: float
    mean: float
    share: float | None
    tolerance: Tolerance

    def line(self) -> str:
        shown = "" if self.share is None else f", shows {self.share:.3f} of the trained change"
        return (
            f"{self.name}: {self.tokens} tokens, largest difference {self.largest:.2g} (allowed "
            f"{self.tolerance.largest:g}), mean {self.mean:.2g} (allowed {self.tolerance.mean:g}){shown}"
        )

    def facts(self) -> dict[str, Any]:
        allowed = {"largest": self.tolerance.largest, "mean": self.tolerance.mean}
        figures = {"largest": self.largest, "mean": self.mean, "share_of_change": self.share}
        return {"link": self.name, "tokens": self.tokens, "difference_nats": figures, "allowed_nats": allowed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What training changed: largest and mean difference between trained model and base, in nats."""

    largest: float
    mean: float

    @property
    def none(self) -> bool:
        return self.largest < UNCHANGED


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Log-probabilities (n,) of the same n tokens by trained model and base, computed in at least float32."""

    trained: torch.Tensor
    base: torch.Tensor

    @property
    def change(self) -> Change:
        difference = (self.trained - self.base).abs()
        return Change(largest=float(difference.max()), mean=float(difference.mean()))


def check_link(
    link: Link,
    name: str,
    *,
    dtype: str,
    served: torch.Tensor,
    reading: Reading,
    trainer: torch.Tensor | None = None,
    allow_unseen: bool = False,
) -> LinkFigures:
    """Compare what a link serves, log-probabilities (n,), with what was trained.

    `trainer` is the trainer's own output where the link computes in the same type (default: `reading.trained`). Raises
    ExportError, with link, figures and meaning, when they differ beyond the tolerance of `dtype`, or when the link does
    not show the trained change (where there is one); `allow_unseen` lets a change pass that rounding hides.
    """
    bad = int((~torch.isfinite(served)).sum())
    if bad:
        raise ExportError(f"{name}: {bad} of {len(served)} log-probabilities not finite")
    difference = (served - (reading.trained if trainer is None else trainer)).abs()
    share, doubt = (None, 0.0) if reading.change.none else _share(served, reading)
    figures = LinkFigures(
        name=name,
        tokens=len(served),
        largest=float(difference.max()),
        mean=float(difference.mean()),
        share=share,
        tolerance=TOLERANCES[dtype][link],
    )
    near_base = float((served - reading.base).abs().max()) <= figures.tolerance.largest
    _check_share(figures, doubt=doubt, near_base=near_base, allow_unseen=allow_unseen)
    if figures.largest > figures.tolerance.largest or figures.mean > figures.tolerance.mean:
        raise ExportError(f"what {name} serves is not what was trained. {figures.line()}")
    return figures


def _share(served: torch.Tensor, reading: Reading) -> tuple[float, float]:
    """Least-squares share of the trained change in the served one, and its standard error.

    The error is the one that holds for rounding of unequal size from token to token (White 1980, HC0).
    """
    change, shown = reading.trained - reading.base, served - reading.base
    power = float(change.square().sum())
    share = float((shown * change).sum()) / power
    return share, float(((shown - share * change) * change).square().sum().sqrt()) / power


def _check_share(figures: LinkFigures, *, doubt: float, near_base: bool, allow_unseen: bool) -> None:
    if figures.share is None or (abs(figures.share - 1) <= SHARE_SLACK and doubt <= SHARE_DOUBT):
        return
    if doubt <= SHARE_DOUBT:
        meaning = "it serves the base model, without the adapter" if near_base else "it is another model"
        raise ExportError(f"{figures.name} does not serve what was trained: {meaning}. {figures.line()}")
    if not allow_unseen:
        raise ExportError(
            f"{figures.name}: the trained change is too small to be told from rounding here (share {figures.share:.2f} "
            f"+- {doubt:.2f}). Train on, use more probes, or allow an unchanged adapter. {figures.line()}"
        )


@torch.no_grad()
def reloaded_logprobs(
    model: Any, rows: Sequence[Row], *, temperature: float, dtype: torch.dtype, starts: Sequence[int] | None = None
) -> torch.Tensor:
    """Log-probabilities (n,) of the tokens of all rows by a Hugging Face causal model, row after row.

    `starts[i]` is the first position of row i that counts (default 1: every token that has a context).
    """
    found = []
    for row, start in zip(rows, starts or [1] * len(rows), strict=True):
        ids = torch.tensor([row], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, start - 1 : -1].to(dtype) / temperature
        found.append(logits.log_softmax(dim=-1).gather(-1, ids[0, start:, None]).squeeze(-1).cpu())
    return torch.cat(found)


def trainer_logprobs(model: Any, rows: Sequence[Row], *, starts: Sequence[int] | None = None) -> torch.Tensor:
    """The same by the trained PolicyCritic, at its own temperature."""
    device = next(model.parameters()).device
    found = []
    for row, start in zip(rows, starts or [1] * len(rows), strict=True):
        ids = torch.tensor([row], device=device)
        chosen = torch.zeros_like(ids, dtype=torch.bool)
        chosen[:, start:] = True
        logprobs, _ = model.policy_pass(ids, torch.ones_like(chosen), chosen)
        found.append(logprobs[chosen].cpu())
    return torch.cat(found)


def probe_rows(chat: ChatTokenizer, dialogues: Sequence[Sequence[Message]]) -> tuple[Row, ...]:
    """Token rows of the probe dialogues, up to the opening of the next reply."""
    rows = tuple(chat.prompt(dialogue) for dialogue in dialogues)
    if not rows or min(map(len, rows)) < 2:
        raise ExportError(f"the proof needs probes of at least two tokens; {len(rows)} were given")
    return rows


def default_probes(number: int) -> list[list[Message]]:
    """`number` fixed dialogues of one to three rounds, English and Chinese, each ending with the user's words."""
    return list(islice(_probes(), number))


def _probes() -> Any:
    for turn in count():
        script = _SCRIPTS[turn % len(_SCRIPTS)]
        rounds = (turn // len(_SCRIPTS)) % 3
        mark = "" if turn < 3 * len(_SCRIPTS) else f" ({turn})"
        said = script[: 2 * rounds + 1]
        yield [
            Message(role="user" if i % 2 == 0 else "assistant", content=text + (mark if i == len(said) - 1 else ""))
            for i, text in enumerate(said)
        ]


_SCRIPTS: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "Hello, I would like to order two bowls of noodle soup.",
        "<think>The address is missing.</think>Where should we bring it?",
        "To 12 Garden Street, please, at half past seven.",
        "<think>Everything is known; I read it back.</think>Two noodle soups to 12 Garden Street at 19:30, right?",
        "Yes, that is right. Thank you!",
    ),
    (
        "你好，我想点一份炒饭。",
        "<think>还不知道数量和地址。</think>请问要几份，送到哪里？",
        "三份，送到花园路12号。",
        "<think>信息齐全，请用户确认。</think>三份炒饭，送到花园路12号，对吗？",
        "对，谢谢。",
    ),
    (
        "What is the capital of France?",
        "The capital of France is Paris.",
        "And how many people live there?",
        "About two million people live in the city itself.",
        "Write that as one short sentence.",
    ),
    (
        "My router shows a red light and nothing works.",
        "<think>Ask for the simplest cause first.</think>Since when, and is the cable plugged in?",
        "Since 8:15 this morning; the cable is in, I checked twice.",
        "Please switch it off, wait 30 seconds and switch it on again.",
        "Done. It blinks green now, is that good?",
    ),
)
