"""What commands print."""

from __future__ import annotations

import re
import sys

_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def say(line: str) -> None:
    """One line of a command's result, to standard output.

    Control characters and halves of characters, which texts from logs may hold, become U+FFFD.
    """
    sys.stdout.write(_UNFIT.sub("\ufffd", line) + "\n")
    sys.stdout.flush()
