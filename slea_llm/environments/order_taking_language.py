"""What order_taking understands and says in one language: values in text, acts of the agent, the user's yes and no."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slea_llm import assets, strict_yaml
from slea_llm.environments.speech import normal
from slea_llm.wording import fragments

SLOTS: tuple[str, ...] = ("dish", "quantity", "address", "time", "phone")
TOOL = "place_order"

_SENTENCE = re.compile(r"[^.!?。;\n]+[.!?。;\n]*")
_PLACEHOLDER = re.compile(r"\{(order|" + "|".join(SLOTS) + r")\}")
_PHONE = re.compile(r"(?<!\d)(\d{3})[- ]?(\d{4})(?!\d)")
_TIME = re.compile(
    r"(?P<half_day>下午|晚上|傍晚)?(?<!\d)(?P<hour>[01]?\d|2[0-3])"
    r"(?::(?P<minute>[0-5]\d)(?!\d)|点(?:(?P<half>半)|(?P<spoken>[0-5]?\d)分?)?|(?= ?[ap]m\b))"
    r"(?: ?(?P<part>[ap]m)\b)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Understanding:
    """What a spoken reply does. `reads_back` holds the values that the user hears, by slot; `suggests` those that it
    recommends; `regrets` says that something is not to be had, and `regretted` holds what it names of that."""

    heard: str
    asks: tuple[str, ...]
    reads_back: Mapping[str, str]
    recommends: tuple[str, ...]
    suggests: Mapping[str, str]
    regrets: bool
    regretted: Mapping[str, str]


class Language:
    """One language of order_taking, read from `data/order_taking/<code>.yaml`."""

    def __init__(self, code: str) -> None:
        self.code = code
        source = assets.find("data", f"order_taking/{code}.yaml").read_text(encoding="utf-8")
        self._data: Mapping[str, Any] = strict_yaml.load(source)
        self.dishes: tuple[str, ...] = tuple(self._data["dishes"])
        self.streets: tuple[str, ...] = tuple(self._data["streets"])
        self.quantities: tuple[str, ...] = tuple(self._data["quantities"])
        self.slot_names: Mapping[str, str] = self._data["slot_names"]
        self.separator: str = self._data["separator"]
        self.tool_errors: Mapping[str, str] = self._data["tool_errors"]
        self.prompt: Mapping[str, str] = self._data["prompt"]
        self.notices: Mapping[str, str] = self._data["notices"]
        self.agents: Mapping[str, Any] = self._data["agents"]
        self._read_back = {slots: (form,) for slots, form in self._data["read_back"].items()}
        self._compile()

    def slot_list(self, slots: Iterable[str]) -> str:
        """The names of slots as one says them in a row."""
        return self.separator.join(self.slot_names[slot] for slot in slots)

    def _compile(self) -> None:
        data = self._data
        words = {normal(word): value for value, others in data["quantities"].items() for word in (value, *others)}
        quantity = data["quantity_pattern"].format(quantity=_any_of(words))
        suffix = data["dish_suffix"]
        self._values: Mapping[str, Mapping[str, str]] = {
            "dish": {normal(dish): dish for dish in self.dishes},
            "quantity": words,
            "street": {normal(street): street for street in self.streets},
        }
        self._dish = re.compile(rf"(?<![a-z])({_any_of(self._values['dish'])}){suffix}(?![a-z])")
        address = re.escape(data["address"]).replace(r"\{number\}", r"(?P<number>[1-9]\d{0,3})")
        address = address.replace(r"\{street\}", rf"(?P<street>{_any_of(self._values['street'])})").replace(r"\ ", " ")
        self._address = re.compile(rf"(?<!\d){address}(?![a-z\d])")
        # \0 stands where a dish was: a number in front of it is a quantity.
        any_unit = data["user_unit_pattern"]
        self._counted = re.compile(rf"({quantity})(?:{data['unit_pattern']}|(?:{any_unit})? ?\0)")
        self._number = re.compile(rf"({quantity})(?:{any_unit}| ?\0)")
        self._negation = re.compile(data["negation_pattern"])
        patterns = data["understanding"]
        self._ask = {slot: re.compile(pattern) for slot, pattern in patterns["ask"].items()}
        self._cue = {
            name: re.compile(patterns[name])
            for name in ("request", "open", "recommend", "confirm", "affirm", "deny", "sold_out", "either", "praise")
        }

    def address(self, *, number: int, street: str) -> str:
        return str(self._data["address"]).format(number=number, street=street)

    def values(self, text: str, *, counted: bool = False) -> dict[str, str]:
        """Slot -> value for each slot of which the text names exactly one value ("two or three" names none).

        With `counted` a bare number is no quantity; it needs a unit or a dish behind it.
        """
        named = self._named(text, counted=counted)
        return {slot: next(iter(values)) for slot, values in named.items() if len(values) == 1}

    def _named(self, text: str, *, counted: bool) -> dict[str, set[str]]:
        found: dict[str, list[str]] = {slot: [] for slot in SLOTS}
        rest = normal(text)
        rest = self._take(rest, _PHONE, lambda m: found["phone"].append(f"{m[1]}-{m[2]}"))
        rest = self._take(rest, self._address, lambda m: found["address"].append(self._address_of(m)))
        rest = self._take(rest, _TIME, lambda m: found["time"].append(_clock(m)))
        rest = self._take(rest, self._dish, lambda m: found["dish"].append(self._values["dish"][m[1]]), mark="\0")
        number = self._counted if counted else self._number
        self._take(rest, number, lambda m: found["quantity"].append(self._values["quantity"][m[1]]))
        return {slot: set(values) for slot, values in found.items()}

    def canonical(self, slot: str, value: str) -> str | None:
        """A value as the order notes it down, or None when it is no value of that slot."""
        text = normal(value).strip()
        if slot == "quantity" and text in self._values["quantity"]:
            return self._values["quantity"][text]
        return self.values(value).get(slot)

    def _take(
        self, text: str, pattern: re.Pattern[str], keep: Callable[[re.Match[str]], None], mark: str = "\1"
    ) -> str:
        """Hand each match that is not negated to `keep`, and return the text with all matches blotted out."""

        def blot(match: re.Match[str]) -> str:
            if not self._negation.search(text[: match.start()]):
                keep(match)
            return mark

        return pattern.sub(blot, text)

    def _address_of(self, match: re.Match[str]) -> str:
        return self.address(number=int(match["number"]), street=self._values["street"][match["street"]])

    def describe(self, filled: Mapping[str, str]) -> str:
        """The order in words, as the user hears it in place of `{order}`."""
        values = {slot: filled[slot] for slot in SLOTS if slot in filled}
        said = fragments(self._read_back, values, lambda forms: forms[0])
        return self.separator.join(said) or str(self._data["nothing"])

    def understand(self, reply: str, *, filled: Mapping[str, str]) -> Understanding:
        """The acts of a reply whose thought is removed, given what the tracker has noted down."""
        named: dict[str, str] = {}

        def fill(match: re.Match[str]) -> str:
            slots = filled if match[1] == "order" else [slot for slot in (match[1],) if slot in filled]
            named.update({slot: filled[slot] for slot in slots})
            return self.describe(filled) if match[1] == "order" else filled.get(match[1], "...")

        heard = _PLACEHOLDER.sub(fill, reply)
        asks: set[str] = set()
        suggests: dict[str, str] = {}
        recommends: set[str] = set()
        regrets, regretted = False, {}
        stated: list[str] = []
        for sentence in _SENTENCE.findall(normal(_PLACEHOLDER.sub("\1", reply))):
            if self._cue["sold_out"].search(sentence):
                gone, instead = self._regrets(sentence)
                regrets = True
                regretted.update(gone)
                suggests.update(instead)
                recommends.update(instead)
                asks |= self._asked(sentence) if self._cue["request"].search(sentence) and not instead else set()
                continue
            here = self.values(sentence, counted=True)
            asked = self._asked(sentence) if self._cue["request"].search(sentence) else set()
            if self._cue["recommend"].search(sentence) or ("dish" in here and self._praises(sentence, asked)):
                suggests.update(here)
                recommends.update(here or ("dish",))
                continue
            asks |= asked
            # "One, or more?" offers a choice and reads nothing back.
            if not (asked and self._cue["either"].search(sentence)):
                stated.append(sentence)
        text = " ".join(stated)
        reads_back = {**self.values(text, counted=not self._cue["confirm"].search(text)), **named}
        return Understanding(
            heard=heard,
            asks=tuple(slot for slot in SLOTS if slot in asks and slot not in reads_back),
            reads_back={slot: reads_back[slot] for slot in SLOTS if slot in reads_back},
            recommends=tuple(slot for slot in SLOTS if slot in recommends),
            suggests=suggests,
            regrets=regrets,
            regretted=regretted,
        )

    def _praises(self, sentence: str, asked: set[str]) -> bool:
        """Whether a sentence praises, and neither reads back ("great, right?") nor asks on ("good, and how many?")."""
        praise, confirm = self._cue["praise"].search(sentence), self._cue["confirm"].search(sentence)
        return bool(praise) and not confirm and asked <= {"dish"}

    def _regrets(self, sentence: str) -> tuple[dict[str, str], dict[str, str]]:
        """What a sentence says to be sold out, and what a clause behind that offers in its place."""
        match = self._cue["sold_out"].search(sentence)
        comma = sentence.find(",", match.end() if match else 0)
        head, tail = (sentence[:comma], sentence[comma:]) if comma >= 0 else (sentence, "")
        gone, instead = self.values(head, counted=True), self.values(tail, counted=True)
        if "dish" in gone and "dish" in instead:
            return gone, {"dish": instead["dish"]}
        return self.values(sentence, counted=True), {}

    def asks_advice(self, text: str) -> bool:
        """Whether the user asks for a recommendation."""
        return bool(self._cue["recommend"].search(normal(text)))

    def _asked(self, sentence: str) -> set[str]:
        choice = {slot for slot, values in self._named(sentence, counted=True).items() if len(values) > 1}
        asked = choice | {slot for slot, pattern in self._ask.items() if pattern.search(sentence)}
        if not asked and self._cue["open"].search(sentence):
            return {"dish"}
        return asked

    def verdict(self, text: str) -> bool | None:
        """True for a yes, False for a no (the first of both counts), None for neither."""
        plain = normal(text)
        yes, no = self._cue["affirm"].search(plain), self._cue["deny"].search(plain)
        if no and (not yes or no.start() <= yes.start()):
            return False
        return True if yes else None


def _any_of(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


def _clock(match: re.Match[str]) -> str:
    """`HH:MM` of a time match; 6 pm is 18:00, 12 am is 00:00."""
    hour = int(match["hour"])
    minute = 30 if match["half"] else int(match["minute"] or match["spoken"] or 0)
    if match["half_day"] and hour < 12:
        hour += 12
    elif match["part"] and hour <= 12:
        hour = hour % 12 + (12 if match["part"] == "pm" else 0)
    return f"{hour:02d}:{minute:02d}"
