"""Writing a function: the agent asks what it must do and submits code, which runs on hidden tests in a sandbox.

Some tasks read an HTTP interface, some store into SQLite. docs/environments.md states the rules.
"""

from __future__ import annotations

import json
import random
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from slea_llm.checks import check_least, check_most, check_shares, check_subset
from slea_llm.environments.agents import Errors, Plan, Track
from slea_llm.environments.code_task_agents import SUBMIT, errors, plan, track
from slea_llm.environments.code_task_spec import (
    LIMITS,
    SOURCES,
    TARGETS,
    Case,
    Spec,
    cases_of,
    driven,
    fault,
    spec_of,
)
from slea_llm.environments.noted_dialogue import NotedConfig, NotedEpisode, NotedTasks, Notes, draw_vague
from slea_llm.environments.speech import Call, Speech, call_text
from slea_llm.errors import UnsupportedError, nearest
from slea_llm.sandbox import runner
from slea_llm.sandbox.runner import Limits
from slea_llm.types import Message, Outcome, Task

LONGEST_EXPERT = 11
"""Turns of the expert at worst: 5 questions, 2 vague answers, 2 read-backs, the code, one to spare."""

MOST_CODE = 100_000
"""Characters of a submission."""

MOST_SETTING = 1_000_000
"""Of submissions, of seconds a test and of MiB."""

_KEPT_RESULTS = 512

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_FENCED = "\2"
"""Stands for a fence while a reply is understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestRun:
    """Test name -> what was wrong with the answer, or None; `broke` says why there are no answers at all."""

    faults: Mapping[str, str | None]
    broke: str | None = None


class CodeTask(NotedTasks["CodeEpisode"]):
    """The task family; its tasks suit the user `scripted`. Made only where the sandbox can be made (Linux)."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config(NotedConfig):
        max_turns: int = 13
        """Replies of the agent after which the dialogue ends with reward -1; at least 11, what the expert needs."""
        submissions: int = 3
        """Times that code may be submitted; the last one that fails ends the dialogue. At least 1."""
        misstated_share: float = 0.2
        """Share of users who misstate a value and notice it only when it is read back; in [0, 1]."""
        vague_share: float = 0.2
        """Share of slots about which the user is vague when first asked; in [0, 1]."""
        case_seconds: float = 5.0
        """Time that one test may take; at least 0.1."""
        memory_mib: int = 256
        """Memory of the code and its tests together; at least 64."""
        sources: tuple[str, ...] = SOURCES
        """What tasks draw their source from, two at least: http, csv, json, lines."""
        targets: tuple[str, ...] = TARGETS
        """What tasks draw their result from, two at least: orders, readings, tickets (tables), dictionary, list."""
        limits: tuple[int, ...] = LIMITS
        """What tasks draw the smallest amount from, two at least, each from 2 to 60."""
        show_notes: bool = False
        """Once all is agreed, have a message of the tool `tracker` say what was."""

        def __post_init__(self) -> None:
            check_least(self, max_turns=LONGEST_EXPERT, why="some tasks need as many")
            check_shares(self, "misstated_share", "vague_share")
            check_least(self, submissions=1, case_seconds=0.1, memory_mib=64)
            check_most(self, submissions=MOST_SETTING, case_seconds=MOST_SETTING, memory_mib=MOST_SETTING)
            # A user who misstates a value needs another one.
            check_subset(self, least=2, sources=SOURCES, targets=TARGETS, limits=LIMITS)

    name: ClassVar[str] = "code_task"
    config: Config

    def __init__(self, config: Config) -> None:
        if reason := runner.unavailable():
            raise UnsupportedError(f"code_task runs what an agent writes, and only in a sandbox: {reason}")
        super().__init__(config)
        self._driver = Path(__file__).with_name("code_task_driver.py").read_text(encoding="utf-8")
        # The same code on the same tests gives the same answers; dialogues that are played again ask for them.
        self._results: OrderedDict[str, TestRun] = OrderedDict()

    def task(self, seed: int) -> Task:
        task = super().task(seed)
        return replace(task, goal={"tests": seed, **task.goal})

    def _goal(self, rng: random.Random, speech: Speech) -> dict[str, Any]:
        wanted = self._drawn(rng, speech)
        vague = draw_vague(rng, speech.slots, self.config.vague_share)
        misstated = {}
        if rng.random() < self.config.misstated_share:
            slot = rng.choice(speech.slots)
            others = [value for _ in range(99) if (value := self._drawn(rng, speech)[slot]) != wanted[slot]]
            misstated = {slot: others[0]}
        user = {
            "values": wanted,
            "volunteers": list(rng.choice(((), ("source",), ("source", "target")))),
            "together": {"bad": ["repeated"]} if rng.random() < 0.3 else {},
            "vague": vague,
            "misstated": misstated,
            "patience": rng.choice((2, 2, 3)),
            "wording": f"{self.name}/user.{speech.code}.yaml",
        }
        return {"user": user}

    def _drawn(self, rng: random.Random, speech: Speech) -> dict[str, str]:
        choices = {slot: speech.choices(slot) for slot in speech.slots if slot != "keep"}
        for slot, meanings, wanted in (
            ("source", SOURCES, self.config.sources),
            ("target", TARGETS, self.config.targets),
        ):
            choices[slot] = tuple(choices[slot][meanings.index(one)] for one in wanted)
        drawn = {slot: rng.choice(several) for slot, several in choices.items()}
        drawn["keep"] = speech.data["forms"]["keep"].format(least=rng.choice(self.config.limits))
        return {slot: drawn[slot] for slot in speech.slots}

    def _extra(self, task: Task) -> dict[str, Any]:
        del task
        return {"submissions": 0, "passed": 0, "tests": 0, "failed": []}

    def _agent(self, task: Task) -> tuple[Plan, Errors, Track]:
        speech = self._speech(task)
        return lambda state: plan(state, speech), lambda state, rng: errors(state, rng, speech), track

    def _episode(self, task: Task, notes: Notes) -> CodeEpisode:
        example = call_text(SUBMIT, {"code": "def solve(source, target):\n    ..."})
        frame = self._frame(task, notes, submit=example, most=str(self.config.submissions))
        spec = spec_of(task.goal["user"]["values"], frame["speech"])
        return CodeEpisode(self, spec, tests=int(task.goal["tests"]), **frame)

    def tested(self, code: str, spec: Spec, tests: int) -> TestRun:
        """What the tests say of a submission; raises EpisodeError when the sandbox itself breaks."""
        key = json.dumps([code, repr(spec), tests])
        if key not in self._results:
            cases = cases_of(spec, tests)
            self._results[key] = self._run(code, spec, cases)
            if len(self._results) > _KEPT_RESULTS:
                self._results.popitem(last=False)
        return self._results[key]

    def _run(self, code: str, spec: Spec, cases: list[Case]) -> TestRun:
        seconds = self.config.case_seconds
        files = {
            "main.py": self._driver,
            "solution.py": code,
            "cases.json": json.dumps(driven(spec, cases, seconds)),
        }
        limits = Limits(wall_s=seconds * len(cases) + 5, cpu_s=60, memory_mib=self.config.memory_mib)
        verdict = runner.run(files, limits, loopback=True)
        if verdict.status != "ok":
            what = "; ".join(verdict.attempts[:3]) or verdict.errors.strip().rpartition("\n")[2][:200]
            broke = f"{verdict.status}: {what}" if what else str(verdict.status)
            return TestRun(faults={case.name: broke for case in cases}, broke=broke)
        try:
            answers: list[dict[str, Any]] = json.loads(verdict.output)
        except (ValueError, RecursionError):
            broke = "no answers came back"
            return TestRun(faults={case.name: broke for case in cases}, broke=broke)
        return TestRun(faults={case.name: fault(spec, case, given) for case, given in zip(cases, answers, strict=True)})


