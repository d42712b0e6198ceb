"""Rules about how a user talks, whatever its goal: words that no user says, and words that cannot be understood."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from slea_llm.blame.faults import Fault, of_user
from slea_llm.blame.view import Line, View, common_words, content, cue
from slea_llm.users import speech

LONG_WORDS, LONG_CHARACTERS = 160, 900
"""A line of a user beyond either is over-long. People in MultiWOZ and CrossWOZ stay below a third of it."""
COPIED_WORDS = 9
"""Words in a row that a user has from its instructions, with a `you` among them, from which it reads them out."""
_CONTROL = re.compile(r"<\|[^|<>\n]{1,40}\|>|</?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn)>|\[/?INST\]|<<SYS>>")
_SIGNAL = re.compile(r"#{2,}\s*[A-Z][A-Z -]{2,}\s*#*|#*\s*\b(?:STOP|TRANSFER|OUT-OF-SCOPE|TERMINATE|END)\s*#{2,}")
_BARE_SIGNAL = re.compile(
    r"\A\W*(?:STOP|TERMINATE|<?END(?: OF (?:CONVERSATION|DIALOGUE|CHAT))?>?)\W*\Z"
    r"|\A\W*(?i:exit|quit|eof|eos)\W*\Z"
    r"|\[(?:STOP|END|DONE|EOS|EXIT)\]|<(?:stop|end|done|exit)/?>"
)
_OWN = re.compile(r"(?:\b(?:me|user|customer|client|caller|guest|i)|我|用户|顾客|客户|乘客)\s*[:：]", re.IGNORECASE)
_LABEL = re.compile(r"(?:\b[A-Z][A-Za-z]+(?: [A-Z]?[a-z]+)?|(?:(?<=[。！？\s])|\A)[\u4e00-\u9fff]{2,4})\s*[:：](?!\d)")
_SPEAKS = re.compile(
    r"[\[(<*](?:agent|assistant|system|support|operator|clerk|客服|助手|坐席|店员)[\])>*]"
    r"|\b(?:the )?(?:agent|assistant|operator|clerk) (?:says|replies|answers|responds)\b"
    r"|客服(?:说|答|回复|回答)\s*[:：“\"]",
    re.IGNORECASE,
)
_ANY_LABEL = re.compile(r"(?:\A|(?<=[\s.。!！?？;；,，”\"]))([A-Za-z]{1,12}|[\u4e00-\u9fff]{1,3})\s*[:：](?![/\d])")
_QUOTED = re.compile(r"[\"“「][^\"“”「」]{3,}[\"”」]")
_YOU = re.compile(r"\b(?:you|your|yours|the user|the customer)\b|你(?!好)|您(?!好)|用户|顾客")
_CJK = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_LATIN = re.compile(r"[A-Za-z]{2,}")
_OTHER_SCRIPT = re.compile(
    r"[\u0400-\u04ff\u0370-\u03ff\u0590-\u06ff\u0900-\u097f\u0e00-\u0e7f\u3040-\u30ff\uac00-\ud7af]"
)
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_PAIR = re.compile(r"([^\W\d][\w ]{0,19}?)\s*=\s*[^\s=]")
_LISTED = re.compile(r"(?m)^[\s\-*•|\d.)]*([A-Za-z][\w ]{0,24}|[\u4e00-\u9fff]{1,8})\s*[:：=|]\s*\S")
_VOWELS = re.compile(r"[aeiouy]")
_PLAIN = re.compile(r"[\w\s.,!?'\"()，。！？、；：“”‘’（）…:;$€£¥%&@#/+-]")


_ADDRESS = re.compile(r"[\w.+-]+@[\w.-]+|https?://\S+")
"""E-mail and web addresses are of no language."""


def form_faults(seen: View) -> Iterator[Fault]:
    """Faults of form in every line of the user."""
    own: list[str] = []
    other: list[str] = []
    repeated = 0
    for line in seen.lines:
        if line.side == "agent":
            other.append(line.text)
        if line.side != "user":
            continue
        yield from _no_user(line, seen)
        yield from _not_understood(line, seen)
        if speech.echoes(line.text, other):
            yield of_user("echoes", line)
        if _says_again(line.text, own, other):
            repeated += 1
            yield of_user("repeats", line, weight="serious" if repeated > 1 or _asked_else(other) else "minor")
        own.append(line.text)
    yield from _silence(seen)


def _no_user(line: Line, seen: View) -> Iterator[Fault]:
    """Words that no user says."""
    text, plain = line.text, line.plain
    found = speech.out_of_character(text)
    if found:
        model = re.search(r"\b(?:ai|model|chatbot|llm|assistant)\b|人工智能|模型|机器人", found)
        yield of_user("out_of_character" if model else "leak", line, found, weight="decisive")
    copied = _copied(plain, seen.goal_text)
    if copied:
        yield of_user("leak", line, copied, weight="decisive")
    if found := _lists_slots(text, seen):
        yield of_user("structured", line, found, weight="decisive")
    if found := cue("leaks", plain):
        yield of_user("leak", line, found, weight="decisive")
    if found := cue("artificial", plain):
        yield of_user("out_of_character", line, found, weight="decisive")
    if found := speech.other_side(text) or _labels(text) or _transcript(text):
        yield of_user("both_sides", line, weight="decisive", note=found)
    if found := speech.flips_role(text) or cue("agent_talk", plain):
        yield of_user("role_flip", line, found, weight="minor" if _may_say(found, line, seen) else "serious")
    for kind, quote in (
        ("control_tokens", _first(_CONTROL, text)),
        ("stop_signal", _stop_signal(line, plain, seen)),
        ("structured", cue("structured", plain)),
        ("reasons_aloud", cue("reasons_aloud", plain)),
        ("tampers", cue("tampers", plain)),
        ("placeholder", cue("placeholder", plain)),
        ("abuses", cue("abuses", plain)),
    ):
        if quote:
            yield of_user(kind, line, quote, weight="decisive" if kind in ("tampers", "structured") else "serious")


def _lists_slots(text: str, seen: View) -> str:
    """The first label of a list of slots as no user writes one; empty where there is none.

    Three `label=value` that tell two slots; three where all stand on one line, for a user may paste `a=1 b=2`;
    or labels that are names of slots with `_`, in another language or in a table.
    """
    told = sum(slot.named_in(text) for slot in seen.wanted)
    if len(pairs := _PAIR.findall(text)) >= 3 and told >= (2 if text.strip().count("\n") else 3):
        return str(pairs[0])
    slots = {slot.slot for slot in seen.wanted}
    labels = [label.strip() for label in _LISTED.findall(text)]
    own = [label for label in labels if label.lower() in slots]
    foreign = re.search(r"[\u4e00-\u9fff]", text) and all(label.isascii() for label in own)
    odd = foreign or any("_" in label for label in own) or re.search(r"\|\s*:?-{2,}", text)
    return own[0] if len(labels) >= 2 and len(own) >= 2 and odd else ""


def _may_say(found: str, line: Line, seen: View) -> bool:
    """Whether words of an agent fit a user too: it offers something else than what it was asked for, or is sorry."""
    agent = next((one for one in reversed(seen.before(line, "agent")) if one.text), None)
    polite = re.search(r"anything else|apologi[sz]e|sorry", found.lower())
    return bool(
        polite
        and agent is not None
        and (cue("needs", agent.plain) or cue("asks", agent.plain))
        and not speech.is_farewell(line.text)
    )


def _labels(text: str) -> str:
    """The label under which a user writes for somebody else, in a line that has a label for itself too."""
    if found := _SPEAKS.search(text):
        return found[0]
    own = [match for match in _OWN.finditer(text)]
    other = [match for match in _LABEL.finditer(text) if not _OWN.match(match[0])]
    begins = bool(other) and not text[: other[0].start()].strip() and cue("firms", other[0][0].lower())
    return other[0][0].strip() if other and (own or begins) else ""


def _transcript(text: str) -> str:
    """The labels or quotation marks by which a line is a dialogue of its own; empty when it is none."""
    labels = _ANY_LABEL.findall(text)
    if len(set(labels)) >= 2 and len(labels) >= 3 and len(set(labels)) < len(labels):
        return f"{labels[0]}: ... {labels[1]}:"
    quoted = _QUOTED.findall(text)
    if len(quoted) >= 3 and sum(map(len, quoted)) > 0.5 * len(text):
        return str(quoted[1])
    return ""


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return found[0] if found else ""


def _stop_signal(line: Line, plain: str, seen: View) -> str:
    """A stop signal that somebody heard; empty for none, and for one that only ends the dialogue.

    Logs of tau-bench and its kin keep `###STOP###` in the user's last line, after which no agent is asked any more.
    With an answer beside it the user left before the agent could act on that, which is a fault.
    """
    found = _first(_SIGNAL, line.text) or _first(_BARE_SIGNAL, line.text)
    if not found:
        return cue("stop_signal", plain)
    if line.turn < len(seen.trajectory.turns):
        return found
    said = [part for part in re.split(r"[.!?。！？\n]+", line.text.replace(found, "")) if re.search(r"\w", part)]
    polite = any(speech.is_farewell(part) or cue("thanks", part.lower()) for part in said)
    return found if said and not polite else ""


def _copied(plain: str, goal_text: str) -> str:
    """A stretch of the instructions, addressed to the user, in its own words; empty when there is none."""
    if not goal_text:
        return ""
    words, goal = speech.words_of(plain), speech.words_of(goal_text)
    places: dict[str, list[int]] = {}
    for place, word in enumerate(goal):
        places.setdefault(word, []).append(place)
    lengths: dict[int, int] = {}
    for end, word in enumerate(words):
        lengths = {place: lengths.get(place - 1, 0) + 1 for place in places.get(word, ())}
        for length in lengths.values():
            stretch = " ".join(words[end - length + 1 : end + 1])
            if length >= COPIED_WORDS and _YOU.search(stretch):
                return stretch
    return ""


def _not_understood(line: Line, seen: View) -> Iterator[Fault]:
    words = speech.words_of(line.text)
    if len(words) > LONG_WORDS or len(line.text) > LONG_CHARACTERS:
        yield of_user("over_long", line)
    if found := _gibberish(line.text, words):
        yield of_user("gibberish", line, note=found)
    elif found := _foreign(line.text, words, seen):
        yield of_user("wrong_language", line, note=found)


def _gibberish(text: str, words: list[str]) -> str:
    """Why a text is no language; empty when it may be one."""
    if len(words) >= 12 and len(set(words)) / len(words) < 0.3:
        return "the same words over and over"
    for size in (1, 2, 3):
        runs = [words[place : place + size] for place in range(0, len(words) - size + 1)]
        for place, run in enumerate(runs):
            times = 6 if size == 1 and not run[0].isascii() else 4  # "谢谢谢谢" is none
            if runs[place : place + size * times : size] == [run] * times:
                return "a loop"
    stripped = text.strip()
    if len(stripped) >= 8 and sum(bool(_PLAIN.match(letter)) for letter in stripped) < 0.6 * len(stripped):
        return "mostly signs"
    if len(stripped) >= 6 and not words:
        return "signs only"
    if len([word for word in re.findall(r"[a-z]+", text.lower()) if _row(word)]) >= 2:
        return "rows of keys"
    if re.search("锟斤拷|烫烫烫|屯屯屯|\ufffd{2}", text):
        return "a broken encoding"
    between = re.findall(r"(?<=[\u4e00-\u9fff；;，])[a-z]{1,4}\d?(?=[\u4e00-\u9fff；;，])", text)
    if len(between) >= 3 and sum(not _VOWELS.search(part) for part in between) >= 0.6 * len(between):
        return "letters between signs"
    latin = [word for word in words if word.isascii() and word.isalpha() and len(word) >= 4]
    odd = [word for word in latin if not _VOWELS.search(word) or re.search(r"[bcdfghjklmnpqrstvwxz]{5}", word)]
    if len(latin) >= 3 and len(odd) >= 0.5 * len(latin):
        return "no words"
    if len(latin) in (1, 2) and len(latin) == len(odd) and len(words) <= 4 and max(map(len, latin)) >= 6:
        return "no words"
    return ""


def _row(word: str) -> bool:
    """Whether a word is four keys or more that lie in a row, such as `asdf` and `lkjhg`."""
    return len(word) >= 4 and any(word in row or word[::-1] in row for row in _ROWS)


def _foreign(text: str, words: list[str], seen: View) -> str:
    language = seen.language or _language_of_agent(seen)
    text = _ADDRESS.sub(" ", text)
    asian, latin = len(_CJK.findall(text)), len(_LATIN.findall(text))
    other = len(_OTHER_SCRIPT.findall(text))
    if other >= 4 and other > 0.3 * max(len(text.replace(" ", "")), 1):
        return "another script"
    if language == "en":
        if (asian >= 4 and asian > latin) or (asian >= 2 and not latin):
            return "not English"
        common = common_words()
        known = sum(word in common["en"] for word in words)
        for code in common.keys() - {"en"}:
            hits = sum(word in common[code] for word in words)
            if len(words) >= 4 and hits >= 3 and hits > 2 * known:
                return code
            new = {word for word in words if word in common[code] - common["en"] and word not in content(_said(seen))}
            if len(words) >= 3 and len(new) >= 2 and not known:
                return code
    if language == "zh" and ((asian == 0 and latin >= 3) or (latin >= 6 and asian < latin)):
        return "not Chinese"
    return ""


def _said(seen: View) -> str:
    """The goal's values and the agent's words: names in them are of no language."""
    values = [text for slot in seen.wanted for text in slot.texts]
    return " ".join([*values, *(line.text for line in seen.lines if line.side == "agent")])


def _language_of_agent(seen: View) -> str:
    text = " ".join(line.text for line in seen.lines if line.side == "agent")
    asian, latin = len(_CJK.findall(text)), len(_LATIN.findall(text))
    return "zh" if asian > latin else "en" if latin else ""


def _says_again(text: str, own: list[str], other: list[str]) -> bool:
    words = speech.words_of(text)
    if len(words) < 4 or not own or speech.is_farewell(text):
        return False
    again = words == speech.words_of(own[-1]) or Counter(map(tuple, map(speech.words_of, own)))[tuple(words)] >= 2
    return again and (len(other) < 2 or speech.words_of(other[-1]) != speech.words_of(other[-2]))


def _asked_else(other: list[str]) -> bool:
    """Whether the agent's last question has little in common with the one before."""
    if len(other) < 2 or not cue("asks", speech.folded(other[-1])):
        return False
    one, two = set(speech.words_of(other[-1])), set(speech.words_of(other[-2]))
    return len(one & two) < 0.5 * max(len(one | two), 1)


def _silence(seen: View) -> Iterator[Fault]:
    for agent, line in seen.pairs():
        blank = not re.search(r"\w", line.text)
        if (
            blank
            and agent is not None
            and cue("asks", agent.plain)
            and not (seen.left and line.turn == len(seen.trajectory.turns))
        ):
            yield of_user("empty", line, line.text or "(nothing)", note=f"asked: {agent.text[:120]}")
