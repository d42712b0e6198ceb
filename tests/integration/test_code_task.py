"""code_task: submissions run on hidden tests, faults are told, and the step evaluator gives credit in part."""

from __future__ import annotations

import itertools
import json
from functools import cache

import pytest

from slea_llm.environments.code_task import CodeEpisode, CodeTask
from slea_llm.environments.code_task_agents import SUBMIT, careless, code_of
from slea_llm.environments.code_task_spec import SOURCES, Spec, spec_of
from slea_llm.environments.speech import call_text
from slea_llm.evaluators.knowledge_base import KnowledgeBase
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.referee import Referee
from slea_llm.rollout import play
from slea_llm.sandbox.runner import unavailable
from slea_llm.scoring import Scorer
from slea_llm.types import Trajectory, Turn
from slea_llm.users.scripted import ScriptedUser

REASON = unavailable()

pytestmark = [pytest.mark.integration, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

SPEC = Spec(source="csv", target="list", least=5, bad="skip", repeated="first")


@cache
def environment(language: str = "en") -> CodeTask:
    return CodeTask(CodeTask.Config(language=language))  # type: ignore[arg-type]


def faults(code: str, spec: Spec = SPEC, tests: int = 1) -> dict[str, str | None]:
    return dict(environment().tested(code, spec, tests).faults)


def begun(seed: int = 1) -> CodeEpisode:
    return environment().start(environment().task(seed))


@pytest.mark.parametrize(
    ("source", "target"), [*zip(SOURCES, ("orders", "list", "dictionary", "tickets"), strict=True)]
)
def test_solution_of_the_expert_passes_and_a_careless_one_does_not(source: str, target: str) -> None:
    spec = Spec(source=source, target=target, least=9, bad="raise", repeated="last")
    assert set(faults(code_of(spec), spec).values()) == {None}
    wrong = faults(careless(code_of(spec)), spec)
    assert [name for name, what in wrong.items() if what] == ["bad", "unreadable"]


@pytest.mark.parametrize(
    ("code", "test", "words"),
    [
        ("def solve(source, target): return []", "plain", "returned [], should return"),
        ("def solve(source): pass", "empty", "raised TypeError"),
        ("import requests\ndef solve(source, target): pass", "plain", "No module named 'requests'"),
        ("def solve(source, target):\n    return {1}", "plain", "not JSON serializable"),
        ("def solve(:", "plain", "raised SyntaxError"),
        ("answer = 1", "plain", "cannot import name 'solve'"),
        ("import os; os._exit(0)", "plain", "the process ended before solve returned"),
        ("import os, signal\ndef solve(*_): os.kill(os.getppid(), 9)", "plain", "killed"),
        ("import socket\ndef solve(*_): socket.create_connection(('192.0.2.1', 80))", "plain", "forbidden"),
        ("def solve(*_): open('/etc/passwd')", "plain", "forbidden: open '/etc/passwd'"),
        ("import os\ndef solve(*_):\n    while True: os.fork()", "plain", "too_many_processes"),
        ("def solve(*_): return [[True, 1.0]]", "empty", "returned [[true, 1.0]]"),
    ],
)
def test_what_went_wrong_is_told(code: str, test: str, words: str) -> None:
    assert words in str(faults(code)[test])


def test_answers_cannot_be_read_or_forged_by_the_code() -> None:
    """The code finds inputs, no answers; what it prints or writes to descriptors is not taken for a result."""
    snoop = """
import glob, os, json
def solve(source, target):
    seen = "".join(open(p, errors="replace").read() for p in glob.glob("/work/*") if os.path.isfile(p))
    print('[{"value": []}]')
    for fd in range(3, 64):
        try: os.write(fd, b'[{"value": []}]' * 6)
        except OSError: pass
    for fd in range(64):
        try: os.write(os.open(f"/proc/{os.getppid()}/fd/{fd}", os.O_WRONLY), b"[]")
        except OSError: pass
    return []
"""
    assert sum(what is None for what in faults(snoop).values()) <= 1


FORGED = (
    *(b"[1]", b"3", b"", b"[" * 5000, b"9" * 5000, b"x" * 70000, b'{"value": NaN}', b'{"rows": [[1, 2]]}'),
    *(b'{"raised": [[1]]}', b'{"raised": 3}', b'{"raised": [], "hung": []}', b'["limit", 3]', b'["open", "x", 1]'),
)


@pytest.mark.parametrize("answer", FORGED, ids=range(len(FORGED)))
def test_an_answer_of_the_code_s_own_making_fails(answer: bytes) -> None:
    code = f"""
import os
for fd in range(3, 64):
    try: os.write(fd, {answer!r} + bytes([10]))
    except OSError: pass
os._exit(0)
"""
    assert sum(wrong is not None for wrong in faults(code).values()) >= 5


def test_hanging_code_is_ended() -> None:
    quick = CodeTask(CodeTask.Config(case_seconds=0.2))
    code = "def solve(source, target):\n    while True: pass"
    assert set(quick.tested(code, SPEC, 1).faults.values()) == {"did not return"}


def test_submissions_are_counted_and_the_last_one_ends_it() -> None:
    episode = begun()
    wrong = call_text(SUBMIT, {"code": "def solve(source, target): return 1"})
    for number in (1, 2):
        outcome = episode.agent_says(wrong)
        assert (outcome.termination, episode.state()["submissions"]) == (None, number)
        assert "of 6 tests passed" in outcome.messages[0].content
    assert episode.agent_says(wrong).termination == "failure"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (call_text("submit", {"code": "x"}), "did you mean 'submit_code'"),
        (call_text(SUBMIT, {}), "argument code"),
        (call_text(SUBMIT, {"code": 3}), "argument code"),
        (call_text(SUBMIT, {"code": "x" * 100_001}), "100000 characters"),
        ("<tool_call>nonsense</tool_call>", "not valid JSON"),
        (call_text(SUBMIT, {"code": "\ud800\0"}), "0 of 6 tests passed"),
    ],
)
def test_faulty_calls_are_told_to_the_agent(call: str, words: str) -> None:
    outcome = begun().agent_says(call)
    assert outcome.termination is None
    assert words in outcome.messages[0].content


