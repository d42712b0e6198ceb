"""Rules about what a user says of its goal: what it tells, agrees to, denies, keeps back, and when it goes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from slea_llm.blame.exchanges import exchanges
from slea_llm.blame.facts import Fact, Wanted, facts, normal, same
from slea_llm.blame.faults import Fault, Weight, of_user
from slea_llm.blame.likeness import pieces
from slea_llm.blame.read_backs import read_backs, rivals
from slea_llm.blame.view import Line, View, asks_about, asks_own, common_words, cue
from slea_llm.users import speech

MADE_UP: Mapping[str, str] = {
    "phone": r"\b(?:phone|mobile|number|contact)\b|电话|手机|号码|联系",
    "email": r"\be-?mail|\bcontact\b|邮箱|邮件",
    "code": r"\b(?:code|number|reference|id)\b|号|码",
    "money": r"\b(?:how much|budget|price|cost|amount|spend)\b|多少钱|预算|价|金额",
    "date": r"\b(?:date|day|when|birth|born)\b|日期|哪天|几号|什么时候|生日|出生",
    "address": r"\b(?:address|where|street)\b|地址|哪",
}
"""Kinds of facts that nobody tells who has none -> words of a question for one."""


def goal_faults(seen: View) -> Iterator[Fault]:
    """Faults of the user against its goal."""
    yield from _wrong_values(seen)
    yield from _wrong_words(seen)
    yield from read_backs(seen)
    yield from _unanswered(seen)
    yield from _phrases(seen)
    yield from _ending(seen)


def _wrong_values(seen: View) -> Iterator[Fault]:
    """Facts that a user tells and its goal does not hold."""
    if not seen.wanted:
        return
    for line in seen.user_lines:
        heard = [fact for one in seen.before(line, "agent", "tool") for fact in facts(one.text)]
        for fact in facts(line.text):
            if any(same(fact, other) for other in heard) or _is_denied(line, fact):
                continue
            if _corrected(seen, line) or (fact.kind == "date" and _asked_birth(seen, line)):
                continue
            others = rivals(fact, seen)
            if any(_fits(fact, slot, line) for slot, _ in others):
                continue
            if others and not any(same(fact, other) for _, other in others):
                slots = tuple(slot for slot, _ in others)
                put_right = any(seen.told(slot, tuple(seen.after(line, "user"))) for slot in slots)
                note = f"the goal says {', '.join(sorted({text for slot in slots for text in slot.texts}))}"
                yield of_user(
                    "contradicts_goal", line, fact.quote, weight="minor" if put_right else "serious", note=note
                )
            elif not others and fact.kind in MADE_UP and not _holds_number(fact, seen):
                weight: Weight = "minor" if _was_asked(seen, line, fact.kind) else "serious"
                yield of_user("made_up", line, fact.quote, weight=weight, note=f"the goal holds no {fact.kind}")


def _corrected(seen: View, line: Line) -> bool:
    """Whether a line sets the agent right, or asks what there is: the values in it are not what the user wants."""
    right = bool(cue("complains_of", line.plain)) and any(slot.named_in(line.text) for slot in seen.wanted)
    asks = re.match(r"\W*(?:\w+,? )?(?:is|are) there\b|\W*有没有", line.plain) and seen.before(line, "user")
    return right or bool(asks)


def _asked_birth(seen: View, line: Line) -> bool:
    """Whether the agent had asked for a date that is none of a plan: of birth, of expiry."""
    agent = seen.before(line, "agent")[-1:]
    return bool(agent) and re.search(r"\b(?:birth|born|expir)|出生|生日|有效期", agent[0].plain) is not None


def _was_asked(seen: View, line: Line, kind: str) -> bool:
    """Whether the agent had just asked for a value of this kind, for which the goal has no slot."""
    agent = seen.before(line, "agent")[-1:]
    return bool(agent) and bool(cue("asks", agent[0].plain)) and bool(re.search(MADE_UP[kind], agent[0].plain))


def _holds_number(fact: Fact, seen: View) -> bool:
    """Whether the goal holds a value's digits without its unit or sign, or the value says no more than a day."""
    digits = re.sub(r"\D", "", fact.value)
    goal = " ".join(text for slot in seen.wanted for text in slot.texts)
    return (
        "?" in fact.value
        or digits in re.findall(r"\d+", normal(goal).replace(",", ""))
        or digits in re.sub(r"\D", "", goal) * (len(digits) >= 4)
    )


def _fits(fact: Fact, slot: Wanted, line: Line) -> bool:
    """Whether a goal that is a range or a list holds the number, or the task allows the wrong value."""
    numbers = re.findall(r"\d+", normal(" ".join(slot.texts)))
    return fact.value in numbers or (bool(slot.wrong) and slot.told_in(line.text))


