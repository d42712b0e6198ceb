"""Secrets stay where they are: refused in recipes, and blanked in whatever is written, logged or given to a tracker.

A value counts as a secret for the name it stands under (`hub_token`, `WANDB_API_KEY`, `password`), for its shape
(`hf_...`, `sk-...`, a bearer header, a private key), or because it is the value of such an environment variable. Names
that only speak of tokens (`max_reply_tokens`, `gamma_token`, `eos_token`) are none.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from slea_llm.errors import ConfigError

REDACTED = "[redacted]"
SHORTEST_SECRET = 6
"""Shorter values of environment variables are not searched for in text: `1` or `true` would blank everything."""

_SECRET_WORDS = frozenset(
    {"apikey", "credential", "credentials", "key", "passphrase", "passwd", "password", "pwd", "secret", "token"}
)
_TOKENIZER_WORDS = frozenset({"bos", "cls", "eos", "image", "mask", "pad", "sep", "special", "stop", "unk"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SHAPES = re.compile(
    r"""
      -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?:.*?-----END[ ][A-Z ]*PRIVATE[ ]KEY-----)?
    | (?<=://)[^\s/@:]+:[^\s/@]+(?=@)
    | (?<![A-Za-z0-9_-])(?:
          (?:hf|ghp|gho|ghs|ghu|glpat|github_pat)[_-](?=\w*[0-9A-Z])[A-Za-z0-9_-]{8,}
        | (?:sk|wk|pk|rk)-(?=[\w-]*[0-9])[A-Za-z0-9_-]{8,}
        | xox[abprs]-[A-Za-z0-9-]{10,}
        | AKIA[0-9A-Z]{16}
        | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}
      )
    | (?<=[Bb]earer[ ])[A-Za-z0-9._~+/-]{8,}=*
    """,
    re.VERBOSE | re.DOTALL,
)


def names_a_secret(name: str) -> bool:
    """True when a setting or variable of this name holds a secret: its last word is token, key, password and so on."""
    words = [word.lower() for word in _WORD.findall(name)]
    return bool(words) and words[-1] in _SECRET_WORDS and not _TOKENIZER_WORDS & set(words)


def environment_secrets(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Values of environment variables whose name says that they are secret (default: this process's variables).

    The shell's own PWD is the working directory, which any path may hold.
    """
    variables = os.environ if environ is None else environ
    secret = {name: value for name, value in variables.items() if names_a_secret(name) and name != "PWD"}
    return frozenset(value for value in secret.values() if len(value) >= SHORTEST_SECRET)


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` with every value of a known shape, and every one of `secrets`, blanked."""
    for secret in sorted(secrets, key=len, reverse=True):  # a longer one may contain a shorter one
        text = text.replace(secret, REDACTED)
    return _SHAPES.sub(REDACTED, text)


def redact(value: Any, *, secrets: Iterable[str] = ()) -> Any:
    """A copy of a config (mappings, sequences, plain values) that can be written anywhere.

    Strings under a secret's name are blanked whole, all other strings and the mappings' keys as in `redact_text`.
    """
    return _redacted(value, "", tuple(secrets))


def _redacted(value: Any, key: str, secrets: tuple[str, ...]) -> Any:
    """The copy of what stands under `key`; the items of a list stand under the list's name."""
    if isinstance(value, Mapping):
        return {
            redact_text(name, secrets) if isinstance(name, str) else name: _redacted(item, str(name), secrets)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(item, key, secrets) for item in value]
    if not isinstance(value, str):
        return value
    return REDACTED if _is_named_secret(key, value) else redact_text(value, secrets)


def find_secrets(config: Any, *, secrets: Iterable[str] = ()) -> list[str]:
    """Dotted places in a config that hold a secret, in order. The values themselves are never named."""
    known = tuple(secrets)
    return [place for place, key, item in _leaves(config, "", "") if _holds_secret(key, item, known)]


def refuse_secrets(config: Any, *, source: str, secrets: Iterable[str] = ()) -> None:
    """Raise ConfigError, naming the places and never the values, when a recipe or an override holds a secret."""
    places = find_secrets(config, secrets=secrets)
    if places:
        raise ConfigError(
            f"{source}: {', '.join(places)} holds a secret, and recipes are saved, logged and given to trackers; take "
            f"it out and set an environment variable instead, such as HF_TOKEN or WANDB_API_KEY"
        )


class RedactingFormatter(logging.Formatter):
    """A log formatter whose finished text, tracebacks included, holds no secret."""

    def __init__(self, fmt: str | None = None, datefmt: str | None = None, *, secrets: Iterable[str] = ()) -> None:
        super().__init__(fmt, datefmt)
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record), self._secrets)


def _is_named_secret(key: str, item: str) -> bool:
    return bool(item) and names_a_secret(key)


def _holds_secret(key: str, item: object, secrets: tuple[str, ...]) -> bool:
    if not isinstance(item, str) or item == REDACTED:
        return False
    return _is_named_secret(key, item) or redact_text(item, secrets) != item


def _leaves(value: Any, place: str, key: str) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            # a secret that stands where a name belongs must not be quoted by the message either
            shown = redact_text(str(name))
            yield from _leaves(item, f"{place}.{shown}" if place else shown, str(name))
            if shown != str(name):
                yield (f"a key of {place or 'the top level'}", "", str(name))
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}[{index}]", key)
    else:
        yield place, key, value
