"""A user with an agenda: told, vague and misstated values, limited patience. Knows no environment, only its task.

`task.goal["user"]` says who it is:

- `values`: slot -> the value that it wants; the order of slots is the order in which it speaks of them;
- `volunteers`: slots told at the opening; `together`: slot -> slots that it tells along when asked for that one;
- `vague`: slot -> how often it answers vaguely before it gives the value;
- `misstated`: slot -> the wrong value that it tells at first; hearing a wrong value makes it correct this slot;
- `patience`: useless replies of the agent that it endures; the last of them makes it leave;
- `wording`: its phrasings, or the name of a file in data/ that holds them (see data/order_taking/user.en.yaml).

It reacts to `acts` alone: `asks` and `recommends` (slots), `reads_back` (slot -> value heard). A reply that does none
of these, asks for what was told, asks for what nobody needs or reads back what was agreed already costs patience.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

import yaml

from slea_llm import assets
from slea_llm.errors import ConfigError, EpisodeError
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


@dataclass(slots=True, kw_only=True)
class _Memory:
    """All that changes during a dialogue."""

    seed: int
    spoken: int = 0
    patience: int
    told: dict[str, str] = field(default_factory=dict)
    vague: dict[str, int] = field(default_factory=dict)
    agreed: dict[str, str] = field(default_factory=dict)


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
        memory = _Memory(seed=seed, patience=int(agenda["patience"]), vague=dict(agenda["vague"]))
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
            wording=self._wording(agenda["wording"]),
            memory=memory,
            answers_at_most=self.config.answers_at_most,
        )

    def _wording(self, source: str | Mapping[str, Any]) -> Mapping[str, Any]:
        if not isinstance(source, str):
            return _checked(source, "the task's own wording")
        if source not in self._wordings:
            text = assets.find("data", source).read_text(encoding="utf-8")
            self._wordings[source] = _checked(yaml.safe_load(text), source)
        return self._wordings[source]


def _agenda(task: Task) -> Mapping[str, Any]:
    agenda = task.goal.get("user")
    keys = {"values", "volunteers", "together", "vague", "misstated", "patience", "wording"}
    if not isinstance(agenda, Mapping) or agenda.keys() != keys:
        raise EpisodeError(f"task {task.id!r} has no agenda for a scripted user: goal['user'] needs {sorted(keys)}")
    return agenda


def _checked(wording: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    missing = [name for name in (*PHRASINGS, "tell", "vague", "separator") if not wording.get(name)]
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
        self._values: Mapping[str, str] = agenda["values"]
        self._agenda = agenda
        self._wording = wording
        self._memory = memory
        self._answers_at_most = answers_at_most

    async def opening(self) -> UserReply:
        rng = self._rng()
        told = self._tell(self._agenda["volunteers"])
        return UserReply(text=self._phrase("opening", told, rng) if told else self._phrase("opening_empty", {}, rng))

    async def answer(self, acts: Mapping[str, Any], messages: Sequence[Message]) -> UserReply:
        del messages  # this user hears only what the environment understood
        rng = self._rng()
        texts: list[str] = []
        useful = self._react_to_values(acts.get("reads_back", {}), texts, rng)
        asked = [*acts.get("asks", ()), *(slot for slot in acts.get("recommends", ()) if slot not in self._memory.told)]
        if asked:
            useful &= self._react_to_questions(list(dict.fromkeys(asked)), texts, rng)
        elif not texts:
            useful = False
            texts.append(self._phrase("useless", {}, rng))
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
        vague = [slot for slot in open_ if self._memory.vague.get(slot, 0) > 0]
        clear = [slot for slot in open_ if slot not in vague]
        along = [other for slot in clear for other in self._agenda["together"].get(slot, ())]
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
        return not again and not unneeded

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