def _is_denied(line: Line, fact: Fact) -> bool:
    """`not at 5 pm`: what a user rules out it does not want."""
    before = line.plain.partition(fact.quote)[0][-24:]
    return any(
        before.rstrip().endswith(word)
        for word in (
            "not",
            "not at",
            "not on",
            "not for",
            "not to",
            "instead of",
            "不是",
            "不要",
            "than",
            "before",
            "after",
            "until",
            "says",
            "said",
            "shows",
            "显示",
            "写的是",
            "写着",
            "变成",
        )
    )


def _wrong_words(seen: View) -> Iterator[Fault]:
    """An answer in other words than the goal's, where the goal has words and the user never says them."""
    for agent, line in seen.pairs():
        asked = asks_about(agent, seen.wanted) if agent is not None else ()
        if len(asked) != 1 or asked[0].facts or asked[0].numbers or not _is_statement(line):
            continue
        slot = asked[0]
        if seen.told(slot) or slot.slot in seen.vague or any(other.named_in(line.text) for other in seen.wanted):
            continue
        if _noted_wrong(seen, slot, line):
            yield of_user("contradicts_goal", line, note=f"asked for {slot.slot}, the goal says {slot.texts[0]}")
        else:
            yield of_user(
                "contradicts_goal", line, weight="suspect", note=f"asked for {slot.slot}, never says {slot.texts[0]}"
            )


def _is_statement(line: Line) -> bool:
    plain = line.plain
    words = speech.words_of(plain)
    vague = any(cue(name, plain) for name in ("dont_know", "vague", "refuses", "false_reference"))
    return (
        bool(words)
        and not vague
        and "?" not in plain
        and not (len(words) <= 3 and (cue("affirms", plain) or cue("denies", plain)))
    )


def _noted_wrong(seen: View, slot: Wanted, line: Line) -> bool:
    """Whether the environment noted a value in these words that is not the goal's."""
    for turn in seen.trajectory.turns:
        if turn.index == line.turn - 1:
            filled = turn.state_after.get("filled", {})
            value = filled.get(slot.slot) if hasattr(filled, "get") else None
            return isinstance(value, str) and value.lower() in line.text.lower() and not slot.is_value(value)
    return False


def _unanswered(seen: View) -> Iterator[Fault]:
    """Questions for values of the goal to which the user gives none, again and again."""
    missed: dict[str, list[Line]] = {}
    for agent, line in seen.pairs():
        asked = asks_about(agent, seen.wanted) if agent is not None and not cue("confirms", agent.plain) else ()
        open_slots = [slot for slot in asked if not seen.told(slot, tuple(seen.before(line, "user")))]
        if not open_slots or any(slot.named_in(line.text) for slot in seen.wanted):
            continue
        for kind in ("refuses", "false_reference", "dont_know"):
            if found := cue(kind, line.plain):
                vague = kind == "dont_know"
                if vague and open_slots[0].slot in seen.vague:
                    break
                weight = _later(seen, open_slots, line, "suspect" if vague else "serious")
                yield of_user(
                    "does_not_know" if vague else kind,
                    line,
                    found,
                    weight=weight,
                    note=f"asked for {open_slots[0].slot}",
                )
                break
        for slot in open_slots:
            missed.setdefault(slot.slot, []).append(line)
    for slot in seen.wanted:
        lines = missed.get(slot.slot, [])
        if len(lines) >= 2 and not seen.told(slot, tuple(line for line in seen.lines if line.side != "agent")):
            yield of_user("withholds", lines[-1], note=f"asked {len(lines)} times for {slot.slot}, never told")


def _later(seen: View, slots: Sequence[Wanted], line: Line, weight: Weight) -> Weight:
    """A fault that the user makes good afterwards, or the agent by a tool, is minor."""
    after = tuple(seen.after(line, "user", "tool"))
    return "minor" if all(seen.told(slot, after) for slot in slots) else weight


def _phrases(seen: View) -> Iterator[Fault]:
    """Phrases that are faults where the goal has something to say, whatever the question was."""
    if not seen.wanted:
        return
    for line in seen.user_lines:
        plain = line.plain
        untold = [slot for slot in seen.wanted if not seen.told(slot)]
        if found := asks_own(plain, seen.wanted):
            yield of_user("asks_own", line, found)
        if (found := cue("refuses", plain)) and untold and not _rightly(seen, line):
            yield of_user("refuses", line, found)
        if (found := cue("denies_own", plain)) and _said_before(seen, line, found) and not _corrects(seen, line, found):
            yield of_user("contradicts_itself", line, found)
        if seen.left and line.turn == len(seen.trajectory.turns):
            continue
        if _let_down(seen, line):
            continue
        if (found := cue("changes_mind", plain)) and seen.before(line, "user") and _turns_away(seen, line):
            yield of_user("changes_goal", line, found)


