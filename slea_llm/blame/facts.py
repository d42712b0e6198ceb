"""Values in free text, English and Chinese: times, phone numbers, days, dates, money, codes, addresses, counts.

What a user says is compared with its goal by kind: two times of day can contradict each other, a time and a dish not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from slea_llm.blame.choices import CHOICES, patterns
from slea_llm.users.speech import folded

_ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_TENS: Mapping[str, int] = {
    "twenty": 20,
    "thirty": 30,
    "forty": 40,
    "fifty": 50,
    "sixty": 60,
    "seventy": 70,
    "eighty": 80,
    "ninety": 90,
}
_NUMBERS: Mapping[str, int] = {
    **{word: number for number, word in enumerate((*_ONES, *_TEENS))},
    **_TENS,
    "a couple of": 2,
    "couple of": 2,
    "a dozen": 12,
}
CHINESE_DIGITS: Mapping[str, int] = {char: number for number, char in enumerate("零一二三四五六七八九")} | {
    "两": 2,
    "俩": 2,
}
_WORD_NUMBER = re.compile(
    rf"\b(?:{'|'.join(_TENS)})[- ](?:{'|'.join(_ONES[1:10])})\b"
    rf"|\b(?:{'|'.join(sorted(_NUMBERS, key=len, reverse=True))})\b"
)
_ZH_NUMBER = re.compile(
    r"(?:[一二两三四五六七八九]?十[一二三四五六七八九]?|[一二两俩三四五六七八九])(?=[份人晚天个位张间点碗盘客套日号月杯块元])"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)"
)
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_ROAD = r"(?:street|road|avenue|lane|drive|boulevard|court|square|st|rd|ave|ln|dr|blvd)"
_LONG_ROAD: Mapping[str, str] = {
    "st": "street",
    "rd": "road",
    "ave": "avenue",
    "ln": "lane",
    "dr": "drive",
    "blvd": "boulevard",
}
_UNIT_NAMES: Mapping[str, str] = {
    **dict.fromkeys(
        ("people", "persons", "person", "guests", "guest", "passengers", "travellers", "adults", "人", "位"), "people"
    ),
    **dict.fromkeys(("nights", "night", "晚"), "nights"),
    **dict.fromkeys(("days", "day", "天"), "days"),
    **dict.fromkeys(("tickets", "ticket", "张"), "tickets"),
    **dict.fromkeys(("rooms", "room", "间"), "rooms"),
    **dict.fromkeys(
        (
            "portions",
            "portion",
            "servings",
            "serving",
            "pieces",
            "piece",
            "orders",
            "plates",
            "份",
            "碗",
            "盘",
            "客",
            "套",
            "个",
            "杯",
        ),
        "portions",
    ),
}
_UNIT = "|".join(sorted(map(re.escape, _UNIT_NAMES), key=len, reverse=True))
_YES = frozenset({"yes", "true", "y", "needed", "included", "required", "是", "要", "有", "需要"})
_NO = frozenset({"no", "false", "n", "none", "not needed", "否", "不要", "无", "没有", "不需要", "不用"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A value as it stands in a text. `value` is the same for all spellings; `unit` is given for counts."""

    kind: str
    value: str
    quote: str
    unit: str = ""


@lru_cache(maxsize=4096)
def normal(text: str) -> str:
    """Folded text with number words as digits."""
    text = _WORD_NUMBER.sub(lambda match: str(_number(match[0])), folded(text))
    return _ZH_NUMBER.sub(lambda match: str(_zh_number(match[0])), text)


def _number(words: str) -> int:
    if words in _NUMBERS:
        return _NUMBERS[words]
    head, _, tail = words.replace("-", " ").rpartition(" ")
    total = _NUMBERS.get(head, 0)
    return total + _NUMBERS[tail] if total in _TENS.values() else total


def _zh_number(text: str) -> int:
    tens, ten, ones = text.partition("十")
    if not ten:
        return CHINESE_DIGITS[text]
    return 10 * (CHINESE_DIGITS[tens] if tens else 1) + (CHINESE_DIGITS[ones] if ones else 0)


