"""Many dialogues at once: tokens as sampled, one owner for every token, failures as records."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slea_llm.errors import GenerationError
from slea_llm.models.chat import ChatTokenizer, Thoughts
from slea_llm.rollout import NO_POLICY, FailedEpisodesError, Rollout, play
from slea_llm.settings import RolloutSettings
from slea_llm.types import Generation, GenerationRequest, Message, Outcome, Task, Trajectory
from tests.support import tokenizers as kinds
from tests.support.toy import ToyAgent, ToyEnvironment, ToyGenerator, ToyUser, toy_task

KINDS = ("byte_level", "word_level", "unigram", "byte_fallback")
THINKING = "<think>ask for the address</think>hello there"
SETTINGS = RolloutSettings(max_turns=3, max_reply_tokens=64, max_context_tokens=600)


def chat_of(kind: str = "byte_level", template: str = kinds.CHATML, thoughts: Thoughts = "keep") -> ChatTokenizer:
    return ChatTokenizer(kinds.all_kinds(template)[kind], thoughts=thoughts)


def speaking(chat: ChatTokenizer, *lines: str) -> ToyGenerator:
    """A sampler that says its lines turn by turn, the last one for ever."""

    def reply(request: GenerationRequest) -> Sequence[int]:
        return chat.encode_reply(lines[min(request.key[2], len(lines) - 1)])

    return ToyGenerator(reply=reply, stop_ids=chat.stop_ids)


def rollout_of(
    chat: ChatTokenizer,
    generator: ToyGenerator,
    *,
    settings: RolloutSettings = SETTINGS,
    user: ToyUser | None = None,
    seed: int = 7,
    greedy: bool = False,
) -> Rollout:
    return Rollout(
        ToyEnvironment(),
        user or ToyUser(),
        generator,
        chat,
        replace(settings, thoughts=chat.thoughts),
        environment_name="toy",
        seed=seed,
        greedy=greedy,
    )


def played(
    chat: ChatTokenizer, generator: ToyGenerator, *tasks: Task, settings: RolloutSettings = SETTINGS
) -> list[Trajectory]:
    chosen = tasks or (toy_task(1),)
    return rollout_of(chat, generator, settings=settings).run(chosen, first_episode=0, policy_version=0)


def trained(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """The sampled ids of every turn, by its span."""
    spans = [turn.span for turn in trajectory.turns if turn.span is not None]
    return [trajectory.traces[span.row].token_ids[span.start : span.end] for span in spans]


# --- one dialogue ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_dialogue_is_one_growing_row_of_what_was_sampled(kind: str) -> None:
    chat = chat_of(kind)
    generator = speaking(chat, THINKING, "tool", "done")
    (trajectory,) = played(chat, generator)
    assert [turn.text for turn in trajectory.turns] == [
        chat.text(chat.encode_reply(t)) for t in (THINKING, "tool", "done")
    ]
    assert len(trajectory.traces) == 1
    assert trained(trajectory) == [chat.encode_reply(text) for text in (THINKING, "tool", "done")]
    row = trajectory.traces[0].token_ids
    assert all(row[: len(request.prompt_ids)] == request.prompt_ids for request in generator.requests)
    assert trajectory.success
    assert trajectory.outcome == -1.0 - 1.0 + 10.0
    assert [turn.reward for turn in trajectory.turns] == [-1.0, -1.0, 10.0]
    assert [[m.role for m in turn.context] for turn in trajectory.turns] == [["system", "user"], ["user"], ["tool"]]
    assert [(turn.state_before["replies"], turn.state_after["replies"]) for turn in trajectory.turns] == [
        (0, 1),
        (1, 2),
        (2, 3),
    ]


@pytest.mark.parametrize("thoughts", ["keep", "strip", "split"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_holds_the_rows_of_the_same_dialogue_written_down(kind: str, thoughts: Thoughts) -> None:
    """What a warm start imitates is what a rollout will see."""
    chat = chat_of(kind, kinds.QWEN3, thoughts)
    (trajectory,) = played(chat, speaking(chat, THINKING, "ok", "done"))
    messages: list[Message] = []
    for turn in trajectory.turns:
        messages += [*turn.context, Message(role="assistant", content=turn.text)]
    rows = chat.encode_rows(messages)
    assert [trace.token_ids for trace in trajectory.traces] == [ids for ids, _ in rows]
    assert [trace.sampled_mask for trace in trajectory.traces] == [mask for _, mask in rows]


def test_log_probabilities_stand_beside_their_tokens() -> None:
    chat = chat_of()
    (trajectory,) = played(chat, speaking(chat, THINKING, "done"))
    for turn in trajectory.turns:
        assert turn.span is not None
        own = trajectory.traces[turn.span.row].logprobs[turn.span.start : turn.span.end]
        assert own == tuple(-(i + 1) / 8 for i in range(len(turn.span)))
    trace = trajectory.traces[0]
    assert all(p == 0.0 for p, sampled in zip(trace.logprobs, trace.sampled_mask, strict=True) if not sampled)


def test_the_user_hears_no_thought_not_even_an_open_one() -> None:
    chat, user = chat_of(), ToyUser()
    rollout = rollout_of(chat, speaking(chat, THINKING, "ok<think>never closed"), user=user)
    rollout.run([toy_task(1)], first_episode=0, policy_version=0)
    told = [message.content for message in user.heard[-1] if message.role == "assistant"]
    assert told == ["hello there", "ok", "ok"]
    assert [message.role for message in user.heard[0]] == ["user", "assistant"]


def test_a_leaving_user_ends_the_dialogue_with_the_environments_reward() -> None:
    chat = chat_of()
    (trajectory,) = played(chat, speaking(chat, "ok"), toy_task(1, leaves=True))
    assert trajectory.termination == "user_left"
    assert trajectory.outcome == -6.0
    assert trajectory.provenance["last_messages"] == [{"role": "user", "content": "yes"}]


def test_a_full_context_ends_the_dialogue_as_budget() -> None:
    chat = chat_of()
    generator = speaking(chat, THINKING)
    room = len(chat.prompt([Message(role="system", content="be evil"), Message(role="user", content="hi")]))
    (trajectory,) = played(chat, generator, settings=replace(SETTINGS, max_context_tokens=room + 60, max_turns=12))
    assert trajectory.termination == "budget"
    assert trajectory.truncated
    assert trajectory.turns
    assert all(len(r.prompt_ids) + r.max_tokens <= room + 60 for r in generator.requests)
    assert len(trajectory.traces[0]) <= room + 60
    (broken,) = played(chat, generator, settings=replace(SETTINGS, max_context_tokens=room, max_error_rate=1.0))
    assert broken.error is not None
    assert f"the first prompt has {room} tokens" in broken.error


def test_br_087_a_dialogue_that_goes_in_circles_ends() -> None:
    chat = chat_of()
    (trajectory,) = played(chat, speaking(chat, "keep going"), settings=replace(SETTINGS, max_turns=10))
    assert len(trajectory.turns) == 10
    assert trajectory.termination == "max_turns"
    assert trajectory.truncated
    assert not trajectory.failed


# --- ids of the cases --------------------------------------------------------------------------------------------

ECHO = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% else %} {% endif %}{% endfor %}"
)
HISTORY = ECHO.replace("m.content }}{% if", "m.content.split('</think>')[-1] }}{% if")


def spelled(vocab: dict[str, int], template: str = ECHO) -> PreTrainedTokenizerFast:
    """A word-level tokenizer with exactly these ids; a template that adds the end of a turn and nothing else."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, **vocab}, unk_token="[UNK]"))  # noqa: S106  the name of a token
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<|im_end|>"])
    backend.add_tokens([token for token in ("<think>", "</think>") if token in vocab])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="[UNK]")  # noqa: S106
    tokenizer.chat_template = template
    return tokenizer


