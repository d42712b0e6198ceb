"""A service cannot reach its database; the agent asks for facts, names the fault and proposes the mend.

Which fault it is follows from two or three facts (data/tech_support/). docs/environments.md states the rules.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from slea_llm.checks import check_least, check_shares
from slea_llm.environments.agents import Errors, Move, Plan, Track
from slea_llm.environments.noted_dialogue import NotedConfig, NotedEpisode, NotedTasks, Notes, draw_vague, parts_of
from slea_llm.environments.speech import Heard, Speech
from slea_llm.types import Outcome, State, Task

FACTS: tuple[str, ...] = ("error", "network", "load", "settings", "version", "change")

LONGEST_EXPERT = 8
"""Turns of the expert at worst: the error, three further facts, two vague answers, fault and mend, one to spare."""

SKILLS: Mapping[str, tuple[float, float]] = {"novice": (0.5, 0.1), "user": (0.2, 0.5), "administrator": (0.0, 0.9)}
"""Skill -> (share of facts told vaguely at first, chance that the error is told at the opening)."""


class TechSupport(NotedTasks["SupportEpisode"]):
    """The task family; its tasks suit the user `scripted`."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(NotedConfig):
        max_turns: int = 10
        """Replies of the agent after which the dialogue ends with reward -1; at least 8, what the expert needs."""
        novice_share: float = 0.4
        """Share of users who are vague about much at first; of the rest, half are administrators. In [0, 1]."""

        def __post_init__(self) -> None:
            check_least(self, max_turns=LONGEST_EXPERT, why="some faults need as many")
            check_shares(self, "novice_share")

    name: ClassVar[str] = "tech_support"
    config: Config

    def _goal(self, rng: random.Random, speech: Speech) -> dict[str, Any]:
        fault = rng.choice(list(speech.data["faults"]))
        findings = {**speech.data["usual"], **speech.data["faults"][fault]["findings"]}
        numbers = _numbers(rng)
        values = {fact: _filled(rng.choice(speech.data["texts"][fact][findings[fact]]), numbers) for fact in FACTS}
        skill = rng.choices((*SKILLS,), weights=_skill_weights(self.config.novice_share))[0]
        vague_share, opening = SKILLS[skill]
        user = {
            "values": values,
            "means": {fact: findings[fact] for fact in FACTS},
            "volunteers": ["error"] if rng.random() < opening else [],
            "together": {},
            "vague": draw_vague(rng, FACTS, vague_share),
            "misstated": {},
            "patience": rng.choice((2, 2, 3)),
            "wording": f"{self.name}/user.{speech.code}.yaml",
            "accepts": {"mend": fault, "fault": fault},
        }
        return {"fault": fault, "skill": skill, "user": user}

    def _extra(self, task: Task) -> dict[str, Any]:
        del task
        return {"named": "", "mended": False, "findings": {}}

    def _agent(self, task: Task) -> tuple[Plan, Errors, Track]:
        data = self._speech(task).data
        faults, usual = data["faults"], data["usual"]
        return lambda state: plan(state, faults, usual), lambda state, rng: errors(state, rng, faults), track

    def _episode(self, task: Task, notes: Notes) -> SupportEpisode:
        return SupportEpisode(task.goal["fault"], **self._frame(task, notes))