def _clock(match: re.Match[str]) -> str:
    """`HH:MM`, or `~H:MM` when the half of the day is open."""
    hour, minute = int(match["hour"] or 0), int(match["minute"] or match["minute_zh"] or 0)
    if match["half_zh"]:
        minute = 30
    part = (match["part"] or "").replace(".", "")
    if match["afternoon"] and hour < 12:
        hour += 12
    elif part:
        hour = hour % 12 + (12 if part == "pm" else 0)
    elif 1 <= hour <= 12 and not (match["hour"] or "").startswith("0"):
        return f"~{hour % 12}:{minute:02d}"
    return f"{hour:02d}:{minute:02d}"


def _spoken_clock(match: re.Match[str]) -> str:
    hour = int(match["hour"]) % 12
    minute = {"half past": 30, "quarter past": 15, "a quarter past": 15}.get(match["how"], 45)
    return f"~{(hour - 1) % 12 if minute == 45 else hour}:{minute:02d}"


def _date(month: str, day: str) -> str:
    number = int(month) if month.isdigit() else _MONTHS.index(month[:3]) + 1
    return f"{number:02d}-{int(day):02d}"


def _address(match: re.Match[str]) -> str:
    words = match[0].replace(".", "").split()
    return " ".join(_LONG_ROAD.get(word, word) for word in words)


