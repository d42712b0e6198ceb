"""Whether a text holds a value in other words: numbers in any script, parts of words, the same signs run together.

`facts` compares values of known kinds; this compares any value with any text, as a share from 0 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise

from slea_llm.blame.facts import CHINESE_DIGITS, Wanted, facts, normal
from slea_llm.blame.view import common_words

TOLD = 0.5
"""Share of a value's pieces in a text from which the text tells it."""
_CHINESE_RUN = re.compile(r"[零〇一二两三四五六七八九十百千万]+")
_UNITS: Mapping[str, int] = {"十": 10, "百": 100, "千": 1000}
_ORDINALS: Mapping[str, int] = {
    "first": 1,
    "second": 2,
    "third": 3,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
    "eleventh": 11,
    "twelfth": 12,
    "thirteenth": 13,
    "fourteenth": 14,
    "fifteenth": 15,
    "sixteenth": 16,
    "seventeenth": 17,
    "eighteenth": 18,
    "nineteenth": 19,
    "twentieth": 20,
    "thirtieth": 30,
}
_ORDINAL = re.compile(rf"\b(?:{'|'.join(_ORDINALS)})\b")
_HUNDREDS = re.compile(r"\b(\d{1,3}) (hundred|thousand)\b")
_DAYS: Mapping[str, str] = {
    name[:3]: name for name in ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
}
_DAY = re.compile(r"\b(?:mon|tues?|wed|thu(?:rs?)?|fri|sat|sun)\b")
_SMALL_ZH = frozenset("我你您的了是要不吗呢啊吧请在就给把和有这那也都还个一")


def chinese_number(text: str) -> str:
    """The digits of a number in Chinese signs: one by one (`八〇二`), or by units (`三千二`, `五万`)."""
    if not any(sign in "十百千万" for sign in text):
        return "".join(str(CHINESE_DIGITS.get(sign, 0)) for sign in text)
    total = section = digit = 0
    last = 1
    for sign in text:
        if sign in _UNITS:
            last = _UNITS[sign]
            section += (digit or 1) * last
            digit = 0
        elif sign == "万":
            total, section, digit, last = (total + section + digit or 1) * 10_000, 0, 0, 10_000
        elif sign in "零〇":
            last = 10
        else:
            digit = CHINESE_DIGITS[sign]
    return str(total + section + digit * (last // 10 if digit and last >= 100 else 1))


@lru_cache(maxsize=8192)
def spelled(text: str) -> str:
    """Folded text with every number as digits, in whatever script it stands."""
    text = _CHINESE_RUN.sub(lambda match: chinese_number(match[0]), normal(text))
    text = _ORDINAL.sub(lambda match: str(_ORDINALS[match[0]]), text)
    text = re.sub(r"\b(20|30) ([1-9])\b", lambda match: str(int(match[1]) + int(match[2])), text)
    text = _HUNDREDS.sub(lambda match: str(int(match[1]) * (100 if match[2] == "hundred" else 1000)), text)
    text = _DAY.sub(lambda match: _DAYS[match[0][:3]], text)
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)


@lru_cache(maxsize=8192)
def run_together(text: str) -> str:
    """Letters and digits of a text without anything between them."""
    return "".join(re.findall(r"\w", spelled(text))).replace("_", "")


@lru_cache(maxsize=8192)
def pieces(text: str) -> frozenset[str]:
    """What a text is compared by: numbers, stems of its rarer words, pairs of Chinese signs."""
    plain = spelled(text)
    found: set[str] = set(re.findall(r"\d+", plain))
    small = common_words()["en"]
    for word in re.findall(r"[a-z']+", plain):
        if word not in small and len(word) > 1:
            found.add(stem(word))
    for run in re.findall(r"[\u4e00-\u9fff]+", plain):
        signs = [sign for sign in run if sign not in _SMALL_ZH]
        found |= {one + two for one, two in pairwise(signs)} or set(signs)
    return frozenset(found)


def stem(word: str) -> str:
    """An English word without its ending, cut to six letters."""
    word = word.split("'")[0]
    for ending in ("ings", "ing", "ied", "ies", "ed", "es", "s", "y", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            break
    return word[:6]


@lru_cache(maxsize=16384)
def holds(slot: Wanted, text: str) -> float:
    """How much of a slot's value stands in a text, 0 to 1; of several values the best."""
    if slot.named_in(text):
        return 1.0
    return max((_share(value, text) for value in slot.texts), default=0.0)


def _share(value: str, text: str) -> float:
    close = run_together(value)
    if _near(value, text):
        return 0.7
    # A short number is not told by a longer one that it is a part of.
    if len(close) >= 3 and not (close.isdigit() and len(close) <= 4) and close in run_together(text):
        return 1.0
    mine, theirs = pieces(value), pieces(text)
    if not mine:
        return 1.0 if close and close in run_together(text) else 0.0
    numbers = {piece for piece in mine if piece.isdigit()}
    found = mine & theirs
    share = len(found) / len(mine)
    if numbers and not numbers & found:
        return min(share, 0.4)
    if not numbers and any("\u4e00" <= sign <= "\u9fff" for sign in close):
        signs = set(close) - _SMALL_ZH
        share = max(share, 0.8 * len(signs & set(spelled(text))) / max(len(signs), 1)) if len(signs) > 1 else share
    return share


def _near(value: str, text: str) -> bool:
    """Whether a text has a time by its hour alone, or a date by its day or as `7.15`."""
    plain = spelled(text)
    for fact in facts(value):
        if fact.kind == "time":
            hour, minute = fact.value.strip("~").split(":")
            hours = {int(hour), int(hour) % 12 or 12}
            tail = "" if minute == "00" else rf"[:.点]?{minute}"
            if any(re.search(rf"(?<![\d.:]){one}(?::00)?{tail}(?![\d%])", plain) for one in hours):
                return True
        if fact.kind == "date" and "?" not in fact.value:
            month, day = (int(part) for part in fact.value.split("-"))
            if re.search(rf"(?<!\d)0?{month}[./-]0?{day}(?!\d)|(?<![\d月]){day}(?:[号日]|st\b|nd\b|rd\b|th\b)", plain):
                return True
    return False


def tells(slot: Wanted, text: str) -> bool:
    """Whether a text tells a slot's value, in whatever words."""
    return holds(slot, text) >= TOLD


def overlap(one: str, other: str) -> float:
    """Share of pieces that two texts have in common."""
    first, second = pieces(one), pieces(other)
    return len(first & second) / max(len(first | second), 1)
