"""The page itself: one HTML file with its data, its style and its scripts inside, that reaches for nothing outside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from jinja2.utils import htmlsafe_json_dumps

from slea_llm import __version__
from slea_llm.redaction import REDACTED, environment_secrets, redact_text
from slea_llm.report.dialogues import Limits, Mend, collect
from slea_llm.report.sources import Source
from slea_llm.report.training import training

MOST_BYTES = 9_500_000
"""Size of a report at most."""
TEXT_BYTES = 6_000_000
"""Of which whole dialogues take so much, over all sources."""
FEWEST_TEXT_BYTES = 250_000
"""With less room than this for whole dialogues nothing can be read: then it is said that the report is too large."""
PERSONAL = re.compile(
    r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,6}"  # mail addresses
    r"|(?<![\w.])(?:\+?\d[\d ()./-]{7,20}\d)(?![\w.])"  # telephone and card numbers, dates among them
)

_SURROGATE = re.compile("[\ud800-\udfff]")


def mender(*, personal: bool = False, patterns: Iterable[re.Pattern[str]] = ()) -> Mend:
    """What blanks texts from logs: secrets always; mail addresses and long numbers with `personal`; and `patterns`."""
    secrets = environment_secrets()
    blanked = [*([PERSONAL] if personal else []), *patterns]

    def mend(text: str) -> str:
        text = redact_text(text, secrets)
        for pattern in blanked:
            text = pattern.sub(REDACTED, text)
        return _SURROGATE.sub("\ufffd", text)

    return mend


def make(sources: Sequence[Source], *, evaluator: str | None, title: str, made: str, mend: Mend, dialogues: int) -> str:
    """The report of one source, or of two side by side, as HTML of at most MOST_BYTES.

    `made` is the time that it names. Where the data are too large, fewer dialogues are shown whole and the page says
    so. Raises KeyError for an evaluator that a log lacks.
    """
    room = TEXT_BYTES
    while True:
        limits = Limits(text_bytes=room // len(sources), dialogues=dialogues)
        data = {
            "made": made,
            "version": __version__,
            "limit": dialogues,
            "sets": [_column(source, evaluator, limits, mend) for source in sources],
        }
        page = render(title=mend(title), data=data)
        if len(page.encode("utf-8")) <= MOST_BYTES or room <= FEWEST_TEXT_BYTES:
            return page
        room //= 2


def _column(source: Source, evaluator: str | None, limits: Limits, mend: Mend) -> dict[str, Any]:
    return {
        **collect(source, evaluator, limits, mend),
        "training": training(source.metrics, source.evaluations, source.streams),
    }


def render(*, title: str, data: Mapping[str, Any]) -> str:
    """Fill the template. All that comes from logs is data in JSON, in which `<`, `>`, `&` and `'` stand escaped.

    The content policy of the page lets its own two scripts and its style run, by their hashes, and no request be made.
    """
    charts, script, style = (_asset(name) for name in ("chart.umd.min.js", "report.js", "report.css"))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(_asset("report.html.j2"))
    policy = (
        f"default-src 'none'; script-src {_hash(charts)} {_hash(script)}; style-src {_hash(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return template.render(
        title=title,
        policy=policy,
        charts=charts,
        script=script,
        style=style,
        data=htmlsafe_json_dumps(data, dumps=_dumps),
    )


def _dumps(value: Any, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _asset(name: str) -> str:
    return resources.files("slea_llm.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
