"""What is read off an HTTP response: its body up to a limit, and how long it asks to wait."""

from __future__ import annotations

import email.utils
import math
import time
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import httpx

ACCEPTED = "gzip, deflate"
"""Codings that `read_body` undoes, as a value of the header Accept-Encoding."""
_PLAIN, _DEFLATED = frozenset({"", "identity"}), frozenset({"gzip", "x-gzip", "deflate"})


async def read_body(response: httpx.Response, most: int) -> bytes:
    """The body of a streamed response, decompressed; `most` + 1 of its bytes when it has more.

    No more than that is ever unpacked, however small the body was packed. Raises ValueError for a coding that is broken
    or not in ACCEPTED.
    """
    coding = response.headers.get("content-encoding", "").strip().lower()
    if coding not in _PLAIN | _DEFLATED:
        raise ValueError(f"it is packed as {coding[:40]!r}, and {ACCEPTED} are known")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32) if coding in _DEFLATED else None
    body = bytearray()
    async for part in response.aiter_raw():
        room = most + 1 - len(body)
        try:
            body += part[:room] if unpacker is None else unpacker.decompress(part, room)
        except zlib.error as error:
            raise ValueError(f"its {coding} is broken: {error}") from None
        if len(body) > most:
            break
    return bytes(body)


def seconds_to_wait(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or as a date; None when it says neither."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None
