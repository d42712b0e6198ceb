"""Taking a food order from a user who may be vague, misspeak and lose patience.

The agent thinks, then speaks or calls `place_order`. A tracker notes down what the user says; the hidden goal alone
judges the order that is placed. docs/environments.md states the rules and rewards.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from slea_llm import prompts
from slea_llm.checks import check_least, check_shares
from slea_llm.environments.noted_dialogue import draw_vague
from slea_llm.environments.order_taking_agents import Idler, OrderExpert
from slea_llm.environments.order_taking_draws import (
    add_events,
    draw_misstated,
    draw_order,
    draw_together,
    draw_volunteers,
)
from slea_llm.environments.order_taking_language import SLOTS, TOOL, Language, Understanding
from slea_llm.environments.speech import Call, calls, spoken
from slea_llm.errors import EpisodeError
from slea_llm.types import Message, Outcome, State, Task, Termination

REWARDS: MappingProxyType[Termination, float] = MappingProxyType({"success": 10.0, "failure": -1.0, "user_left": -1.0})
"""Reward of each ending; every other turn earns 0."""

LONGEST_EXPERT = 10
"""Turns of the expert at worst: 5 questions, 2 vague answers, read-back, read-back of the corrected order, the call."""


@dataclass(slots=True, kw_only=True)
class _Progress:
    """All that changes during an episode. `pending` holds the values just read back, which a yes confirms."""

    turn: int = 0
    filled: dict[str, str] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    last_filled: list[str] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)
    sold_out: list[str] = field(default_factory=list)
    suggested: list[str] = field(default_factory=list)
    advice: bool = False
    placed: bool = False
    ended: bool = False


class OrderTaking:
    """The task family; its tasks suit the user `scripted`."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        language: Literal["en", "zh", "mixed"] = "en"
        """Language of the dialogues; `mixed` draws one for each task."""
        prompt: Literal["terse", "full"] = "terse"
        """System prompt: a line for tiny models, or one for chat models that asks for explicit steps."""
        max_turns: int = 12
        """Replies of the agent after which the dialogue ends with reward -1; at least 10, what the expert needs."""
        misstated_share: float = 0.35
        """Share of tasks whose user misstates a value and notices it only when it is read back; in [0, 1]."""
        vague_share: float = 0.15
        """Share of slots about which the user is vague when first asked; in [0, 1]."""
        agent_writes_values: bool = False
        """The order is what the agent writes into the call, instead of what the tracker noted down."""
        undecided_share: float = 0.0
        """Share of users who want a dish recommended, and may refuse the first; in [0, 1]."""
        sold_out_share: float = 0.0
        """Share of the other users whose first dish is sold out, which the kitchen says when it is named; in [0, 1]."""
        change_share: float = 0.0
        """Share of users who change their mind about a value they have told, unasked; in [0, 1]."""
        show_notes: bool = False
        """After every word of the user the agent is told, as a tool's message, what the tracker still misses: all that
        an evaluator can read from the public state, in the prompt."""

        def __post_init__(self) -> None:
            # A suggestion that is refused and another; the news and the second choice; the read-back of a change.
            more = 2 * (self.undecided_share > 0) or 1 * (self.sold_out_share > 0)
            longest = LONGEST_EXPERT + more + (self.change_share > 0)
            check_least(self, max_turns=longest, why="some orders need as many")
            check_shares(self, "misstated_share", "vague_share", "undecided_share", "sold_out_share", "change_share")

    name: ClassVar[str] = "order_taking"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: Config) -> None:
        self.config = config
        codes = ("en", "zh") if config.language == "mixed" else (config.language,)
        self._languages = {code: Language(code) for code in codes}
        self._prompts = {code: prompts.load(f"order_taking/{config.prompt}.{code}") for code in codes}

    def task(self, seed: int) -> Task:
        rng = random.Random(f"{self.name}/{seed}")  # noqa: S311 (not a secret)
        code = rng.choice(sorted(self._languages))
        order = draw_order(rng, self._languages[code])
        user = {
            "values": order,
            "volunteers": draw_volunteers(rng),
            "together": draw_together(rng, list(order)),
            "vague": draw_vague(rng, list(order), self.config.vague_share),
            "misstated": draw_misstated(rng, order, self._languages[code], self.config.misstated_share),
            "patience": rng.choice((2, 2, 3, 3)),
            "wording": f"order_taking/user.{code}.yaml",
        }
        goal: dict[str, Any] = {"order": order, "user": user}
        if self._options:
            # Draws of their own, so that an option leaves all other draws of a task as they are.
            add_events(random.Random(f"{self.name}/{seed}/events"), goal, self._languages[code], self.config)  # noqa: S311
        return Task(id=f"{self.name}-{code}-{seed}", seed=seed, goal=goal, language=code)

    @property
    def _options(self) -> bool:
        return bool(self.config.undecided_share or self.config.sold_out_share or self.config.change_share)

    def start(self, task: Task) -> OrderEpisode:
        return self._episode(task, _Progress())

    def restore(self, task: Task, snapshot: Mapping[str, Any]) -> OrderEpisode:
        """The episode as it was; raises EpisodeError for a snapshot of another shape."""
        names = {entry.name for entry in fields(_Progress)}
        if snapshot.keys() != names:
            raise EpisodeError(f"snapshot has the keys {sorted(snapshot)}; expected {sorted(names)}")
        return self._episode(task, _Progress(**{name: _copied(value) for name, value in snapshot.items()}))

    def expert(self, task: Task, *, error_rate: float = 0.0) -> OrderExpert:
        return OrderExpert(
            languages=self._languages,
            error_rate=error_rate,
            seed=task.seed,
            writes_values=self.config.agent_writes_values,
        )

    def idler(self, task: Task) -> Idler:
        del task
        return Idler(languages=self._languages)

    def _episode(self, task: Task, progress: _Progress) -> OrderEpisode:
        if task.language not in self._languages:
            raise EpisodeError(
                f"task {task.id!r} is in {task.language!r}; this environment speaks {[*self._languages]}"
            )
        return OrderEpisode(
            task,
            config=self.config,
            language=self._languages[task.language],
            prompt=self._prompts[task.language],
            progress=progress,
            options=self._options,
        )


