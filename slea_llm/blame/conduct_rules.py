"""Rules about what a user does with its goal over a dialogue: denials, additions, changes, claims, parroting, loops."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import SequenceMatcher

from slea_llm.blame.facts import Wanted, facts, normal
from slea_llm.blame.faults import Fault, of_user
from slea_llm.blame.view import Line, View, asks_about, common_words, content, cue, names_slot
from slea_llm.users import speech

ALIKE = 0.55
"""Share of content words that two lines have in common from which they say the same."""
COPIED = 0.75
"""Share of a line's words that stand in runs of the agent's last words, from which it gives them back."""
_NUMBER = re.compile(r"(?<![\d.:/-])\d+(?:[.,]\d+)?")
_SENTENCE = re.compile(r"[^.!?。！？;；\n]+[.!?。！？;；\n]*")


def conduct_faults(seen: View) -> Iterator[Fault]:
    """Faults that show only when a line is held against the goal and the rest of the dialogue."""
    yield from _claims(seen)
    yield from _loops(seen)
    yield from _parrots(seen)
    if not seen.wanted:
        return
    yield from _denials(seen)
    yield from _chosen(seen)
    yield from _changes(seen)
    yield from _additions(seen)
    yield from _references(seen)
    yield from _goes(seen)


def _claims(seen: View) -> Iterator[Fault]:
    """A success that is claimed although nobody has reported one."""
    for agent, line in seen.pairs():
        found = cue("claims_done", line.plain)
        if not found or agent is None or cue("conditions", line.plain.partition(found)[0][-24:]):
            continue
        if any(_reports(part) for one in seen.before(line, "agent", "tool") for part in _SENTENCE.findall(one.plain)):
            continue
        yield of_user("claims_success", line, found, note=f"the agent had said: {agent.text[:120]}")


def _reports(sentence: str) -> bool:
    """Whether a sentence of the agent or a tool reports something done."""
    return bool(cue("reports_done", sentence)) and not cue("not_done", sentence) and not cue("asks", sentence)


def _alike(one: str, other: str) -> float:
    first, second = content(one), content(other)
    return len(first & second) / max(len(first | second), 1)


def _loops(seen: View) -> Iterator[Fault]:
    """The same content a third time, in whatever words, while the agent asks for something new."""
    lines: list[Line] = []
    agents: list[str] = []
    for agent, line in seen.pairs():
        same = [] if cue("affirms", line.plain) else [one for one in lines if _says_the_same(one, line)]
        if len(same) >= 2 and agent is not None and cue("asks", agent.plain) and not _asks_known(seen, agent):
            known = " ".join(one.text for one in lines)
            news = any(slot.named_in(line.text) and not slot.named_in(known) for slot in seen.wanted)
            idle = not asks_about(agent, seen.wanted) and any(_alike(agent.text, one) > 0.8 for one in agents)
            if not news and not idle:
                yield of_user("repeats", line, note=f"said before: {same[-1].text[:120]}")
        lines.append(line)
        if agent is not None:
            agents.append(agent.text)


def _says_the_same(one: Line, other: Line) -> bool:
    words = speech.words_of(one.text)
    if len(content(other.text)) >= 2:
        return _alike(one.text, other.text) >= ALIKE
    short = bool(cue("affirms", other.plain) or cue("denies", other.plain))
    return len(words) >= 2 and not short and words == speech.words_of(other.text)


def _asks_known(seen: View, agent: Line) -> bool:
    """Whether the agent asks for nothing but what it was told."""
    before = tuple(seen.before(agent, "user"))
    asked = asks_about(agent, seen.wanted)
    return bool(asked) and all(seen.told(slot, before) for slot in asked)


def _parrots(seen: View) -> Iterator[Fault]:
    """Lines that are made of the agent's last words and tell nothing."""
    found: list[Line] = []
    for agent, line in seen.pairs():
        if agent is None or not cue("asks", agent.plain):
            continue
        if any(slot.named_in(line.text) for slot in seen.wanted) or facts(line.text):
            continue
        if _copied(line.text, agent.text):
            found.append(line)
            yield of_user("echoes", line, weight="serious" if len(found) > 1 else "suspect")


def _copied(text: str, source: str) -> bool:
    words, given = speech.words_of(text), speech.words_of(source)
    least = 4 if any(word.isascii() for word in words) else 6
    parts = {" ".join(speech.words_of(part)) for part in _SENTENCE.findall(source) if "?" in part or "？" in part}
    if len(words) >= 2 and ("?" in text or "？" in text) and " ".join(words) in parts:
        return True
    if len(words) < least:
        return False
    blocks = SequenceMatcher(None, words, given, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks if block.size >= 2) >= COPIED * len(words)