class SupportEpisode(NotedEpisode):
    """One case. It is solved when the fault was named and the user does not deny that its mend helped.

    A reply that names several faults names none, and one that proposes several mends proposes none: a list of guesses
    helps nobody.
    """

    def __init__(self, fault: str, **frame: Any) -> None:
        super().__init__(**frame)
        self._fault = fault
        self._names = self.speech.patterns("names")
        self._mends = self.speech.patterns("mends")
        findings = {name: entry["findings"] for name, entry in self.speech.data["faults"].items()}
        self._upgrades = {name for name, found in findings.items() if found.get("version") == "upgraded"}
        cues = self.speech.patterns("cues")
        self._checks, self._remedies = cues["checks"], cues["remedies"]

    def acts_of(self, heard: Heard, reply: str) -> Mapping[str, Any]:
        named, mended, asked = self._read(reply)
        if len(named) == 1:
            self.notes.extra["named"] = next(iter(named))
        if len(mended) > 1 and mended <= self._upgrades:
            # A newer client mends whatever an upgrade broke: it counts for the fault that was named.
            mended &= {self.notes.extra["named"]}
        mend = next(iter(mended)) if len(mended) == 1 else None
        self.notes.pending = {"mend": mend} if mend else {}
        proposes = {"mend": mend} if mend else {"fault": next(iter(named))} if len(named) == 1 else {}
        # What a reply says of facts is part of a question or of a diagnosis, never a value to agree to.
        asks = [fact for fact in FACTS if fact in asked]
        for fact in set(asks) - set(heard.asks):
            self.notes.asked[fact] = self.notes.asked.get(fact, 0) + 1
        return {"asks": tuple(asks), "reads_back": {}, "proposes": proposes, "named": sorted(named)}

    def _read(self, reply: str) -> tuple[set[str], set[str], set[str]]:
        """Faults named, mends proposed and facts asked for."""
        named: set[str] = set()
        mended: set[str] = set()
        asked: set[str] = set()
        for part in parts_of(reply):
            mends = {fault for fault, pattern in self._mends.items() if self.speech.affirmed(pattern, part)}
            names = {fault for fault, pattern in self._names.items() if self.speech.affirmed(pattern, part)}
            checking = bool(self._checks.search(part))
            if not mends and not checking and len(named | names) == 1 and self._remedies.search(part):
                # "It is the firewall, please open it": what is named is what is to be mended.
                mends = named | names
            if mends and not checking:
                mended |= mends
                named |= names
            elif self.speech.requests(part) or checking:
                asked |= self.speech.asked(part)
                if self.speech.confirms(part):
                    named |= names
            else:
                named |= names
        return named, mended, asked

    def user_answered(self, text: str) -> Outcome:
        """Nothing is mended but by the mend of the fault, and not against the user's word."""
        notes = self.notes
        if self._tried == self._fault and self.speech.verdict(text) is not False:
            notes.extra["mended"] = True
        if notes.extra["mended"] and notes.extra["named"] == self._fault:
            return self.end("success")
        return Outcome()

    def note(self, text: str) -> None:
        self._tried = self.notes.pending.get("mend", "")
        notes = self.notes
        told = self.speech.values(text)
        changed = [fact for fact in FACTS if fact in told and notes.filled.get(fact) != told[fact]]
        notes.filled.update({fact: told[fact] for fact in FACTS if fact in told})
        notes.last_filled, notes.pending = changed, {}


def candidates(filled: Mapping[str, str], faults: Mapping[str, Any], usual: Mapping[str, str]) -> list[str]:
    """The faults that fit all facts told."""
    fits = []
    for fault, entry in faults.items():
        findings = {**usual, **entry["findings"]}
        if all(findings[fact] == finding for fact, finding in filled.items()):
            fits.append(fault)
    return fits


def plan(state: State, faults: Mapping[str, Any], usual: Mapping[str, str]) -> Move:
    """Ask for the error, then for the fact that parts the faults that are left; then name the fault and its mend."""
    filled = state["filled"]
    if "error" not in filled:
        return Move(name="ask.error")
    left = candidates(filled, faults, usual)
    if len(left) > 1:
        for fact in FACTS:
            findings = {{**usual, **faults[fault]["findings"]}[fact] for fault in left}
            if fact not in filled and len(findings) > 1:
                return Move(name=f"ask.{fact}")
    return Move(name=f"mend.{left[0]}") if left else Move(name="ask.error")


def errors(state: State, rng: random.Random, faults: Mapping[str, Any]) -> Sequence[Move]:
    """Slips to choose from: advice that fits any case, a guess, a question again, small talk."""
    found = [Move(name="small_talk"), Move(name="generic"), Move(name="generic")]
    found.append(Move(name=f"mend.{rng.choice(list(faults))}"))
    if state["filled"]:
        found.append(Move(name=f"ask.{rng.choice(list(state['filled']))}"))
    return found


def track(state: State, speech: Speech) -> str:
    """What is known so far."""
    known = [speech.data["short"][fact][finding] for fact, finding in state["filled"].items()]
    tracks: Mapping[str, str] = speech.agents["tracks"]
    return tracks["known"].format(facts=str(speech.data["separator"]).join(known)) if known else tracks["nothing"]


def _skill_weights(novice: float) -> tuple[float, float, float]:
    return novice, (1 - novice) / 2, (1 - novice) / 2


def _numbers(rng: random.Random) -> dict[str, str]:
    """Numbers and names that tell one case from another and mean nothing for the fault."""
    return {
        "host": f"{rng.choice(('db', 'sql', 'pg', 'data', 'store'))}-{rng.randint(1, 99):02d}",
        "ip": f"10.{rng.randint(0, 255)}.{rng.randint(0, 255)}.{rng.randint(2, 254)}",
        "pid": str(rng.randint(1000, 32000)),
        "time": f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}",
        "small": str(rng.randint(3, 9)),
        "minor": str(rng.randint(1, 9)),
    }


def _filled(text: str, numbers: Mapping[str, str]) -> str:
    for name, value in numbers.items():
        text = text.replace(f"<{name}>", value)
    return text