def test_tasks_differ_in_what_is_to_be_written() -> None:
    wishes = {json.dumps(environment().task(seed).goal["user"]["values"]) for seed in range(300)}
    assert len(wishes) > 250
    values = [environment().task(seed).goal["user"]["values"] for seed in range(300)]
    pairs = {(one["source"], one["target"]) for one in values}
    speech = environment()._speeches["en"]
    assert pairs == set(itertools.product(speech.choices("source"), speech.choices("target")))


# ---- partial credit by the step evaluator ------------------------------------------------------------------------

KNOWLEDGE = Scorer(
    TaggedParser(TaggedParser.Config()), [KnowledgeBase(KnowledgeBase.Config(file="knowledge/code.yaml"))]
)


def credit(code: str, thought: str) -> list[float | None]:
    """Scores of the steps of one reply that submits code once all is agreed."""
    slots = ["source", "target", "keep", "bad", "repeated"]
    known = {"required": slots, "filled": dict.fromkeys(slots, "x"), "confirmed": slots}
    text = f"<think>{thought}</think>{call_text(SUBMIT, {'code': code})}"
    turn = Turn(index=0, context=(), text=text, state_before=known, state_after=known)
    scored = KNOWLEDGE.score(
        Trajectory(
            id="t",
            task={},
            environment="code_task",
            seed=0,
            policy_version=0,
            turns=(turn,),
            traces=(),
            outcome=0.0,
            termination="failure",
        )
    )
    return [step.score for step in scored.scores]


@pytest.mark.parametrize("source", SOURCES)
def test_error_handling_earns_credit_whether_or_not_tests_pass(source: str) -> None:
    code = code_of(Spec(source=source, target="orders", least=3, bad="raise", repeated="sum"))
    assert (credit(code, "Write it.")[-1] or 0) > 0
    assert credit(careless(code), "Write it.")[-1] == -1.0


def test_the_choice_of_a_library_earns_credit() -> None:
    code = code_of(SPEC)
    chosen, plain = (credit(code, thought)[0] for thought in ("Use sqlite3, it is in the standard library.", "Hm."))
    assert chosen is not None
    assert plain is not None
    assert chosen > 0 >= plain


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_expert_is_valued_above_one_that_errs(language: str) -> None:
    def mean(error_rate: float) -> float:
        user, found = ScriptedUser(ScriptedUser.Config()), []
        for seed in range(3):
            task = environment(language).task(seed)
            agent = environment(language).expert(task, error_rate=error_rate)
            found += [
                s.score
                for s in KNOWLEDGE.score(play(environment(language), user, agent, task, seed=0, max_turns=13)).scores
            ]
        return sum(score for score in found if score is not None) / len(found)

    assert mean(0.0) > 0.3
    assert mean(0.0) > mean(0.8) + 0.3


@pytest.mark.parametrize(
    "code", ["def solve(*_): return {}['x']", "def solve(*_): int('x')", "def solve(*_):\n    while 1: 0"]
)
def test_what_a_submitted_program_raises_is_the_agents_fault(code: str) -> None:
    class Submits:
        def act(self, *_: object) -> str:
            return call_text(SUBMIT, {"code": code})

    user = ScriptedUser(ScriptedUser.Config())
    played = play(environment(), user, Submits(), environment().task(1), seed=1, max_turns=13)
    ruling = Referee(Referee.Config()).judge(played)
    assert (played.success, ruling.party, ruling.excluded) == (False, "agent", False)


def test_tasks_are_drawn_from_what_the_settings_name() -> None:
    few = CodeTask(CodeTask.Config(sources=("lines", "csv"), targets=("list", "dictionary"), limits=(9, 7)))
    speech = few.start(few.task(0)).speech
    specs = [spec_of(few.task(seed).goal["user"]["values"], speech) for seed in range(60)]
    assert {one.source for one in specs} == {"lines", "csv"}
    assert {one.target for one in specs} == {"list", "dictionary"}
    assert {one.least for one in specs} == {7, 9}
    misstated = [few.task(seed).goal["user"]["misstated"] for seed in range(60)]
    assert any("keep" in one for one in misstated)
    assert CodeTask(CodeTask.Config()).task(3) == environment().task(3)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_what_was_agreed_is_told_once_where_the_settings_say_so(language: str) -> None:
    noted = CodeTask(CodeTask.Config(language=language, show_notes=True))  # type: ignore[arg-type]
    for seed in range(6):
        task = noted.task(seed)
        played = play(noted, ScriptedUser(ScriptedUser.Config()), noted.expert(task), task, seed=seed, max_turns=13)
        told = [(turn.index, m.content) for turn in played.turns for m in turn.context if m.name == "tracker"]
        assert played.success
        assert [index for index, _ in told] == [len(played.turns) - 1], "before the code, and at no other time"
        assert str(played.turns[-1].state_before["filled"]["keep"]) in told[0][1]