def _rightly(seen: View, line: Line) -> bool:
    """Whether the user refuses to say once more what it has told."""
    agent = seen.before(line, "agent")[-1:]
    asked = asks_about(agent[0], seen.wanted) if agent else ()
    before = tuple(seen.before(line, "user"))
    return bool(asked) and all(seen.told(slot, before) for slot in asked)


def _corrects(seen: View, line: Line, found: str) -> bool:
    """Whether the user says that the agent's word is not its own, and the agent has not got it right."""
    agent = seen.before(line, "agent")[-1:]
    about_agent = found.startswith("that") or "不是" in found
    return about_agent and not (bool(agent) and any(slot.named_in(agent[0].text) for slot in seen.wanted))


def _let_down(seen: View, line: Line) -> bool:
    """Whether the agent has just failed the user, so that it may look for another way."""
    agent = seen.before(line, "agent")[-1:]
    return bool(agent) and (bool(cue("agent_fails_user", agent[0].plain)) or not cue("asks", agent[0].plain))


def _said_before(seen: View, line: Line, found: str) -> bool:
    """Whether the user had told what its denial names: a value of its goal, or all that the sentence holds."""
    earlier = tuple(seen.before(line, "user"))
    denied = re.split(r"[.!?;,。！？；，]|\bbut\b", line.plain.partition(found)[2])[0]
    if any(slot.named_in(denied) and seen.told(slot, earlier) for slot in seen.wanted):
        return True
    named = {piece for piece in pieces(denied) if not cue("plain_words", piece)}
    return bool(named) and named <= {piece for one in earlier for piece in pieces(one.text)}


def _turns_away(seen: View, line: Line) -> bool:
    """A change of mind that leads to no value of the goal, then or later."""
    rest = (line, *seen.after(line, "user"))
    offered = any(
        set(speech.words_of(line.text)) & set(speech.words_of(one.text)) - _small()
        for one in seen.before(line, "agent")[-1:]
    )
    return not any(slot.named_in(one.text) for one in rest for slot in seen.wanted) and not offered


def _small() -> frozenset[str]:
    return common_words()["en"] | frozenset("我你的了是要不")


def _ending(seen: View) -> Iterator[Fault]:
    """Going too early, and never going."""
    lines = seen.user_lines
    if not lines:
        return
    if seen.left:
        yield from _left(seen)
        return
    closings = [line for line in lines[-6:] if speech.is_farewell(line.text)]
    if seen.trajectory.termination in ("max_turns", "failure") and len(closings) >= 3:
        yield of_user("never_stops", closings[-1], note=f"{len(closings)} farewells")


def _left(seen: View) -> Iterator[Fault]:
    last = seen.user_lines[-1]
    spoken = last if last.turn == len(seen.trajectory.turns) else None
    agent = next((line for line in reversed(seen.lines) if line.side == "agent"), None)
    if agent is None or _has_reason(seen, agent):
        return
    untold = [slot for slot in seen.wanted if not seen.told(slot)]
    asked = bool(cue("asks", agent.plain) or cue("confirms", agent.plain))
    if spoken is not None and not untold and cue("denies", spoken.plain):
        return  # the agent read back what the user does not want
    quote = spoken.text if spoken is not None and spoken.text else "(left without a word)"
    if untold or asked:
        what = f"{untold[0].slot} was never told" if untold else "the agent waited for an answer"
        line = Line(turn=len(seen.trajectory.turns), side="user", text=quote)
        yield of_user("stops_early", line, note=f"{what}: {agent.text[:120]}")


def _has_reason(seen: View, last: Line) -> bool:
    """Whether the agent drove the user away: it repeated itself, asked for what was told, or was at a loss."""
    agent = [line for line in seen.lines if line.side == "agent" and not line.calls]
    words = [speech.words_of(line.text) for line in agent]
    if any(one and words.count(one) > 1 for one in words) or cue("agent_fails_user", last.plain):
        return True
    if any(exchange.asks_again for exchange in exchanges(seen)):
        return True
    complains = bool(cue("complains", seen.user_lines[-1].plain))
    useless = 0
    for line in agent:
        told = tuple(seen.before(line, "user"))
        asked = asks_about(line, seen.wanted)
        if asked and not cue("confirms", line.plain) and all(seen.told(slot, told) for slot in asked):
            return True
        useless += not (cue("asks", line.plain) or cue("confirms", line.plain))
    return useless >= (1 if complains else 2)