class OrderEpisode:
    """One dialogue. Replies are understood by patterns; `{order}` in a reply is what the tracker has noted down."""

    def __init__(
        self,
        task: Task,
        *,
        config: OrderTaking.Config,
        language: Language,
        prompt: prompts.Prompt,
        progress: _Progress,
        options: bool = False,
    ) -> None:
        self._goal: Mapping[str, str] = task.goal["order"]
        self._undecided: Sequence[str] = task.goal.get("undecided", ())
        self._sold_out: Sequence[str] = task.goal.get("sold_out", ())
        self._options = options
        self._config = config
        self._language = language
        self._prompt = prompt
        self._progress = progress

    def system_prompt(self) -> tuple[Message, ...]:
        wording = self._language.prompt
        ending = "_with_values" if self._config.agent_writes_values else ""
        slots = self._language.slot_list(self._goal)
        values = {"slots": slots, "call": wording["call" + ending], "call_rule": wording["call_rule" + ending]}
        text = self._prompt.render(**{name: values[name] for name in self._prompt.fields})
        if self._options:
            text = f"{text} {wording['options'].format(dish=self._language.dishes[0])}"
        return (Message(role="system", content=text),)

    def state(self) -> State:
        progress = self._progress
        required = list(self._goal)
        events = {"sold_out": list(progress.sold_out), "suggested": list(progress.suggested), "advice": progress.advice}
        return {
            **(events if self._options else {}),
            "language": self._language.code,
            "required": required,
            "filled": {slot: progress.filled[slot] for slot in required if slot in progress.filled},
            "confirmed": [slot for slot in required if slot in progress.confirmed],
            "missing": [slot for slot in required if slot not in progress.filled],
            "unconfirmed": [slot for slot in required if slot in progress.filled and slot not in progress.confirmed],
            "asked": dict(progress.asked),
            "last_filled": list(progress.last_filled),
            "turn": progress.turn,
            "turns_left": self._config.max_turns - progress.turn,
            "placed": progress.placed,
        }

    def snapshot(self) -> Mapping[str, Any]:
        return asdict(self._progress)

    def agent_says(self, text: str) -> Outcome:
        self._check_open()
        self._progress.turn += 1
        self._progress.last_filled = []
        self._progress.pending = {}
        reply = spoken(text)
        made = calls(reply)
        outcome = self._take_call(made[0]) if made else self._take_words(reply)
        if outcome.termination is None and self._progress.turn >= self._config.max_turns:
            return self._end("failure", acts=outcome.acts)
        return outcome

    def user_says(self, text: str, *, leaving: bool = False) -> Outcome:
        self._check_open()
        self._note(text)
        return self._end("user_left") if leaving else Outcome(messages=(*self._news(), *self._notes()))

    def _notes(self) -> tuple[Message, ...]:
        """What is still to come, from the tracker, where the settings have it told."""
        if not self._config.show_notes:
            return ()
        missing = [slot for slot in self._goal if slot not in self._progress.filled]
        unconfirmed = [slot for slot in self._goal if slot not in self._progress.confirmed]
        notices = self._language.notices
        text = notices["missing"].format(slots=self._language.slot_list(missing)) if missing else notices["whole"]
        return (Message(role="tool", content=text if unconfirmed else notices["agreed"], name="tracker"),)

    def _news(self) -> tuple[Message, ...]:
        """What the kitchen says of a dish that the user has just named."""
        progress = self._progress
        dish = progress.filled.get("dish")
        if dish is None or dish not in self._sold_out:
            return ()
        progress.filled = {slot: value for slot, value in progress.filled.items() if slot != "dish"}
        progress.confirmed = [slot for slot in progress.confirmed if slot != "dish"]
        progress.sold_out = list(dict.fromkeys([*progress.sold_out, dish]))
        text = self._language.notices["sold_out"].format(value=dish)
        return (Message(role="tool", content=text, name="kitchen"),)

    def _take_words(self, reply: str) -> Outcome:
        progress = self._progress
        understood = self._language.understand(reply, filled=progress.filled)
        for slot in understood.asks:
            progress.asked[slot] = progress.asked.get(slot, 0) + 1
        progress.pending = dict(understood.reads_back)
        if dish := understood.suggests.get("dish"):
            progress.suggested = list(dict.fromkeys([*progress.suggested, dish]))
        acts = asdict(understood)
        return Outcome(to_user=True, acts={**acts, "unavailable": self._unavailable(understood), "places": False})

    def _unavailable(self, understood: Understanding) -> dict[str, str]:
        """The dish that the agent truly says to be sold out: the one it names, or else the last that is."""
        sold_out = self._progress.sold_out
        named = understood.regretted.get("dish", sold_out[-1] if sold_out else "")
        return {"dish": named} if understood.regrets and named in sold_out else {}

    def _take_call(self, call: Call) -> Outcome:
        acts: dict[str, Any] = {"heard": "", "asks": (), "reads_back": {}, "recommends": (), "places": False}
        if call.arguments is None or call.name != TOOL:
            kind = "malformed" if call.arguments is None else "unknown"
            message = Message(role="tool", content=self._language.tool_errors[kind], name=TOOL)
            return Outcome(messages=(message,), acts=acts)
        self._progress.placed = True
        right = self._order(call.arguments) == self._wanted()
        return self._end("success" if right else "failure", acts={**acts, "places": True})

    def _wanted(self) -> dict[str, str]:
        """The hidden goal; of what the user was undecided about, what they took in the end."""
        taken = {slot: self._progress.filled.get(slot, "") for slot in self._undecided}
        return {**self._goal, **taken}

    def _order(self, arguments: Mapping[str, Any]) -> Mapping[str, str | None]:
        """The order as placed; a value that is none of its slot is None."""
        if not self._config.agent_writes_values:
            return {slot: value for slot, value in self._progress.filled.items() if slot in self._goal}
        return {slot: self._language.canonical(slot, str(value)) for slot, value in arguments.items()}

    def _note(self, text: str) -> None:
        """Fill the order from the user's words, and confirm what was read back when the user agrees to it."""
        progress = self._progress
        told = {slot: value for slot, value in self._language.values(text).items() if slot in self._goal}
        changed = [slot for slot, value in told.items() if progress.filled.get(slot) != value]
        progress.filled.update(told)
        progress.last_filled = changed
        confirmed = set(progress.confirmed) - set(changed)
        verdict = self._language.verdict(text)
        if verdict or (verdict is False and told.keys() & progress.pending.keys()):
            # A no that names the right values agrees to the rest of what was read back.
            heard_right = {slot for slot, value in progress.pending.items() if progress.filled.get(slot) == value}
            confirmed |= heard_right - set(changed)
        progress.confirmed = [slot for slot in SLOTS if slot in confirmed]
        progress.pending = {}
        progress.advice = self._options and self._language.asks_advice(text)

    def _end(self, termination: Termination, acts: Mapping[str, Any] | None = None) -> Outcome:
        self._progress.ended = True
        return Outcome(acts=acts or {}, reward=REWARDS[termination], termination=termination)

    def _check_open(self) -> None:
        if self._progress.ended:
            raise EpisodeError("this dialogue has ended; start another episode")


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value