def run_ids(
    chat: ChatTokenizer, replies: Sequence[Sequence[int]], *, system: str, **sampler: Any
) -> tuple[Trajectory, ToyGenerator]:
    generator = ToyGenerator(reply=lambda request: replies[request.key[2]], stop_ids=chat.stop_ids, **sampler)
    settings = replace(SETTINGS, max_turns=len(replies))
    (trajectory,) = played(chat, generator, toy_task(1, system=system), settings=settings)
    return trajectory, generator


def test_br_001_the_mask_is_true_on_the_agents_tokens_and_on_no_others() -> None:
    vocab = {"be": 10, "hi": 11, "a": 20, "b": 21, "yes": 12, "c": 22, "d": 23, "<|im_end|>": 9}
    trajectory, _ = run_ids(ChatTokenizer(spelled(vocab)), [[20, 21, 9], [22, 23, 9]], system="be")
    (trace,) = trajectory.traces
    assert trace.token_ids == (10, 11, 20, 21, 9, 12, 22, 23, 9)
    assert [int(m) for m in trace.sampled_mask] == [0, 0, 1, 1, 1, 0, 1, 1, 1]
    roles = {10: "user", 11: "user", 12: "user"}
    assert [m for i, m in zip(trace.token_ids, trace.sampled_mask, strict=True) if i in roles] == [False] * 3
    assert sum(m for i, m in zip(trace.token_ids, trace.sampled_mask, strict=True) if i != 9) == 4


