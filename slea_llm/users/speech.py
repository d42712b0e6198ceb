"""What a simulated user's raw words are made of: thoughts, stop signals, labels, the other side's lines, role flips.

Pure functions over text. The user `llm` cleans its own words by them; the referee looks for what got through.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from slea_llm import assets
from slea_llm.models.thoughts import without_thoughts

_TAGGED = re.compile(
    r"<(?P<tag>thinking|thought|reasoning|reflection|analysis|scratchpad|inner_monologue)>.*?(?:</(?P=tag)>|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_CHANNEL = re.compile(
    r"<\|channel\|>\s*(?:analysis|commentary)\b.*?(?:(?=<\|channel\|>\s*final)|<\|end\|>|\Z)", re.DOTALL
)
_FINAL = re.compile(r"(?:<\|start\|>\w*)?<\|channel\|>\s*final\s*<\|message\|>")
_OWN_LABEL = re.compile(
    r"\A\s*(?:\*\*|\[)?(?:user|customer|client|caller|human|me|用户|顾客|客户|我)"
    r"(?:\]|\*\*)?\s*[:：](?:\*\*)?\s*",
    re.IGNORECASE,
)
_OTHER_LABEL = re.compile(
    r"(?:^|(?<=[.!?。！？\"”]))[ \t]*(?:\*\*|\[)?"
    r"(?:agent|assistant|representative|operator|support(?: agent)?|customer service|system|bot"
    r"|客服|助手|坐席|系统|店员)"
    r"(?:\]|\*\*)?\s*[:：]",
    re.IGNORECASE | re.MULTILINE,
)
_QUOTED = re.compile(r"\A(?:\"([^\"]*)\"|“([^“”]*)”|「([^「」]*)」)\Z", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)]*(?:\s|\Z)|[。！？]")
_CONTROL = re.compile(
    r"<\|([^|<>]{1,40})\|>|<(/?s|bos|eos|pad|unk|start_of_turn|end_of_turn|/?tool_call)>|\[(/?INST)\]"
)
_WORD = re.compile(r"[\w']+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """What is left of raw words. `text` may be heard; `faults` names what was wrong, `taken` what was taken out.

    `text` of a faulty speech is the best that could be made of it, possibly empty.
    """

    text: str
    stop: bool = False
    faults: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()


def without_reasoning(text: str) -> str:
    """The words without private reasoning in any of the common forms, closed or not."""
    text = _CHANNEL.sub("", text)
    final = list(_FINAL.finditer(text))
    if final:
        text = text[final[-1].end() :].partition("<|end|>")[0].partition("<|return|>")[0]
    return _TAGGED.sub("", without_thoughts(text)).strip()


@cache
def stop_pattern(stop: str) -> re.Pattern[str]:
    """Finds a stop signal, also one with more or fewer of its signs, or in other letter case."""
    core = re.search(r"\w(?:.*\w)?", stop, re.DOTALL)
    if core is None:
        return re.compile(re.escape(stop))
    word = re.escape(core[0])
    signs = "".join(sorted(set(stop[: core.start()] + stop[core.end() :])))
    if not signs:
        return re.compile(rf"\b{word}\b")
    some = f"[{re.escape(signs)}]"
    # A run of signs is looked at from its beginning alone: from each of its signs, a long one would take for ever.
    return re.compile(rf"(?<!{some}){some}++\s*{word}\s*{some}*|\b{word}\s*{some}+", re.IGNORECASE)


def without_stop(text: str, stop: str) -> tuple[str, bool]:
    """The words without stop signals, and whether there was one; a signal that was cut at the end counts."""
    left, found = stop_pattern(stop).subn("", text)
    for length in range(len(stop) - 1, 3, -1):
        if left.rstrip().endswith(stop[:length]) and any(letter.isalnum() for letter in stop[:length]):
            left, found = left.rstrip()[:-length], 1
            break
    return left.strip(), bool(found)


def heard(raw: str, *, stop: str, longest: int, cut: bool = False) -> Speech:
    """What may be heard of raw words: no reasoning, no stop signal, no label, nobody else's lines, not too long."""
    taken: list[str] = []
    faults: list[str] = []
    text = without_reasoning(raw)
    if text != raw.strip():
        taken.append("reasoning")
    text, stopped = without_stop(text, stop)
    if stopped:
        taken.append("stop")
    label = _OWN_LABEL.match(text)
    if label:
        text = text[label.end() :]
        taken.append("label")
    other = _OTHER_LABEL.search(text)
    if other:
        text = text[: other.start()].strip()
        faults.append("both_sides")
    quoted = _QUOTED.match(text.strip())
    if quoted:
        text = next(part for part in quoted.groups() if part is not None)
    text = text.strip()
    if len(text) > longest or (cut and text):
        text = _whole_sentences(text[:longest])
        faults.append("over_long")
    if not text and not stopped:
        faults.append("empty")
    if flips_role(text):
        faults.append("role_flip")
    if out_of_character(text):
        faults.append("out_of_character")
    return Speech(text=text, stop=stopped, faults=tuple(faults), taken=tuple(taken))