_Read = Callable[[re.Match[str]], str]
# re.ASCII where a value may stand right behind a Chinese sign, which is a letter to `\b` otherwise.
_READERS: tuple[tuple[str, re.Pattern[str], _Read], ...] = (
    ("email", re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+", re.ASCII), lambda m: m[0]),
    ("date", re.compile(r"\b\d{4}[-/](\d{1,2})[-/](\d{1,2})\b", re.ASCII), lambda m: _date(m[1], m[2])),
    ("date", re.compile(rf"\b({_MONTH})\.? (\d{{1,2}})(?:st|nd|rd|th)?\b"), lambda m: _date(m[1], m[2])),
    ("date", re.compile(rf"\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? ({_MONTH})\b"), lambda m: _date(m[2], m[1])),
    ("date", re.compile(r"(\d{1,2})月(\d{1,2})[日号]"), lambda m: _date(m[1], m[2])),
    (
        "date",
        re.compile(r"\bthe (\d{1,2})(?:st|nd|rd|th)\b(?! (?:floor|street|avenue|time))"),
        lambda m: f"??-{int(m[1]):02d}",
    ),
    ("address", re.compile(rf"\b\d{{1,5}} (?:[a-z']+ ){{1,3}}{_ROAD}\b"), _address),
    ("address", re.compile(r"[\u4e00-\u9fff]{2,4}(?:路|街|大道|巷)\d{1,4}号"), lambda m: m[0]),
    (
        "code",
        re.compile(r"#?\b(?=[a-z\d-]*\d)(?=[a-z\d-]*[a-z])[a-z]{1,4}-?\d{3,}[a-z\d]*\b", re.ASCII),
        lambda m: m[0].strip("#"),
    ),
    ("money", re.compile(r"[$€£¥] ?(\d+(?:,\d{3})*(?:\.\d+)?)"), lambda m: m[1].replace(",", "")),
    (
        "money",
        re.compile(
            r"\b(\d+(?:,\d{3})*(?:\.\d+)?) ?(?:dollars|usd|euros?|pounds|bucks|yuan|rmb)\b"
            r"|(\d+(?:\.\d+)?) ?[元块](?!钱的)",
            re.ASCII,
        ),
        lambda m: (m[1] or m[2]).replace(",", ""),
    ),
    (
        "phone",
        re.compile(r"(?<![\d-])(?:\+?\d{1,3}[- .])?(?:\(?\d{3,4}\)?[- .]?)?\d{3,4}[- .]?\d{4}(?![\d-])"),
        lambda m: re.sub(r"\D", "", m[0]),
    ),
    (
        "time",
        re.compile(r"\b(?P<how>half past|(?:a )?quarter (?:past|to)) (?P<hour>\d{1,2})\b"),
        _spoken_clock,
    ),
    (
        "time",
        re.compile(
            r"(?P<afternoon>下午|晚上|傍晚)?(?<![\d.$€£#])(?P<hour>[01]?\d|2[0-3])"
            r"(?:[:.](?P<minute>[0-5]\d)(?![\d%])|点(?:(?P<half_zh>半)|(?P<minute_zh>[0-5]?\d)分?)?(?!餐|菜|单)"
            r"|(?= ?[ap]\.?m\b)| o'?clock)(?: ?(?P<part>[ap]\.?m)\b)?"
        ),
        _clock,
    ),
    ("time", re.compile(r"\b(noon|midnight)\b"), lambda m: "12:00" if m[1] == "noon" else "00:00"),
    ("day", re.compile(rf"\b({'|'.join(_DAYS)})s?\b"), lambda m: m[1]),
    (
        "day",
        re.compile(r"(?:周|星期|礼拜)([1-7一二三四五六日天])"),
        lambda m: (
            _DAYS["一二三四五六日".index(m[1].replace("天", "日"))] if not m[1].isdigit() else _DAYS[int(m[1]) - 1]
        ),
    ),
)
_COUNT = re.compile(rf"(?<![\d.:/-])(\d{{1,3}})(?: (?:other|more|full|extra|large|small|adult))? ?({_UNIT})(?![a-z])")


@lru_cache(maxsize=4096)
def facts(text: str) -> tuple[Fact, ...]:
    """The values that a text names, each place once, the more special kind first."""
    return tuple(_facts(normal(text)))


def _facts(plain: str) -> Iterator[Fact]:
    rest = plain
    for kind, pattern, read in _READERS:
        found: list[Fact] = []

        def take(match: re.Match[str], kind: str = kind, read: _Read = read, found: list[Fact] = found) -> str:
            found.append(Fact(kind=kind, value=read(match), quote=match[0].strip()))
            return "\1"

        rest = pattern.sub(take, rest)
        yield from found
    for match in _COUNT.finditer(rest):
        yield Fact(kind="count", value=match[1], quote=match[0], unit=_UNIT_NAMES[match[2]])
    for kind, value, pattern in patterns():
        if chosen := pattern.search(plain):
            yield Fact(kind=kind, value=value, quote=chosen[0])


def same(one: Fact, other: Fact) -> bool:
    """Whether two facts of one kind say the same: a time with an open half of the day fits both halves."""
    if one.kind != other.kind:
        return False
    if one.kind == "time":
        return one.value == other.value or ("~" in one.value + other.value and _half(one.value) == _half(other.value))
    if one.kind == "date" and "?" in one.value + other.value:
        return one.value[-2:] == other.value[-2:]
    if one.kind == "address" and not one.value.isascii():  # what stands before a Chinese address is not parted from it
        return one.value.endswith(other.value) or other.value.endswith(one.value)
    if one.kind == "phone":
        return one.value.endswith(other.value[-7:]) and other.value.endswith(one.value[-7:])
    return one.value == other.value


def _half(value: str) -> str:
    hour, minute = value.lstrip("~").split(":")
    return f"{int(hour) % 12}:{minute}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One slot of a goal: its name, the texts that it may be told by (any of them will do), and the facts in them.

    `wrong` holds what the task lets its user say wrongly at first, `means` what the environment should note where it
    notes a finding of its own and not the words.
    """

    slot: str
    texts: tuple[str, ...]
    facts: tuple[Fact, ...]
    wrong: tuple[str, ...] = ()
    means: str = ""

    def named_in(self, text: str) -> bool:
        """Whether a text names this value."""
        named = facts(text)
        values = tuple(one for one in self.facts if one.kind not in CHOICES)
        if _names(text, self.texts) or any(same(one, other) for one in values for other in named):
            return True
        chosen = () if values or not self.is_short else self.facts
        return bool(chosen) and all(any(same(one, other) for other in named) for one in chosen)

    def told_in(self, text: str) -> bool:
        """Whether a text names this value, or the wrong one that the task allows."""
        return self.named_in(text) or _names(text, self.wrong)

    def is_value(self, value: str) -> bool:
        """Whether a noted value is this one, in whatever spelling."""
        number = _digits(value)
        return (number is not None and number in self.numbers) or self.named_in(value)

    def is_noted(self, noted: str) -> bool:
        """Whether what an environment noted is right."""
        return noted == self.means if self.means else self.is_value(noted)

    @property
    def is_short(self) -> bool:
        """Whether the value is a word or two, no description of something."""
        return all(len(text.split()) <= 3 and len(text) <= (24 if text.isascii() else 8) for text in self.texts)

    @property
    def wants(self) -> bool | None:
        """What the slot says that is answered by yes or no; None for one that has a value."""
        plain = {normal(text).strip() for text in self.texts}
        return True if plain <= _YES else False if plain <= _NO else None

    @property
    def is_range(self) -> bool:
        """Whether the goal leaves room: a range, a list, a lower bound."""
        return len(self.texts) > 1 or (
            len(re.findall(r"\d+", normal(self.texts[0]).replace(":", ""))) > 1
            and not any(fact.kind in ("phone", "address", "date", "code", "email") for fact in self.facts)
        )

    @property
    def numbers(self) -> tuple[str, ...]:
        """The values as digits when they are plain numbers."""
        digits = [_digits(text) for text in self.texts]
        return tuple(one for one in digits if one is not None)


def _digits(text: str) -> str | None:
    plain = normal(text).strip()
    if plain in CHINESE_DIGITS:
        return str(CHINESE_DIGITS[plain])
    return plain if plain.isdigit() and len(plain) <= 3 else None


def _names(text: str, values: Sequence[str]) -> bool:
    plain = normal(text)
    for value in values:
        number = _digits(value)
        if number is not None and re.search(rf"(?<![\d:./-]){number}(?![\d:/]|\.\d)", plain):
            return True
        if number is None and _holds(plain, normal(value)):
            return True
    return False


def _holds(text: str, value: str) -> bool:
    value = " ".join(re.sub(r"[^\w\s:.@-]", " ", value).split())
    if not value:
        return False
    if re.search(r"[\u4e00-\u9fff]", value):
        return value in text.replace(" ", "") or value in text
    plain = " ".join(re.sub(r"[^\w\s:.@-]", " ", text).split())
    return re.search(rf"(?<!\w){re.escape(value)}(?:s|es)?(?!\w)", plain) is not None


PROSE = ("story", "description", "text", "instructions", "instruction")
"""Keys of a goal, or of its user, under which the goal is told in words."""
NAMES = ("id", "task_id", "language", "ending", "outputs", "actions")
"""Keys of a task that name it or say how it is judged: nothing that a user is there to tell."""
NOT_VALUES = frozenset(
    {
        "wording",
        "patience",
        "volunteers",
        "together",
        "vague",
        "misstated",
        "story",
        "description",
        "text",
        "persona",
        "request",
    }
)
"""Keys of a goal whose content is no value that the user tells."""


def wanted(goal: Mapping[str, Any]) -> tuple[Wanted, ...]:
    """The slots of a goal: those of `user.values`, `values` or `inform`, else its scalars that are no prose or name.

    Values that are there and empty, as in the tasks of games, say that the user has nothing to tell.
    """
    user = goal.get("user")
    agenda = user if isinstance(user, Mapping) else {}
    for source in (agenda.get("values"), goal.get("values"), goal.get("inform")):
        if isinstance(source, Mapping) and source:
            misstated, means = agenda.get("misstated", {}), agenda.get("means", {})
            return tuple(
                replace(
                    slot,
                    wrong=(str(misstated[slot.slot]),) if slot.slot in misstated else (),
                    means=str(means.get(slot.slot, "")),
                )
                for slot in _slots(source, "")
            )
    if isinstance(agenda.get("values"), Mapping):
        return ()
    return tuple(_slots({key: value for key, value in goal.items() if key not in ("user", *NAMES, *PROSE)}, ""))


def _slots(value: Any, name: str) -> Iterator[Wanted]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in NOT_VALUES:
                yield from _slots(item, str(key))
    elif isinstance(value, list | tuple):
        texts = tuple(str(item) for item in value if isinstance(item, str | int | float))
        if texts and len(texts) == len(value):
            yield _wanted(name, texts)
    elif isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
        yield _wanted(name, tuple(part.strip() for part in str(value).split("|") if part.strip()))


def _wanted(slot: str, texts: tuple[str, ...]) -> Wanted:
    return Wanted(slot=slot, texts=texts, facts=tuple(fact for text in texts for fact in facts(text)))