@pytest.mark.parametrize("thoughts", ["keep", "strip", "split"])
def test_br_005_earlier_thoughts_are_appended_or_split_and_trained_once(thoughts: Thoughts) -> None:
    vocab = {"be": 1, "hi": 2, "yes": 3, "x": 31, "y": 32, "<think>": 50, "</think>": 51, "r": 60, "s": 61}
    chat = ChatTokenizer(spelled({**vocab, "<|im_end|>": 9}, HISTORY), thoughts=thoughts)
    assert chat.check(system=True).strips_thoughts
    sampled = [[50, 31, 51, 60, 9], [50, 32, 51, 61, 9]]
    trajectory, _ = run_ids(chat, sampled, system="be")
    rows = [trace.token_ids for trace in trajectory.traces]
    if thoughts == "keep":
        assert rows == [(1, 2, 50, 31, 51, 60, 9, 3, 50, 32, 51, 61, 9)]
    else:
        assert rows == [(1, 2, 50, 31, 51, 60, 9), (1, 2, 60, 9, 3, 50, 32, 51, 61, 9)]
    assert [list(ids) for ids in trained(trajectory)] == sampled
    assert trajectory.sampled_tokens == 8 + 2  # the case's 8 and the two ends of turn, sampled too
    assert trajectory.provenance["retokenised"] == 0


def test_br_007_sampled_ids_are_trained_and_prompted_as_they_are() -> None:
    chat = ChatTokenizer(spelled({"trans": 1, "fer": 2, "transfer": 3, "be": 4, "hi": 5, "yes": 6, "<|im_end|>": 9}))
    logprobs = [-0.4, -0.9, -0.1]
    trajectory, generator = run_ids(chat, [[1, 2, 9], [1, 2, 9]], system="be", logprobs=logprobs)
    assert trajectory.turns[0].text == "transfer"
    assert chat.reply_parts("transfer") == ["transfer"]
    assert chat.encode_reply("transfer") == (3, 9)
    assert trained(trajectory) == [(1, 2, 9), (1, 2, 9)]
    (trace,) = trajectory.traces
    assert [p for p, mine in zip(trace.logprobs, trace.sampled_mask, strict=True) if mine] == logprobs * 2
    assert generator.requests[1].prompt_ids == (4, 5, 1, 2, 9, 6)
    assert trajectory.provenance["retokenised"] == 0


def test_br_012_an_appended_end_of_turn_is_in_no_span_and_a_sampled_one_is() -> None:
    vocab = {"be": 3, "hi": 4, "yes": 7, "a": 5, "b": 6, "<|im_end|>": 2}
    chat = ChatTokenizer(spelled(vocab))
    settings = replace(SETTINGS, max_turns=2, max_reply_tokens=2)
    generator = ToyGenerator(reply=lambda request: [[5, 6], [5, 2]][request.key[2]], stop_ids=chat.stop_ids)
    (trajectory,) = played(chat, generator, toy_task(1, system="be"), settings=settings)
    (trace,) = trajectory.traces
    assert trace.token_ids == (3, 4, 5, 6, 2, 7, 5, 2)
    assert [int(m) for m in trace.sampled_mask] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert trace.logprobs[4] == 0.0
    assert [turn.finish_reason for turn in trajectory.turns] == ["length", "stop"]


# --- many dialogues ----------------------------------------------------------------------------------------------


def test_a_slow_user_holds_up_no_other_dialogue() -> None:
    chat = chat_of()
    tasks = [toy_task(n, seconds=0.5 if n % 5 == 0 else 0) for n in range(20)]
    started = time.perf_counter()
    trajectories = rollout_of(chat, speaking(chat, "ok", "done")).run(tasks, first_episode=0, policy_version=0)
    assert time.perf_counter() - started < 4 * 0.5, "one after the other they take 2"
    assert [t.task["seed"] for t in trajectories] == list(range(20))
    assert all(t.success for t in trajectories)


