"""Rules about what a user agrees to or denies when the agent reads back what it understood."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from slea_llm.blame.choices import CHOICES
from slea_llm.blame.facts import Fact, Wanted, facts, normal, same
from slea_llm.blame.faults import Fault, of_user
from slea_llm.blame.view import Line, View, content, cue

COUNTED_BY: Mapping[str, tuple[str, ...]] = {
    "people": ("people", "guests", "passengers", "persons", "人"),
    "nights": ("stay", "nights", "晚"),
    "portions": ("quantity", "portions", "份"),
}
"""Unit -> words in the names of slots that it counts."""


def read_backs(seen: View) -> Iterator[Fault]:
    """What a user agrees to or denies when the agent reads back."""
    for agent, line in seen.pairs():
        if agent is None or not cue("confirms", agent.plain):
            continue
        wrong, right = _compared(agent, seen)
        plain = line.plain
        denies, affirms = cue("denies", plain), cue("affirms", plain)
        mends = any(slot.named_in(line.text) for slot in seen.wanted)
        if wrong and affirms and not denies and not any(slot.named_in(line.text) for slot, _ in wrong):
            slot, said = wrong[0]
            yield of_user("wrong_agreement", line, note=f"the agent said {said!r}, the goal {slot.texts[0]!r}")
        elif denies and not wrong and right and not mends and _all_known(seen, agent):
            yield of_user("wrong_denial", line, note=f"all that was read back is right: {agent.text[:120]}")


def _compared(agent: Line, seen: View) -> tuple[list[tuple[Wanted, str]], list[Wanted]]:
    """Slots that a line of the agent gets wrong, with what it says, and those that it gets right."""
    part = read_back(agent)
    said = facts(part)
    wrong: list[tuple[Wanted, str]] = []
    right: list[Wanted] = []
    for slot in seen.wanted:
        clash = "" if slot.is_range else _clash(slot, said, seen, offered=bool(cue("offers", agent.plain)))
        if clash:
            wrong.append((slot, clash))
        elif slot.named_in(part):
            right.append(slot)
        elif not slot.is_range:
            noted = _noted(seen, slot, agent) or _other_number(part, slot, seen)
            if noted:
                wrong.append((slot, noted))
    if not wrong and (left := _left_over(agent, part, seen)):
        wrong.append(left)
    return wrong, right


_OPENS = re.compile(
    r"\b(?:to confirm|to sum up|to summari[sz]e|in short|so(?: that's| you| it's)?|then"
    r"|i(?:'ve| have) (?:put|pencilled|noted|got)|i'd propose"
    r"|let me (?:repeat|read)|your order is|summary)\b|确认一下|跟您确认|跟您核对|总结|也就是|那就|即"
)


def read_back(agent: Line) -> str:
    """From where a line of the agent reads back; the whole line when no word says where."""
    places = [match.start() for match in _OPENS.finditer(agent.plain)]
    parts = [agent.plain[place:] for place in places]
    return next((part for part in reversed(parts) if facts(part) or re.search(r"\d|[,，、]", part)), agent.plain)


def _clash(slot: Wanted, said: Sequence[Fact], seen: View, *, offered: bool) -> str:
    """What is said in place of one of a slot's facts; empty when each is right, or none is spoken of."""
    for fact in said:
        if fact.kind == "time" and offered:
            continue  # a train at another time than the one wished for is an offer, not a mistake
        others = rivals(fact, seen)
        mine = any(other_slot is slot for other_slot, _ in others)
        if mine and not any(same(one, other) for one in said for _, other in others):
            return fact.quote
    return ""


def _other_number(part: str, slot: Wanted, seen: View) -> str:
    """The number that stands for a plain number of the goal, where there is one of each and they differ."""
    numeric = [one for one in seen.wanted if one.numbers or re.fullmatch(r"\d+", normal(one.texts[0]))]
    if len(numeric) != 1 or numeric[0] is not slot:
        return ""
    rest = normal(part)
    for other in seen.wanted:
        for text in other.texts if other is not slot else ():
            rest = rest.replace(normal(text), "\1")
    pays = re.search(r"amount|sum|price|budget|limit|金额|额度|钱", slot.slot.lower())
    for fact in facts(rest):
        if fact.kind != "count" and not (fact.kind == "money" and pays):
            rest = rest.replace(fact.quote, " ")
    found = set(re.findall(r"(?<![a-z\d./-])(?<!\d:)\d+(?:,\d{3})*(?![\d:/%]|\.\d)", rest))
    if found & {*slot.numbers, *(normal(text) for text in slot.texts)}:
        return ""
    if pays:
        return found.pop() if len(found) == 1 else ""
    before = re.findall(r"(?<![a-z\d./-])(?<!\d:)(\d+) ?(?:[a-z]+ |[份个碗盘杯张])?\x01", rest)
    return before[0] if len(found) == 1 and before else ""


def _left_over(agent: Line, part: str, seen: View) -> tuple[Wanted, str] | None:
    """New words of a list that is read back, where all slots but one are named and the user had told that one."""
    before = tuple(seen.before(agent, "user"))
    values = [slot for slot in seen.wanted if slot.wants is None and not slot.is_range and seen.told(slot, before)]
    open_ = [slot for slot in values if not slot.named_in(part)]
    if len(open_) != 1 or len(values) < 2 or open_[0].numbers:
        return None
    known = content(
        " ".join(
            [
                *(one.text for one in seen.before(agent, "user", "agent")),
                *(t for slot in seen.wanted for t in slot.texts),
            ]
        )
    )
    for item in re.split(r"[,，、;；.?!。？！:：]+|\b(?:to|from|at|on|for|with|and|of|in|by)\b|[到去从和份]", part):
        new = {word for word in content(item) - known if not cue("plain_words", word) and not word.isdigit()}
        if not new or any(cue(name, item.strip()) for name in ("confirms", "asks", "affirms", "denies", "regrets")):
            continue
        if any(word.isascii() for word in new) or re.fullmatch(r"\d*[\u4e00-\u9fff]{2,6}", item.strip()):
            return open_[0], item.strip()
    return None


def _noted(seen: View, slot: Wanted, agent: Line) -> str:
    """The wrong value of a slot that the environment had noted down and the agent reads back; empty without one."""
    if agent.turn >= len(seen.trajectory.turns):
        return ""
    filled = seen.trajectory.turns[agent.turn].state_before.get("filled", {})
    value = filled.get(slot.slot) if hasattr(filled, "get") else None
    wrong = isinstance(value, str) and value.lower() in agent.text.lower() and not slot.is_value(value)
    return str(value) if wrong else ""


def _all_known(seen: View, agent: Line) -> bool:
    """Whether the agent reads back most of the goal: a no to a part of it may mean that something is missing."""
    return sum(slot.named_in(agent.text) for slot in seen.wanted) >= max(2, len(seen.wanted) - 1)


def rivals(fact: Fact, seen: View) -> list[tuple[Wanted, Fact]]:
    """The goal's facts of the same kind, with their slots; a count's are those that its unit counts."""
    found = []
    for slot in seen.wanted:
        if fact.kind == "count":
            words = COUNTED_BY.get(fact.unit, (fact.unit,))
            if any(word in slot.slot.lower() for word in words):
                numbers = slot.numbers
                found += [(slot, Fact(kind="count", value=one, quote=one, unit=fact.unit)) for one in numbers]
        if fact.kind in CHOICES and not slot.is_short:
            continue
        found += [(slot, other) for other in slot.facts if (other.kind, other.unit) == (fact.kind, fact.unit)]
    return found