def _whole_sentences(text: str) -> str:
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return (text[: ends[-1]] if ends else text).strip()


def folded(text: str) -> str:
    """Full-width forms, typographic apostrophes and letter case made equal."""
    return unicodedata.normalize("NFKC", text).replace("’", "'").lower()


@cache
def _lists() -> Mapping[str, Any]:
    """`data/users/speech.yaml`."""
    lists: Mapping[str, Any] = yaml.safe_load(assets.find("data", "users/speech.yaml").read_text(encoding="utf-8"))
    return lists


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """One of its lists as one pattern."""
    return re.compile("|".join(f"(?:{one})" for one in _lists()[name]))


def flips_role(text: str) -> str:
    """The words in which a user talks as the agent would; empty when it does not."""
    found = _pattern("role_flip").search(folded(text))
    return found[0] if found else ""


def out_of_character(text: str) -> str:
    """The words in which a user speaks of its instructions or of being a model; empty when it does not."""
    found = _pattern("out_of_character").search(folded(text))
    return found[0] if found else ""


def other_side(text: str) -> str:
    """The label under which a user speaks for the agent too; empty when it does not."""
    found = _OTHER_LABEL.search(text)
    return found[0].strip() if found else ""


def is_farewell(text: str) -> bool:
    """Whether the words close a dialogue and say nothing else; a yes or a no is something else."""
    plain = folded(text)
    words = re.findall(r"[a-z']+|[^\W\d_]|\d+", plain)
    if not words:
        return False
    farewell = _lists()["farewell"]
    if set(words) <= set(farewell["words"].split()):
        return bool(set(farewell["enough"].split()).intersection(words))
    phrases = sorted(farewell["phrases"], key=len, reverse=True)
    rest = re.sub(r"[\W_]+", "", re.sub("|".join(map(re.escape, phrases)), "", plain))
    return not rest and any(phrase in plain for phrase in farewell["enough_phrases"])


def words_of(text: str) -> list[str]:
    """Words as they count for comparing: letters and digits, each Chinese character one word."""
    plain = folded(text)
    return [
        piece for word in _WORD.findall(plain) for piece in (re.findall(r"[\u4e00-\u9fff]|[^\u4e00-\u9fff]+", word))
    ]


def repeats(text: str, own: Sequence[str], other: Sequence[str]) -> bool:
    """Whether a user says its last words again although the agent has said something else since.

    `own` and `other` hold what user and agent said before, in order. A yes or another short word is no repetition.
    """
    words = words_of(text)
    if len(words) < 4 or not own or words != words_of(own[-1]):
        return False
    return len(other) < 2 or words_of(other[-1]) != words_of(other[-2])


def echoes(text: str, other: Sequence[str]) -> bool:
    """Whether a user only gives the agent's last words back."""
    words = words_of(text)
    return len(words) >= 5 and bool(other) and words == words_of(other[-1])


def runs_of(text: str, length: int) -> frozenset[tuple[str, ...]]:
    """Every run of `length` words in a text; twice as many where each Chinese character is a word."""
    words = words_of(text)
    length = 2 * length if re.search("[\u4e00-\u9fff]", text) else length
    return frozenset(tuple(words[at : at + length]) for at in range(len(words) - length + 1))


def recites(text: str, runs: frozenset[tuple[str, ...]]) -> bool:
    """Whether a text holds one of these runs of words."""
    words = words_of(text)
    return any(
        tuple(words[at : at + length]) in runs for length in {len(run) for run in runs} for at in range(len(words))
    )


def defused(text: str) -> str:
    """The words with blanks in whatever looks like a control token, for servers that would read it as one."""
    return _CONTROL.sub(lambda match: match[0][0] + " " + match[0][1:-1] + " " + match[0][-1], text)