def test_concurrency_is_bounded() -> None:
    chat = chat_of()
    running, most = 0, 0

    class Watched(ToyGenerator):
        async def generate(self, request: GenerationRequest):  # type: ignore[no-untyped-def]
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            generation = await super().generate(request)
            running -= 1
            return generation

    generator = Watched(reply=speaking(chat, "ok", "done").reply, stop_ids=chat.stop_ids)
    played(chat, generator, *[toy_task(n) for n in range(12)], settings=replace(SETTINGS, concurrency=3))
    assert most == 3


@pytest.mark.parametrize(
    ("breaks", "cause"),
    [
        ("environment", "KeyError: 'no such table' [turn 1, environment]"),
        ("user", "ConnectionError: the line is dead [turn 1, user]"),
    ],
)
def test_a_dialogue_that_breaks_is_a_record_and_the_others_go_on(breaks: str, cause: str) -> None:
    chat = chat_of()
    tasks = [toy_task(n, **({"breaks": breaks} if n == 2 else {})) for n in range(5)]
    trajectories = played(chat, speaking(chat, "ok", "done"), *tasks)
    assert [t.termination for t in trajectories] == ["success", "success", "error", "success", "success"]
    broken = trajectories[2]
    assert broken.error == cause
    assert broken.outcome is None
    assert trained(broken) == [chat.encode_reply("ok")]


@pytest.mark.parametrize(
    ("odd", "cause"),
    [
        (Outcome(reward=math.nan), "EpisodeError: the environment pays nan, which is not finite [turn 1, environment]"),
        (
            Outcome(termination="won"),  # type: ignore[arg-type] # what a third party's environment may say
            "EpisodeError: the environment ends with 'won'; one of success, failure, max_turns, user_left, budget, "
            "error, unknown [turn 1, environment]",
        ),
    ],
)
def test_an_outcome_that_no_record_can_hold_breaks_its_dialogue_alone(odd: Outcome, cause: str) -> None:
    chat = chat_of()
    tasks = [toy_task(0), toy_task(1, odd=odd), toy_task(2), toy_task(3), toy_task(4)]
    trajectories = played(chat, speaking(chat, "done"), *tasks)
    assert [t.termination for t in trajectories] == ["success", "error", "success", "success", "success"]
    assert trajectories[1].error == cause


def test_a_log_probability_that_is_not_finite_breaks_its_dialogue_alone() -> None:
    chat = chat_of()
    generator = speaking(chat, "done")
    plain = generator.generate

    async def generate(request: GenerationRequest) -> Generation:
        made = await plain(request)
        return replace(made, logprobs=(math.nan, *made.logprobs[1:])) if request.key[1] == 1 else made

    generator.generate = generate  # type: ignore[method-assign]
    trajectories = played(chat, generator, *[toy_task(n) for n in range(5)])
    assert [t.termination for t in trajectories] == ["success", "error", "success", "success", "success"]
    assert "1 log-probabilities are not finite, the first nan" in str(trajectories[1].error)


def test_an_error_of_the_sampler_and_a_passed_deadline_are_named() -> None:
    chat = chat_of()

    def fails(request: GenerationRequest) -> Sequence[int]:
        if request.key[1] == 1:
            raise GenerationError("out of memory")
        return [] if request.key[1] == 2 else chat.encode_reply("ok" if request.key[2] == 0 else "done")

    generator = ToyGenerator(reply=fails, stop_ids=chat.stop_ids)
    settings = replace(SETTINGS, deadline_s=0.2, max_error_rate=0.9)
    tasks = [toy_task(0), toy_task(1), toy_task(2), toy_task(3, seconds=5)]
    sound, failed, empty, late = played(chat, generator, *tasks, settings=settings)
    assert sound.success
    assert failed.error == "GenerationError: out of memory [turn 0, agent]"
    assert empty.error is not None
    assert "0 tokens" in empty.error
    assert late.error == "TimeoutError: no end within rollout.deadline_s 0.2 s [turn 1, user]"


