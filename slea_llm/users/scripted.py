"""A user with an agenda: told, vague and misstated values, limited patience. Knows no environment, only its task.

`task.goal["user"]` says who it is:

- `values`: slot -> the value that it wants; the order of slots is the order in which it speaks of them;
- `volunteers`: slots told at the opening; `together`: slot -> slots that it tells along when asked for that one;
- `vague`: slot -> how often it answers vaguely before it gives the value;
- `misstated`: slot -> the wrong value that it tells at first; hearing a wrong value makes it correct this slot;
- `patience`: useless replies of the agent that it endures; the last of them makes it leave;
- `wording`: its phrasings, or the name of a file in data/ that holds them (see data/order_taking/user.en.yaml).

Where a task needs more, it may also say:

- `changes`: slots of `misstated` whose first value was meant and is taken back unasked, an answer after it was told;
- `undecided`: slot -> how many suggestions it refuses before it takes one; its `values` entry is the empty text;
- `accepts`: slot -> the one proposal that it finds to be right; `first`: slot -> the act that it must have heard before
  it tells that slot; `welcomes`: act -> the phrasing with which it answers that act the first time;
- `means`: slot -> what the environment should note of it, where it notes a finding and not the words (for the referee).

It reacts to `acts` alone: `asks` and `recommends` (slots), `reads_back` (slot -> value heard), `suggests`, `proposes`
and `unavailable` (slot -> value), `does` (names of other acts). A reply that does none of these, asks for what was
told, asks for what nobody needs, reads back what was agreed already or proposes what is wrong costs patience.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import yaml

from slea_llm import assets
from slea_llm.errors import ConfigError, EpisodeError, nearest
from slea_llm.types import Message, Task, UserReply
from slea_llm.wording import fragments

PHRASINGS: tuple[str, ...] = (
    "opening",
    "opening_empty",
    "answer",
    "again",
    "agree",
    "agree_again",
    "correct",
    "unneeded",
    "useless",
    "leave",
)

OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "changes": ("change",),
    "undecided": ("undecided", "decline"),
    "accepts": ("accept", "reject"),
    "first": ("upset",),
    "welcomes": (),
    "means": (),
}
"""Entries that an agenda may have, and the phrasings that each needs."""


@dataclass(slots=True, kw_only=True)
class _Memory:
    """All that changes during a dialogue."""

    seed: int
    spoken: int = 0
    patience: int
    told: dict[str, str] = field(default_factory=dict)
    vague: dict[str, int] = field(default_factory=dict)
    agreed: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    heard: dict[str, bool] = field(default_factory=dict)


class ScriptedUser:
    """Starts sessions of the agenda user; the same task and seed give the same answers to the same acts."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        answers_at_most: int = 2
        """Questions that it answers in one breath, at least 1; the rest it leaves to be asked again, at no cost."""

        def __post_init__(self) -> None:
            if self.answers_at_most < 1:
                raise ConfigError(f"answers_at_most is {self.answers_at_most}; it must be at least 1")

    name: ClassVar[str] = "scripted"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config
        self._wordings: dict[str, Mapping[str, Any]] = {}

    def start(self, task: Task, seed: int) -> ScriptedSession:
        agenda = _agenda(task)
        memory = _Memory(
            seed=seed,
            patience=int(agenda["patience"]),
            vague=dict(agenda["vague"]),
            refusals=dict(agenda.get("undecided", {})),
        )
        return self._session(task, memory)

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> ScriptedSession:
        """The session as it was; raises EpisodeError for a snapshot of another shape."""
        names = {entry.name for entry in fields(_Memory)}
        if snapshot.keys() != names:
            raise EpisodeError(f"user snapshot has the keys {sorted(snapshot)}; expected {sorted(names)}")
        copied: dict[str, Any] = {
            name: dict(value) if isinstance(value, Mapping) else value for name, value in snapshot.items()
        }
        return self._session(task, _Memory(**copied))

    def _session(self, task: Task, memory: _Memory) -> ScriptedSession:
        agenda = _agenda(task)
        return ScriptedSession(
            task,
            agenda=agenda,
            wording=self._wording(agenda),
            memory=memory,
            answers_at_most=self.config.answers_at_most,
        )

    def _wording(self, agenda: Mapping[str, Any]) -> Mapping[str, Any]:
        source: str | Mapping[str, Any] = agenda["wording"]
        needed = [phrase for entry, phrases in OPTIONAL.items() if agenda.get(entry) for phrase in phrases]
        needed += agenda.get("welcomes", {}).values()
        if not isinstance(source, str):
            return _checked(source, needed, "the task's own wording")
        if source not in self._wordings:
            text = assets.find("data", source).read_text(encoding="utf-8")
            self._wordings[source] = yaml.safe_load(text)
        return _checked(self._wordings[source], needed, source)


