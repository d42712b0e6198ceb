"""Read JSON of any size value by value: the items of a large array or of a document's rows, one at a time.

The values are decoded by the standard library, as lines are, so that NaN and half characters are mended in the same
way; event parsers such as ijson refuse a file that holds a NaN, and lose what stands after a broken item.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from slea_llm.logs.fields import shown
from slea_llm.storage import mend_json

CHUNK = 1 << 20
"""Bytes read at least at a time."""
NEAR_END = 16
"""An error this near to the end of what was read may go away when more is read: `-Infinity` has nine characters."""

_BLANK = re.compile(r"[ \t\n\r\x00\ufeff]*")
_NUMBER_END = re.compile(r"[-+.0-9eE]*")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class NotJsonError(ValueError):
    """What stands here is not JSON."""


class Decoded(NamedTuple):
    """A value, the line where it begins, and what had to be mended."""

    value: Any
    line: int
    flags: tuple[str, ...]


class JsonStream:
    """The text of a JSON file, read as far as it is needed; what was taken is dropped."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._at = 0
        self._line = 1
        self._counted = 0
        self._ended = False
        self._flags: list[str] = []
        self._json = json.JSONDecoder(parse_constant=self._no_number)

    def _no_number(self, name: str) -> None:
        self._flags.append(f"non-finite number {name}")

    @property
    def line(self) -> int:
        """The line of the next character."""
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line

    def _more(self) -> bool:
        """Read as much again as is held; False at the end of the file."""
        if self._ended:
            return False
        _ = self.line
        self._text = self._text[self._at :]
        self._at = self._counted = 0
        raw = self._file.read(max(CHUNK, len(self._text)))
        self._ended = not raw
        self._text += self._bytes.decode(raw, final=self._ended)
        return not self._ended

    def peek(self) -> str:
        """The next character that is not blank; nothing at the end."""
        while True:
            match = _BLANK.match(self._text, self._at)
            self._at = self._at if match is None else match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def take(self, character: str) -> bool:
        """Pass over the character if it is the next one."""
        if self.peek() != character:
            return False
        self._at += 1
        return True

    def value(self) -> Decoded:
        """The next value. Raises NotJsonError, and stays where it is, when there is none."""
        if not self.peek():
            raise NotJsonError("the file ends where a value must stand")
        while True:
            self._flags.clear()
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._may_go_on(error) and self._more():
                    continue
                place = self._text[max(self._at, error.pos - 10) : error.pos + 20]
                raise NotJsonError(f"not JSON: {error.msg} near {shown(place)}") from error
            except (RecursionError, ValueError) as error:
                raise NotJsonError(f"not JSON that can be read: {shown(str(error))}") from error
            if not isinstance(value, str | list | dict) and _NUMBER_END.fullmatch(self._text, end) and self._more():
                continue  # a number may go on, as 1 does in 1e5
            line, text = self.line, self._text[self._at : end]
            self._at = end
            return Decoded(*self._mended(value, text, line))

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - NEAR_END

    def _mended(self, value: Any, text: str, line: int) -> tuple[Any, int, tuple[str, ...]]:
        flags = list(self._flags)
        if "\ufffd" in text:
            flags.append("characters that are not UTF-8, or U+FFFD")
        if _ESCAPED_SURROGATE.search(text):
            try:
                value = mend_json(value, "", flags)
            except RecursionError as error:
                raise NotJsonError("nested too deep to be read") from error
        return value, line, tuple(flags)

    def items(self) -> Iterator[Decoded | NotJsonError]:
        """The items of the array that begins here. An item that is not JSON is passed over, and its error yielded.

        Where the array ends without its bracket, an error is yielded too, and reading may go on behind it.
        """
        self.take("[")
        while not self.take("]"):
            if not self.peek():
                yield NotJsonError("the array is not closed: the file was cut")
                return
            try:
                item = self.value()
            except NotJsonError as error:
                if not self._skip_item():
                    yield NotJsonError(f"{error}; this record and what stands after it cannot be told apart")
                    return
                yield error
            else:
                yield item
            if not self.take(",") and self.peek() not in ("]", ""):
                yield NotJsonError(f"the array is not closed: {shown(self.peek())} where a comma or bracket must stand")
                return

    def _skip_item(self) -> bool:
        """Go to the comma or bracket that ends the item here, by its brackets alone; False when there is none."""
        depth = 0
        while True:
            end = self._at
            for match in _STRUCTURE.finditer(self._text, self._at):
                mark = match[0]
                depth += (mark in "[{") - (mark in "]}")
                if (depth < 0 and mark == "]") or (depth == 0 and mark == ","):
                    self._at = match.start()
                    return True
                depth, end = max(depth, 0), match.end()
            self._at = end
            if not self._more():
                self._at = len(self._text)
                return False

    def skip_line(self) -> None:
        """Go to the beginning of the next line."""
        while (place := self._text.find("\n", self._at)) < 0:
            self._at = len(self._text)
            if not self._more():
                return
        self._at = place + 1