def test_too_many_broken_dialogues_stop_the_run_and_lose_no_record() -> None:
    chat = chat_of()
    tasks = [toy_task(n, **({"breaks": "user"} if n < 2 else {})) for n in range(4)]
    with pytest.raises(FailedEpisodesError, match=r"2 of 4 dialogues broke.*the line is dead") as caught:
        played(chat, speaking(chat, "ok", "done"), *tasks, settings=replace(SETTINGS, max_error_rate=0.25))
    assert [t.termination for t in caught.value.trajectories] == ["error", "error", "success", "success"]


def test_every_draw_is_named_by_seed_episode_and_turn_whatever_runs_beside_it() -> None:
    chat = chat_of()
    generator, user = speaking(chat, "ok", "done"), ToyUser()
    tasks = [toy_task(n) for n in range(4)]
    together = rollout_of(chat, generator, user=user).run(tasks, first_episode=10, policy_version=0)
    assert {request.key for request in generator.requests} == {(7, e, t) for e in range(10, 14) for t in (0, 1)}
    alone_user = ToyUser()
    rollout = rollout_of(chat, generator, user=alone_user)
    alone = [rollout.run([t], first_episode=10 + n, policy_version=0)[0] for n, t in enumerate(tasks)]
    assert [t.id for t in together] == [t.id for t in alone] == [f"toy-{n}-e{10 + n}" for n in range(4)]
    assert [(t.turns, t.traces) for t in together] == [(t.turns, t.traces) for t in alone]
    assert sorted(user.seeds) == sorted(alone_user.seeds)
    assert len(set(user.seeds)) == 4


def test_the_policy_version_is_the_one_that_served() -> None:
    chat = chat_of()
    generator = speaking(chat, "ok", "done")
    rollout = rollout_of(chat, generator)
    with pytest.raises(GenerationError, match="serves policy version 0, the rollout asks for 3"):
        rollout.run([toy_task(1)], first_episode=0, policy_version=3)
    generator.policy_version = 3
    (trajectory,) = rollout.run([toy_task(1)], first_episode=0, policy_version=3)
    assert trajectory.policy_version == 3
    assert "policy_versions" not in trajectory.provenance

    def moves(request: GenerationRequest) -> Sequence[int]:
        generator.policy_version += 1
        return chat.encode_reply("ok" if request.key[2] == 0 else "done")

    generator.reply = moves
    (mixed,) = rollout.run([toy_task(1)], first_episode=0, policy_version=3)
    assert mixed.policy_version == 4
    assert mixed.provenance["policy_versions"] == [4, 5]


def test_greedy_and_empty_runs() -> None:
    chat = chat_of()
    generator = speaking(chat, "done")
    rollout = rollout_of(chat, generator, greedy=True)
    assert rollout.run([], first_episode=0, policy_version=0) == []
    rollout.run([toy_task(1)], first_episode=0, policy_version=0, progress=True)
    assert all(request.greedy for request in generator.requests)


# --- scripted agents ---------------------------------------------------------------------------------------------


def test_play_gives_text_without_tokens() -> None:
    task = toy_task(1)
    environment = ToyEnvironment()
    trajectory = play(environment, ToyUser(), environment.expert(task), task, seed=5, max_turns=6)
    assert trajectory.success
    assert trajectory.traces == ()
    assert trajectory.policy_version == NO_POLICY
    assert trajectory.outcome == 9.0
    assert all(turn.span is None for turn in trajectory.turns)
    idle = play(environment, ToyUser(), environment.idler(task), task, seed=5, max_turns=6)
    assert (idle.termination, len(idle.turns)) == ("max_turns", 6)


def test_play_passes_errors_on() -> None:
    with pytest.raises(ConnectionError, match="the line is dead"):
        play(ToyEnvironment(), ToyUser(), ToyAgent(["ok"]), toy_task(1, breaks="user"), seed=1, max_turns=2)


def test_a_turn_costs_under_a_millisecond_of_python() -> None:
    chat = chat_of()
    tasks = [toy_task(n, system="be evil " * 60) for n in range(60)]
    rollout = rollout_of(
        chat, speaking(chat, THINKING), settings=replace(SETTINGS, max_turns=6, max_context_tokens=4000)
    )
    spent: list[float] = []
    run: Callable[[], list[Trajectory]] = lambda: rollout.run(tasks, first_episode=0, policy_version=0)  # noqa: E731
    for _ in range(3):
        started = time.process_time()
        trajectories = run()
        spent.append((time.process_time() - started) / sum(len(t.turns) for t in trajectories))
    assert min(spent) < 2e-3  # a millisecond on an idle machine, with room for a busy one