def _agenda(task: Task) -> Mapping[str, Any]:
    agenda = task.goal.get("user")
    keys = {"values", "volunteers", "together", "vague", "misstated", "patience", "wording"}
    if not isinstance(agenda, Mapping) or not keys <= agenda.keys() <= keys | OPTIONAL.keys():
        raise EpisodeError(
            f"task {task.id!r} has no agenda for a scripted user: goal['user'] needs {sorted(keys)} and may have "
            f"{sorted(OPTIONAL)}"
        )
    if fault := next(_agenda_faults(agenda), None):
        raise EpisodeError(f"task {task.id!r}, goal['user'] of the scripted user: {fault}")
    return agenda


def _agenda_faults(agenda: Mapping[str, Any]) -> Iterator[str]:
    """What of an agenda has another shape than the one at the head of this file, or names a slot that it lacks."""
    shapes: Mapping[str, tuple[type | tuple[type, ...], type | tuple[type, ...] | None, str]] = {
        "values": (Mapping, str, "slot -> text"),
        "volunteers": ((list, tuple), None, "a list of slots"),
        "together": (Mapping, (list, tuple), "slot -> a list of slots"),
        "vague": (Mapping, int, "slot -> a whole number"),
        "misstated": (Mapping, str, "slot -> text"),
        "patience": (int, None, "a whole number, 1 or more"),
    }
    for name, (kind, entry, shape) in shapes.items():
        value = agenda[name]
        entries = value.values() if entry is not None and isinstance(value, Mapping) else ()
        if not isinstance(value, kind) or not all(isinstance(one, entry) for one in entries):  # type: ignore[arg-type]
            yield f"{name} {value!r} is not {shape}"
    if agenda["patience"] < 1:
        yield f"patience {agenda['patience']} is not {shapes['patience'][2]}"
    slots = agenda["values"]
    told = [slot for others in agenda["together"].values() for slot in others]
    for name, named in ((one, agenda[one]) for one in ("volunteers", "together", "vague", "misstated")):
        for slot in (*named, *(told if name == "together" else ())):
            if slot not in slots:
                yield f"{name} names {slot!r}, no slot of values: {', '.join(slots)}{nearest(str(slot), slots)}"


def _checked(wording: Mapping[str, Any], needed: Sequence[str], source: str) -> Mapping[str, Any]:
    missing = [name for name in (*PHRASINGS, "tell", "vague", "separator", *needed) if name not in wording]
    missing += [name for name in (*PHRASINGS, "separator", *needed) if name in wording and not wording[name]]
    if missing:
        raise ConfigError(f"wording {source!r} of the scripted user lacks {', '.join(missing)}")
    return wording


