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
from slea_llm.environments.order_taking_agents import Idler, OrderExpert
from slea_llm.environments.order_taking_language import SLOTS, TOOL, Language
from slea_llm.environments.speech import Call, calls, spoken
from slea_llm.errors import ConfigError, EpisodeError
from slea_llm.types import Message, Outcome, State, Task, Termination

REWARDS: MappingProxyType[Termination, float] = MappingProxyType({"success": 10.0, "failure": -1.0, "user_left": -1.0})
"""Reward of each ending; every other turn earns 0."""

LONGEST_EXPERT = 10
"""Turns of the expert at worst: 5 questions, 2 vague answers, read-back, read-back of the corrected order, the call."""

MAX_VAGUE = 2


@dataclass(slots=True, kw_only=True)
class _Progress:
    """All that changes during an episode. `pending` holds the values just read back, which a yes confirms."""

    turn: int = 0
    filled: dict[str, str] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    last_filled: list[str] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)
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

        def __post_init__(self) -> None:
            if self.max_turns < LONGEST_EXPERT:
                raise ConfigError(f"max_turns is {self.max_turns}; some orders need {LONGEST_EXPERT} turns")
            for name in ("misstated_share", "vague_share"):
                if not 0.0 <= getattr(self, name) <= 1.0:
                    raise ConfigError(f"{name} {getattr(self, name)} is not in [0, 1]")

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
        order = _draw_order(rng, self._languages[code])
        user = {
            "values": order,
            "volunteers": _draw_volunteers(rng),
            "together": _draw_together(rng, list(order)),
            "vague": _draw_vague(rng, list(order), self.config.vague_share),
            "misstated": _draw_misstated(rng, order, self._languages[code], self.config.misstated_share),
            "patience": rng.choice((2, 2, 3, 3)),
            "wording": f"order_taking/user.{code}.yaml",
        }
        return Task(id=f"{self.name}-{code}-{seed}", seed=seed, goal={"order": order, "user": user}, language=code)

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
        )


class OrderEpisode:
    """One dialogue. Replies are understood by patterns; `{order}` in a reply is what the tracker has noted down."""

    def __init__(
        self, task: Task, *, config: OrderTaking.Config, language: Language, prompt: prompts.Prompt, progress: _Progress
    ) -> None:
        self._goal: Mapping[str, str] = task.goal["order"]
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
        return (Message(role="system", content=text),)

    def state(self) -> State:
        progress = self._progress
        required = list(self._goal)
        return {
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
        return self._end("user_left") if leaving else Outcome()

    def _take_words(self, reply: str) -> Outcome:
        progress = self._progress
        understood = self._language.understand(reply, filled=progress.filled)
        for slot in understood.asks:
            progress.asked[slot] = progress.asked.get(slot, 0) + 1
        progress.pending = dict(understood.reads_back)
        return Outcome(to_user=True, acts={**asdict(understood), "places": False})

    def _take_call(self, call: Call) -> Outcome:
        acts = {"heard": "", "asks": (), "reads_back": {}, "recommends": (), "places": False}
        if call.arguments is None or call.name != TOOL:
            kind = "malformed" if call.arguments is None else "unknown"
            message = Message(role="tool", content=self._language.tool_errors[kind], name=TOOL)
            return Outcome(messages=(message,), acts=acts)
        self._progress.placed = True
        right = self._order(call.arguments) == dict(self._goal)
        return self._end("success" if right else "failure", acts={**acts, "places": True})

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

    def _end(self, termination: Termination, acts: Mapping[str, Any] | None = None) -> Outcome:
        self._progress.ended = True
        return Outcome(acts=acts or {}, reward=REWARDS[termination], termination=termination)

    def _check_open(self) -> None:
        if self._progress.ended:
            raise EpisodeError("this dialogue has ended; start another episode")


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list) else value


def _draw_order(rng: random.Random, language: Language) -> dict[str, str]:
    wanted = {"dish", "quantity", "address"}
    wanted |= {slot for slot, share in (("time", 0.5), ("phone", 0.4)) if rng.random() < share}
    return {slot: _draw_value(rng, slot, language) for slot in SLOTS if slot in wanted}


def _draw_value(rng: random.Random, slot: str, language: Language) -> str:
    if slot == "dish":
        return rng.choice(language.dishes)
    if slot == "quantity":
        return rng.choice(language.quantities)
    if slot == "address":
        return language.address(number=rng.randint(1, 60), street=rng.choice(language.streets))
    if slot == "time":
        return f"{rng.randint(11, 21)}:{rng.choice(('00', '15', '30', '45'))}"
    return f"555-01{rng.randint(0, 99):02d}"


def _draw_volunteers(rng: random.Random) -> list[str]:
    """What the user tells at the opening: nothing, or the start of its order."""
    choices = ((), ("dish",), ("dish", "quantity"), ("address",), ("dish", "address"), ("dish", "quantity", "address"))
    return list(rng.choices(choices, weights=(30, 25, 20, 5, 10, 10))[0])


def _draw_together(rng: random.Random, slots: Sequence[str]) -> dict[str, list[str]]:
    """Slots that the user tells along with the one that was asked for."""
    together = {slot: [rng.choice([other for other in slots if other != slot])] for slot in slots}
    return {slot: others for slot, others in together.items() if rng.random() < 0.2}


def _draw_vague(rng: random.Random, slots: Sequence[str], share: float) -> dict[str, int]:
    vague = [slot for slot in slots if rng.random() < share]
    return dict.fromkeys(vague[:MAX_VAGUE], 1)


def _draw_misstated(rng: random.Random, order: Mapping[str, str], language: Language, share: float) -> dict[str, str]:
    """One slot, rarely two, with another value of its kind."""
    if rng.random() >= share:
        return {}
    wrong: dict[str, str] = {}
    for slot in rng.sample(list(order), k=2 if rng.random() < 0.2 else 1):
        while (value := _draw_value(rng, slot, language)) == order[slot]:
            pass
        wrong[slot] = value
    return wrong
