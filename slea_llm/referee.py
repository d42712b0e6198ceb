"""Who was to blame: each failure is laid to agent, user, environment or scorer, with the words that show it.

Rules come first; a chat model, where one is named, is asked about failures that no rule explains. What is laid to
nobody else is the agent's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

from slea_llm import prompts
from slea_llm.blame.conduct_rules import conduct_faults
from slea_llm.blame.facts import normal
from slea_llm.blame.faults import KINDS, Fault, Party
from slea_llm.blame.form_rules import form_faults
from slea_llm.blame.goal_rules import goal_faults
from slea_llm.blame.other_rules import other_faults
from slea_llm.blame.view import Line, View, view
from slea_llm.blame.weighing import weighed
from slea_llm.endpoints import Endpoint, chat_model_of, whole_characters
from slea_llm.errors import ConfigError, nearest
from slea_llm.questions import Answer, ChatModel, Question, Usage
from slea_llm.types import Message, Trajectory

PARTIES: tuple[str, ...] = get_args(Party)
FIELDS = frozenset({"goal", "dialogue", "ending"})
TRUSTED = frozenset({"scripted"})
"""Users that say what their task says and nothing else: no fault of theirs is looked for in their words."""
AGAINST_GOAL = frozenset({"contradicts_goal", "changes_goal", "invents", "made_up", "wrong_agreement", "wrong_denial"})
"""What no rule can say against a goal that is told in prose alone: these are noted, and blame nobody."""
_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "quote": {"type": "string", "minLength": 1, "maxLength": 300},
        "turn": {"type": "integer", "minimum": 0},
        "reason": {"type": "string", "minLength": 1, "maxLength": 400},
        "party": {"type": "string", "enum": list(PARTIES)},
    },
    "required": ["quote", "turn", "reason", "party"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """Who is to blame for a dialogue; `party` is None for a success that was the agent's.

    `fault` is what decided, `noted` all other faults found, whoever's. `by`: the rules, a chat model, or nobody (the
    agent is blamed because nothing else explains the failure). `excluded`: the dialogue says nothing about the agent,
    so it leaves gradient and success rate. `unasked`: why the chat model gave no ruling.
    """

    party: Party | None
    fault: Fault | None = None
    by: str = "rules"
    noted: tuple[Fault, ...] = ()
    excluded: bool = False
    unasked: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values, as they stand in a record's `provenance["blame"]`."""
        value: dict[str, Any] = {"party": self.party, "by": self.by, "excluded": self.excluded}
        if self.fault is not None:
            value |= {key: item for key, item in self.fault.to_dict().items() if key != "party"}
        if self.noted:
            value["noted"] = [one.to_dict() for one in self.noted]
        if self.unasked:
            value["unasked"] = self.unasked
        return value