class ScriptedSession:
    """One dialogue of the agenda user. Every choice of words is drawn from (task seed, user seed, utterance)."""

    def __init__(
        self,
        task: Task,
        *,
        agenda: Mapping[str, Any],
        wording: Mapping[str, Any],
        memory: _Memory,
        answers_at_most: int,
    ) -> None:
        self._task = task
        self._agenda = agenda
        self._wording = wording
        self._memory = memory
        self._answers_at_most = answers_at_most

    @property
    def _values(self) -> Mapping[str, str]:
        """Slot -> the value that it wants, as far as it has made up its mind."""
        values: Mapping[str, str] = self._agenda["values"]
        return {**values, **self._memory.chosen} if self._memory.chosen else values

    async def opening(self) -> UserReply:
        rng = self._rng()
        told = self._tell(self._agenda["volunteers"])
        return UserReply(text=self._phrase("opening", told, rng) if told else self._phrase("opening_empty", {}, rng))

    async def answer(self, acts: Mapping[str, Any], messages: Sequence[Message]) -> UserReply:
        del messages  # this user hears only what the environment understood
        rng = self._rng()
        texts: list[str] = []
        second_thoughts = self._second_thoughts()
        self._react_to_acts(acts.get("does", ()), texts, rng)
        useful = self._react_to_values(acts.get("reads_back", {}), texts, rng)
        useful &= self._react_to_offers(acts, texts, rng)
        recommended = [slot for slot in acts.get("recommends", ()) if slot not in self._memory.told]
        # A suggestion that was just refused or taken is answered.
        asked = [slot for slot in (*acts.get("asks", ()), *recommended) if slot not in self._answered(acts)]
        if asked:
            useful &= self._react_to_questions(list(dict.fromkeys(asked)), texts, rng)
        elif not texts:
            useful = False
            texts.append(self._phrase("useless", {}, rng))
        if changed := {slot: value for slot, value in second_thoughts.items() if self._memory.told[slot] != value}:
            self._memory.told.update(changed)
            texts.append(self._phrase("change", changed, rng))
        if not useful:
            self._memory.patience -= 1
            if self._memory.patience <= 0:
                return UserReply(text=self._phrase("leave", {}, rng), leaving=True)
        return UserReply(text=" ".join(texts))

    def snapshot(self) -> Mapping[str, Any]:
        return asdict(self._memory)

    def provenance(self) -> Mapping[str, Any]:
        """Who spoke: a script, whose words are its task's."""
        return {"name": ScriptedUser.name}

    def reseed(self, seed: int) -> None:
        self._memory.seed = seed

    def _second_thoughts(self) -> dict[str, str]:
        """What it told before and takes back now."""
        told, misstated = self._memory.told, self._agenda["misstated"]
        return {s: self._values[s] for s in self._agenda.get("changes", ()) if told.get(s) == misstated[s]}

    def _react_to_acts(self, acts: Sequence[str], texts: list[str], rng: random.Random) -> None:
        """Answer what is welcome the first time that it is done, and remember what was done."""
        for act in acts:
            phrase = self._agenda.get("welcomes", {}).get(act)
            if phrase is not None and act not in self._memory.heard:
                texts.append(self._phrase(phrase, {}, rng))
            self._memory.heard[act] = True

    def _answered(self, acts: Mapping[str, Any]) -> set[str]:
        """The slots of which it spoke when it took up an offer."""
        refused = acts.get("suggests", {}).keys() & self._agenda.get("undecided", {}).keys()
        return refused | set(acts.get("unavailable", {})) if refused or acts.get("unavailable") else set()

    def _react_to_offers(self, acts: Mapping[str, Any], texts: list[str], rng: random.Random) -> bool:
        """Take or refuse what is proposed, suggested or not to be had. False when a proposal was wrong."""
        memory = self._memory
        for slot, value in acts.get("suggests", {}).items():
            if slot not in memory.refusals or slot in memory.told:
                continue
            if memory.refusals[slot] > 0:
                memory.refusals[slot] -= 1
                texts.append(self._phrase("decline", {}, rng))
            else:
                memory.chosen[slot] = memory.told[slot] = value
                texts.append(self._phrase("answer", {slot: value}, rng))
        gone = {s: self._values[s] for s, v in acts.get("unavailable", {}).items() if memory.told.get(s) == v}
        if gone:
            memory.told.update(gone)
            texts.append(self._phrase("answer", gone, rng))
        accepts: Mapping[str, str] = self._agenda.get("accepts", {})
        proposed = {slot: value for slot, value in acts.get("proposes", {}).items() if slot in accepts}
        right = all(accepts[slot] == value for slot, value in proposed.items())
        if proposed:
            texts.append(self._phrase("accept" if right else "reject", {}, rng))
        return right

    def _react_to_values(self, heard: Mapping[str, str], texts: list[str], rng: random.Random) -> bool:
        """Correct what is wrong, else agree. False when everything heard had been agreed to before."""
        known = {slot: value for slot, value in heard.items() if slot in self._values}
        if not known:
            return True
        wrong = {
            slot: self._values[slot] for slot in self._values if slot in known and known[slot] != self._values[slot]
        }
        new = any(self._memory.agreed.get(slot) != value for slot, value in known.items())
        right = {slot: value for slot, value in known.items() if slot not in wrong}
        self._memory.agreed.update(right)
        self._memory.told.update(right)
        if wrong:
            self._memory.told.update(wrong)
            texts.append(self._phrase("correct", wrong, rng))
        else:
            texts.append(self._phrase("agree" if new else "agree_again", {}, rng))
        return new

    def _react_to_questions(self, asked: Sequence[str], texts: list[str], rng: random.Random) -> bool:
        """Answer the first questions. False when one was about something told already or not wanted."""
        asked = asked[: self._answers_at_most]
        unneeded = [slot for slot in asked if slot not in self._values]
        again = {slot: self._memory.told[slot] for slot in asked if slot in self._memory.told}
        open_ = [slot for slot in asked if slot in self._values and slot not in again]
        undecided = [slot for slot in open_ if slot in self._memory.refusals]
        first: Mapping[str, str] = self._agenda.get("first", {})
        locked = [slot for slot in open_ if slot in first and first[slot] not in self._memory.heard]
        open_ = [slot for slot in open_ if slot not in locked and slot not in undecided]
        vague = [slot for slot in open_ if self._memory.vague.get(slot, 0) > 0]
        clear = [slot for slot in open_ if slot not in vague]
        along = [other for slot in clear for other in self._agenda["together"].get(slot, ()) if other not in first]
        told = self._tell([*clear, *(slot for slot in along if slot not in self._memory.told)])
        if told:
            texts.append(self._phrase("answer", told, rng))
        for slot in vague:
            self._memory.vague[slot] -= 1
            texts.append(rng.choice(self._wording["vague"][slot]))
        if again:
            texts.append(self._phrase("again", again, rng))
        if unneeded:
            texts.append(self._phrase("unneeded", {}, rng))
        if undecided:
            texts.append(self._phrase("undecided", {}, rng))
        if locked:
            texts.append(self._phrase("upset", {}, rng))
        return not again and not unneeded and not locked

    def _tell(self, slots: Sequence[str]) -> dict[str, str]:
        """Tell these slots, wrongly where the agenda says so, and remember it."""
        said = {slot: self._agenda["misstated"].get(slot, self._values[slot]) for slot in self._values if slot in slots}
        self._memory.told.update(said)
        return said

    def _phrase(self, name: str, told: Mapping[str, str], rng: random.Random) -> str:
        form = str(rng.choice(self._wording[name]))
        if not told:
            return form
        said = fragments(self._wording["tell"], told, lambda forms: str(rng.choice(forms)))
        return form.format(told=str(self._wording["separator"]).join(said))

    def _rng(self) -> random.Random:
        self._memory.spoken += 1
        return random.Random(f"{self._task.seed}/{self._memory.seed}/{self._memory.spoken}")  # noqa: S311 (not a secret)