def _denials(seen: View) -> Iterator[Fault]:
    """A detail of the goal that the user says it does not have, or a no of the goal that it answers with yes."""
    for agent, line in seen.pairs():
        plain = line.plain
        for slot in seen.wanted:
            wants = slot.wants
            told = seen.told(slot, tuple(seen.before(line, "user")))
            fresh = not told and not seen.told(slot, (line,)) and not cue("complains_of", plain)
            if wants is not False and fresh and (found := _negated(plain, slot)) and "?" not in plain:
                yield of_user("contradicts_goal", line, found, note=f"the goal says {slot.slot}: {slot.texts[0]}")
            elif agent is not None and (note := _against(agent, line, slot, told=told)):
                yield of_user("contradicts_goal", line, note=note)


def _negated(plain: str, slot: Wanted) -> str:
    """The words of a text in which a slot, or a thing that its value names, is denied; empty when there are none."""
    names = sorted(_terms(slot), key=len, reverse=True)
    if not names or {"free", "免费"} & {normal(text) for text in slot.texts}:
        return ""
    ours = "|".join(map(re.escape, names))
    found = re.search(
        rf"\b(?:no|without(?: any)?|(?:don't|do not|didn't|won't) (?:want|need|have|like|eat)(?: any| an?| the)?"
        rf"|hate|not bringing|nobody(?: is| has)?) (?:\w+ )?(?:{ours})s?\b"
        rf"|(?:不要|不用|不需要|没有|讨厌|不带|不含|无需)(?:任何|什么)?(?:{ours})",
        plain,
    )
    return found[0] if found else ""


def _terms(slot: Wanted) -> set[str]:
    """Words that stand for a slot when it is denied: its name, and the things of its value."""
    words = {normal(slot.slot).replace("_", " ")} if slot.wants is not False else set()
    texts = [normal(text) for text in slot.texts if slot.wants is None]
    if any(re.match(r"(?:no|without|not|none)\b|不|无|没|免|忌", text) for text in texts):
        return words  # "no nuts": who says it has no nuts keeps to its goal
    small = common_words()["en"]
    for text in texts:
        words |= {
            word
            for word in re.findall(r"[a-z]{4,}", text)
            if word not in small and word not in ("adults", "people", "persons")
        }
        words |= {part for part in re.findall(r"[\u4e00-\u9fff]{2,}", text)}
    extra = {word[:-1] for word in words if word.isascii() and word.endswith("s") and len(word) > 4}
    extra |= {word[:-1] + "ie" for word in words if word.isascii() and word.endswith("y")}
    extra |= {"children"} if "child" in words else set()
    return {word for word in words | extra if len(word) > 1}


def _against(agent: Line, line: Line, slot: Wanted, *, told: bool) -> str:
    """Why an answer to a question about a slot goes against the goal; empty when it does not."""
    wants = slot.wants
    asking = [part for part in _SENTENCE.findall(agent.plain) if cue("asks", part) or cue("confirms", part)]
    part = asking[-1] if asking else ""
    plain = line.plain
    no, yes = _says_no(plain), bool(cue("affirms", plain)) and not cue("denies", plain)
    if not part or not (no or yes) or (wants is None and slot.told_in(line.text)):
        return ""
    if wants is None and (told or re.search(r"\b(?:other|else|another|different)\b|别的|其他|另外|还有", part)):
        return ""
    note = f"asked {part.strip()[:120]!r}, the goal says {slot.slot}: {slot.texts[0]}"
    if wants is not False and _negated(part, slot):  # "no children?": a yes and a no both agree to it
        return note if yes or len(speech.words_of(plain)) <= 3 else ""
    if not names_slot(part, slot) or not re.match(
        r"\W*(?:and |or )?(?:do|does|is|are|any|will|would|have|has|with|should|shall|need)\b"
        r"|.*(?:吗|有没有|是否|要不要|需不需要)|.*\bany\b",
        part,
    ):
        return ""
    if wants is None:
        return (
            note
            if no and re.search(r"\b(?:any|do you have|are there|is there)\b|有没有|有.{0,8}吗|有什么", part)
            else ""
        )
    return note if (no and wants) or (yes and not wants) else ""


def _says_no(plain: str) -> bool:
    return bool(
        re.match(
            r"\W*(?:no|nope|nah|none|nothing|not at all|neither)\b(?! problem)|\W*(?:没有?|不用|不要|不需要|没|无)",
            plain,
        )
    )


def _chosen(seen: View) -> Iterator[Fault]:
    """Of two things that the agent names, one of them the goal's, the user takes the other."""
    for agent, line in seen.pairs():
        if agent is None or "?" in line.plain:
            continue
        for one, other in _pairs_of(agent.plain):
            for right, wrong in ((one, other), (other, one)):
                slots = [slot for slot in seen.wanted if slot.wants is None and slot.named_in(right)]
                before = tuple(seen.before(agent, "user"))
                if not slots or any(slot.named_in(wrong) or slot.is_range or seen.told(slot, before) for slot in slots):
                    continue
                own = content(wrong) - content(right)
                said = content(line.text)
                if own and own <= said and not said & (content(right) - content(wrong)) and not _says_no(line.plain):
                    note = f"the goal says {slots[0].texts[0]}, which was offered"
                    yield of_user("contradicts_goal", line, note=note)