class CodeEpisode(NotedEpisode):
    """One function. Success: every hidden test passes within the submissions that are allowed."""

    def __init__(self, environment: CodeTask, spec: Spec, *, tests: int, **frame: Any) -> None:
        super().__init__(**frame)
        self._environment, self._spec, self._tests = environment, spec, tests

    def take_words(self, reply: str) -> Outcome:
        """What a spoken reply does; code in a fence asks nothing and reads nothing back, and it is not run."""
        fences = iter(_FENCE.findall(reply))
        outcome = super().take_words(_FENCE.sub(_FENCED, reply))
        heard = re.sub(_FENCED, lambda _: next(fences, ""), str(outcome.acts["heard"]))
        return replace(outcome, acts={**outcome.acts, "heard": heard})

    def user_answered(self, text: str) -> Outcome:
        """What was agreed, from the tracker, where the settings have it told."""
        told = self._environment.config.show_notes and len(self.notes.confirmed) == len(self.required)
        if not told:
            return super().user_answered(text)
        agreed = str(self.speech.data["agreed"]).format(notes=self.speech.describe(self.notes.filled))
        return Outcome(messages=(Message(role="tool", content=agreed, name="tracker"),))

    def take_call(self, call: Call) -> Outcome:
        if call.arguments is None:
            return super().take_call(call)
        if call.name != SUBMIT:
            return self.tool_error("unknown", name=call.name, hint=nearest(call.name, (SUBMIT,)))
        code = call.arguments.get("code")
        if not isinstance(code, str) or not code.strip() or len(code) > MOST_CODE:
            return self.tool_error("argument", name=SUBMIT, most=str(MOST_CODE))
        return self._submitted(code.encode("utf-8", "replace").decode("utf-8"))

    def _submitted(self, code: str) -> Outcome:
        result, extra = self._environment.tested(code, self._spec, self._tests), self.notes.extra
        failed = [name for name, wrong in result.faults.items() if wrong is not None]
        extra["submissions"] += 1
        extra.update(passed=len(result.faults) - len(failed), tests=len(result.faults), failed=failed)
        words: Mapping[str, Any] = self.speech.data["tests"]
        lines = [f"{words['names'][name]}: {result.faults[name]}" for name in failed]
        count = str(words["count"]).format(passed=extra["passed"], tests=extra["tests"])
        text = "\n".join([count, *([str(words["broke"]).format(what=result.broke)] if result.broke else lines)])
        message = Message(role="tool", content=text, name=SUBMIT)
        acts = {"heard": "", "failed": failed}
        if not failed:
            return self.end("success", acts=acts, messages=(message,))
        if extra["submissions"] >= self._environment.config.submissions:
            return self.end("failure", acts=acts, messages=(message,))
        return Outcome(messages=(message,), acts=acts)