class Referee:
    """Judges dialogues.

    A user that is a script is trusted: its words are not searched for faults. A dialogue that broke is laid to whose
    part raised. Otherwise, in this order: a decisive fault of the user (also in a success), a serious one of
    environment or scorer, of the user, the chat model's word, a suspicion, the agent. Where the goal has slots, all
    evidence together takes the place of the user's serious faults and suspicions. A success without a decisive fault
    is nobody's fault.
    """

    name: ClassVar[str] = "rules"
    needs: ClassVar[frozenset[str]] = frozenset()

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        excludes: tuple[str, ...] = ("user", "environment", "scorer")
        """Whose faults take a dialogue out of gradient and success rate. Empty: blame is recorded, nothing else."""
        redraws: int = 0
        """How often a dialogue that is excluded is played again, with another seed of its user. 0: never."""
        endpoint: Endpoint | None = None
        """A chat model that is asked about failures which no rule explains. None: they are the agent's."""
        prompt: str = "referee/blame"
        """Prompt of prompts/ with the fields goal, dialogue and ending."""

        def __post_init__(self) -> None:
            for party in self.excludes:
                if party not in PARTIES or party == "agent":
                    allowed = [name for name in PARTIES if name != "agent"]
                    raise ConfigError(
                        f"excludes names {party!r}; allowed: {', '.join(allowed)}{nearest(party, allowed)}"
                    )
            if not 0 <= self.redraws < 1000:
                raise ConfigError(f"redraws {self.redraws} is not in 0 to 999")

    def __init__(self, config: Config, *, chat_model: ChatModel | None = None) -> None:
        """`chat_model` answers instead of an HTTP endpoint. Raises ConfigError for a prompt with other fields."""
        self.config = config
        self._prompt = prompts.load(config.prompt)
        if self._prompt.fields != FIELDS:
            raise ConfigError(
                f"prompt {config.prompt!r} has the fields {', '.join(sorted(self._prompt.fields)) or 'none'}; "
                f"a referee's has {', '.join(sorted(FIELDS))}"
            )
        self._model = None if config.endpoint is None else chat_model_of(config.endpoint, chat_model)

    @property
    def usage(self) -> Usage:
        """What the questions have cost so far."""
        return Usage() if self._model is None else self._model.usage

    def judge(self, trajectory: Trajectory) -> Ruling:
        """The ruling on one dialogue."""
        return self.judge_many([trajectory])[0]

    def judge_many(self, trajectories: Sequence[Trajectory]) -> list[Ruling]:
        """A ruling on each; those that the chat model has to be asked about are asked together."""
        views = [view(trajectory) for trajectory in trajectories]
        rulings = [self._by_rules(seen) for seen in views]
        open_ = [number for number, ruling in enumerate(rulings) if ruling is None]
        faults = {number: find(views[number]) for number in open_}
        if self._model is None or not open_:
            answers: list[Answer | None] = [None] * len(open_)
        else:
            answers = list(self._model.ask([self._question(views[number]) for number in open_]))
        for number, answer in zip(open_, answers, strict=True):
            rulings[number] = self._by_answer(views[number], faults[number], answer)
        return [ruling for ruling in rulings if ruling is not None]

    def marked(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The records with the rulings on them as `provenance["blame"]`."""
        rulings = self.judge_many(trajectories)
        return [
            replace(one, provenance={**one.provenance, "blame": ruling.to_dict()})
            for one, ruling in zip(trajectories, rulings, strict=True)
        ]

    def _by_rules(self, seen: View) -> Ruling | None:
        """What the rules say for certain; None for a failure that they do not explain."""
        faults = find(seen)
        first = next((one for one in faults if _decides(one, seen)), None)
        if first is not None and first.party == "user" and first.weight == "serious" and _weighs(seen):
            fault, _ = weighed(seen, faults)
            return None if fault is None else self._ruling(fault, faults)
        if first is not None:
            return self._ruling(first, faults)
        if seen.success or seen.trajectory.termination == "unknown":  # a log that says no ending says no failure
            return Ruling(party=None, noted=faults)
        if _weighs(seen):
            fault, _ = weighed(seen, faults)
            return None if fault is None else self._ruling(fault, faults)
        return None

    def _by_answer(self, seen: View, faults: tuple[Fault, ...], answer: Answer | None) -> Ruling:
        """The chat model's word, else a suspicion, else the agent."""
        if answer is not None and answer.value is not None:
            return replace(self._ruling(answer.value, faults), by="llm")
        unasked = "" if answer is None or answer.reason is None else answer.reason
        last: Line | None = None
        if _weighs(seen):
            _, last = weighed(seen, faults)
        else:
            suspicion = next((one for one in faults if one.weight == "suspect"), None)
            if suspicion is not None:
                return replace(self._ruling(suspicion, faults), unasked=unasked)
        if last is None:
            last = next((line for line in reversed(seen.lines) if line.side == "agent"), None)
        quote = last.text[:300] if last is not None else ""
        fault = Fault(party="agent", kind="fails", turn=last.turn if last is not None else 0, quote=quote)
        return replace(self._ruling(fault, faults), by="default", unasked=unasked)

    def _ruling(self, fault: Fault, faults: Sequence[Fault]) -> Ruling:
        return Ruling(
            party=fault.party,
            fault=fault,
            noted=tuple(one for one in faults if one is not fault),
            excluded=fault.party in self.config.excludes,
        )

    def _question(self, seen: View) -> Question:
        lines = [{"turn": line.turn, "speaker": line.side, "says": line.text[:2000]} for line in seen.lines]
        goal = seen.trajectory.task.get("goal", seen.trajectory.task)
        content = self._prompt.render(
            goal=whole_characters(json.dumps(goal, ensure_ascii=False, default=str)[:4000]),
            dialogue="\n".join(whole_characters(json.dumps(line, ensure_ascii=False)) for line in lines),
            ending=seen.trajectory.termination,
        )
        return Question(
            name="blame",
            messages=(Message(role="user", content=content),),
            schema=_SCHEMA,
            read=lambda answer: _read(answer, seen),
        )


def _weighs(seen: View) -> bool:
    """Whether a failure is decided by all the evidence: only where there are slots to hold it against."""
    return _has_slots(seen) and seen.pinned.get("name") not in TRUSTED and not seen.trajectory.failed


def _has_slots(seen: View) -> bool:
    return len(seen.wanted) >= 2


def rule_faults(seen: View) -> tuple[Fault, ...]:
    """What the rules alone see."""
    return find(seen)


def find(seen: View) -> tuple[Fault, ...]:
    """All faults that the rules see, the weightiest first, in the order of their turns."""
    faults = list(other_faults(seen))
    if seen.pinned.get("name") not in TRUSTED and not seen.trajectory.failed:
        faults += [*form_faults(seen), *goal_faults(seen), *conduct_faults(seen)]
    if seen.goal_text and not _has_slots(seen):
        faults = [replace(one, weight="minor") if one.kind in AGAINST_GOAL else one for one in faults]
    order = ("decisive", "serious", "suspect", "minor")
    unique = {(one.party, one.kind, one.turn): one for one in reversed(faults)}
    return tuple(sorted(unique.values(), key=lambda one: (order.index(one.weight), one.party == "user", one.turn)))


def _decides(fault: Fault, seen: View) -> bool:
    failed = not seen.success and seen.trajectory.termination != "unknown"
    return fault.weight == "decisive" or (fault.weight == "serious" and (failed or fault.party == "scorer"))


def _read(answer: Mapping[str, Any], seen: View) -> Fault:
    """The fault that an answer names; raises ValueError unless its quote stands in the dialogue."""
    party, quote, reason = answer.get("party"), answer.get("quote"), answer.get("reason")
    if party not in PARTIES:
        raise ValueError(f"party {party!r} is not one of {', '.join(PARTIES)}")
    if not isinstance(quote, str) or not normal(quote).strip():
        raise ValueError("there is no quote")
    if not isinstance(reason, str) or not reason.strip():
        raise ValueError("there is no reason")
    wanted = " ".join(normal(quote).split())
    sides = {"user": ("user",), "agent": ("agent",)}.get(party, ("user", "agent", "tool"))
    lines = [line for line in seen.lines if line.side in sides and wanted in " ".join(line.plain.split())]
    if not lines:
        raise ValueError(f"the quote {quote[:80]!r} does not stand in a line of {' or '.join(sides)}")
    turn = answer.get("turn")
    line = next((one for one in lines if one.turn == turn), lines[0])
    return Fault(party=party, kind="judged", turn=line.turn, quote=quote[:300], note=reason[:400])


def is_replaced(trajectory: Trajectory) -> bool:
    """Whether the dialogue was played again, so that another record of the task stands for it."""
    return bool((trajectory.provenance.get("blame") or {}).get("redrawn"))


def blame_counts(trajectories: Sequence[Trajectory]) -> Counter[str]:
    """How many dialogues are laid to each party, by `party` and by `party/kind`; a record without a ruling is not."""
    counts: Counter[str] = Counter()
    for trajectory in trajectories:
        blame = trajectory.provenance.get("blame")
        if isinstance(blame, Mapping) and blame.get("party"):
            counts[str(blame["party"])] += 1
            counts[f"{blame['party']}/{blame.get('kind', 'unknown')}"] += 1
    return counts


def blame_line(trajectories: Sequence[Trajectory]) -> str:
    """The counts in one line, the excluded dialogues included."""
    counts = blame_counts(trajectories)
    parts = []
    for party in PARTIES:
        if counts[party]:
            kinds = [(key.partition("/")[2], n) for key, n in counts.most_common() if key.startswith(f"{party}/")]
            parts.append(f"{party} {counts[party]} ({', '.join(f'{kind} {n}' for kind, n in kinds)})")
    excluded = sum(trajectory.excluded for trajectory in trajectories)
    return f"blame: {'; '.join(parts) or 'nobody'}; {excluded} left out of gradient and success rate"


def meaning(kind: str) -> str:
    """What a kind of fault is, in words."""
    return KINDS.get(kind, "found by the chat model")