def _pairs_of(plain: str) -> Iterator[tuple[str, str]]:
    for part in _SENTENCE.findall(plain):
        if found := re.search(r"([\w' :]{2,40}?),? or ([\w' :]{2,40})", part):
            words = found[1].split()
            yield " ".join(words[-max(len(found[2].split()), 1) :]), found[2].strip()
        elif found := re.search(r"([\u4e00-\u9fff\w:]{1,8})[,，]?还是([\u4e00-\u9fff\w:]{1,8})", part):
            yield found[1], found[2]


def _changes(seen: View) -> Iterator[Fault]:
    """Values put in place of the goal's: what the user had asked for, it now wants otherwise."""
    made: list[Line] = []
    for _, line in seen.pairs():
        found = cue("revises", line.plain)
        if not found or not seen.before(line, "user") or "?" in line.plain:
            continue
        if any(slot.told_in(line.text) for slot in seen.wanted) or not _new_value(seen, line):
            continue
        made.append(line)
        mended = any(slot.named_in(one.text) for one in seen.after(line, "user") for slot in seen.wanted)
        yield of_user("changes_goal", line, found, weight="serious" if not mended or len(made) > 1 else "minor")


def _new_value(seen: View, line: Line) -> bool:
    """Whether a line names a number, a day or a name that neither the goal nor the agent has."""
    heard = " ".join(one.text for one in seen.before(line, "agent", "tool"))
    numbers = set(_NUMBER.findall(line.plain)) - set(re.findall(r"\d+(?:[.,]\d+)?", normal(_goal_words(seen) + heard)))
    names = {word for word in re.findall(r"(?<![.!?] )(?<!\A)\b[A-Z][a-z]{2,}\b", line.text)}
    names = {word for word in names if word.lower() not in (_goal_words(seen) + heard).lower()}
    values = {fact.quote for fact in facts(line.text) if fact.kind in ("day", "date", "time")}
    values = {one for one in values if one not in normal(_goal_words(seen) + heard)}
    return bool(numbers or names or values)


def _goal_words(seen: View) -> str:
    return json.dumps(seen.trajectory.task, ensure_ascii=False, default=str)


def _additions(seen: View) -> Iterator[Fault]:
    """Things that the user asks for on top, and its goal does not hold."""
    known = content(_goal_words(seen).replace("_", " "))
    for agent, line in seen.pairs():
        earlier = seen.before(line, "user")
        for part in _SENTENCE.findall(line.plain) if earlier else ():
            found = cue("adds", part)
            if (
                not found
                or "?" in part
                or _let_down(agent)
                or cue("demands", part)
                or cue("complains", part)
                or cue("complains_of", part)
                or any(slot.told_in(part) or names_slot(part, slot) for slot in seen.wanted)
            ):
                continue
            heard = {word for one in seen.before(line, "user", "agent", "tool") for word in content(one.text)}
            new = {word for word in content(part) - known - heard if not cue("plain_words", word)}
            if len(new) >= (2 if any(word.isascii() for word in new) else 3):
                yield of_user(
                    "invents", line, part.strip(), note=f"the goal has nothing of {', '.join(sorted(new))[:120]}"
                )


def _let_down(agent: Line | None) -> bool:
    """Whether the agent has failed the user, so that it may look for another way."""
    return agent is None or bool(cue("agent_fails_user", agent.plain)) or not cue("asks", agent.plain)


def _references(seen: View) -> Iterator[Fault]:
    """A value that was never told and is said to have been."""
    for agent, line in seen.pairs():
        found = cue("false_reference", line.plain)
        if not found or agent is None or not (cue("asks", agent.plain) or cue("needs", agent.plain)):
            continue
        before = tuple(seen.before(line, "user"))
        if content(line.text) & {word for one in before for word in content(one.text)}:
            continue
        untold = [slot for slot in seen.wanted if not seen.told(slot, before)]
        if not untold or any(slot.named_in(line.text) for slot in seen.wanted):
            continue
        known = [slot for slot in seen.wanted if slot not in untold]
        if any(names_slot(agent.plain, slot) and not slot.named_in(agent.text) for slot in known):
            continue
        if any(seen.told(slot, tuple(seen.after(line, "user"))) for slot in untold):
            continue
        yield of_user("false_reference", line, found, note=f"{untold[0].slot} was never told")


def _goes(seen: View) -> Iterator[Fault]:
    """A farewell in place of an answer."""
    if seen.left or seen.trajectory.termination not in ("failure", "max_turns"):
        return
    for agent, line in seen.pairs():
        if agent is None or not asks_about(agent, seen.wanted) or _asks_known(seen, agent):
            continue
        found = cue("goes", line.plain)
        if found and not seen.after(line, "user") and not any(slot.named_in(line.text) for slot in seen.wanted):
            yield of_user("stops_early", line, found, note=f"asked: {agent.text[:120]}")
