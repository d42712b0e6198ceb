"""A policy goes on from recorded tokens: the prompt it saw, the tokens it had sampled, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from slea_llm.continuations import BranchingPlay, PolicyPlayer
from slea_llm.errors import EpisodeError
from slea_llm.models.chat import ChatTokenizer, Thoughts
from slea_llm.rollout import Rollout
from slea_llm.settings import RolloutSettings
from slea_llm.types import GenerationRequest, ReplyPrefix, Trajectory
from tests.support import tokenizers as kinds
from tests.support.toy import ToyEnvironment, ToyGenerator, ToyUser, toy_task

LINES = ("<think>ask for the address</think>hello there", "tool", "ok", "done")
SETTINGS = RolloutSettings(max_turns=5, max_reply_tokens=64, max_context_tokens=900)
KINDS = ("byte_level", "word_level", "unigram", "byte_fallback")
FORMS: list[Thoughts] = ["keep", "strip", "split"]


class Recorded:
    """One dialogue of four replies, and a way to play it on that notes every request."""

    def __init__(self, kind: str = "byte_level", thoughts: Thoughts = "keep", settings: RolloutSettings = SETTINGS):
        self.chat = ChatTokenizer(kinds.all_kinds(kinds.QWEN3)[kind], thoughts=thoughts)
        self.generator = ToyGenerator(reply=self.line, stop_ids=self.chat.stop_ids)
        self.user = ToyUser()
        self.rollout = Rollout(
            ToyEnvironment(),
            self.user,
            self.generator,
            self.chat,
            replace(settings, thoughts=thoughts),
            environment_name="toy",
            seed=7,
        )
        self.lines = LINES
        (self.trajectory,) = self.rollout.run([toy_task(1)], first_episode=0, policy_version=0)
        self.recorded = list(self.generator.requests)
        self.generator.requests.clear()

    def line(self, request: GenerationRequest) -> Sequence[int]:
        return self.chat.encode_reply(self.lines[min(request.key[-1], len(self.lines) - 1)])

    def ids(self, turn: int) -> tuple[int, ...]:
        return self.trajectory.reply_ids(self.trajectory.turns[turn])

    def branches(self) -> BranchingPlay:
        player = PolicyPlayer(self.rollout, self.chat.heard)
        return BranchingPlay(ToyEnvironment(), self.user, player, max_turns=SETTINGS.max_turns)

    def branch(self, turn: int, tokens: int | None, seeds: Sequence[int] = (0,)) -> tuple[bool, ...]:
        characters = len(self.trajectory.turns[turn].text) if tokens else 0
        (ends,) = self.branches().branch(
            self.trajectory, [ReplyPrefix(turn=turn, characters=characters, tokens=tokens)], seeds
        )
        assert ends.reason is None, ends.reason
        return ends.successes


@pytest.mark.parametrize("thoughts", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_dialogue_goes_on_from_the_recorded_prompt(kind: str, thoughts: Thoughts, turn: int) -> None:
    """Begun nowhere, in the midst and at its end: every request is the recorded one plus what was begun."""
    recorded = Recorded(kind, thoughts)
    whole = len(recorded.ids(turn))
    for tokens in (0, whole // 2, whole):
        recorded.generator.requests.clear()
        assert recorded.branch(turn, tokens) == (True,)
        requests, began = recorded.generator.requests, recorded.recorded[turn:]
        if tokens == whole:
            began = began[1:]
        assert [request.key[-1] for request in requests] == [request.key[-1] for request in began]
        if tokens and tokens < whole:
            assert requests[0].prompt_ids == (*began[0].prompt_ids, *recorded.ids(turn)[:tokens])
            assert requests[0].max_tokens == began[0].max_tokens - tokens
        else:
            assert [request.prompt_ids for request in requests] == [request.prompt_ids for request in began]


def test_the_user_hears_what_was_begun_and_what_follows_it() -> None:
    recorded = Recorded()
    thought = recorded.chat.encode_reply("<think>ask for the address</think>")[:-1]
    assert recorded.ids(0)[: len(thought)] == thought
    recorded.lines = ("hello there", *LINES[1:])
    recorded.user.heard.clear()
    assert recorded.branch(0, len(thought)) == (True,)
    assert recorded.user.heard[-1][-1].content == "ok"
    assert next(m.content for m in recorded.user.heard[-1] if m.role == "assistant") == "hello there"


def test_every_seed_has_draws_of_its_own_and_equal_seeds_equal_ones() -> None:
    recorded = Recorded()
    recorded.generator.reply = lambda request: recorded.chat.encode_reply("done" if request.key[0] % 2 else "hello")
    assert recorded.branch(1, 0, range(6)) == (False, True, False, True, False, True)
    keys = {request.key for request in recorded.generator.requests}
    recorded.generator.requests.clear()
    recorded.branch(1, 0, range(6))
    assert {request.key for request in recorded.generator.requests} == keys
    assert len({key[0] for key in keys}) == 6


def test_a_context_without_room_is_the_end_and_no_success() -> None:
    recorded = Recorded(settings=replace(SETTINGS, max_context_tokens=900))
    tight = len(recorded.recorded[2].prompt_ids) - 1
    recorded.rollout = Rollout(
        ToyEnvironment(),
        recorded.user,
        recorded.generator,
        recorded.chat,
        replace(SETTINGS, max_context_tokens=tight),
        environment_name="toy",
        seed=7,
    )
    assert recorded.branch(1, len(recorded.ids(1))) == (False,)


def test_text_without_tokens_is_refused() -> None:
    recorded = Recorded()
    with pytest.raises(EpisodeError, match="has no tokens; a policy cannot go on from its text alone"):
        recorded.branch(1, None)
    bare: Trajectory = replace(
        recorded.trajectory, traces=(), turns=tuple(replace(turn, span=None) for turn in recorded.trajectory.turns)
    )
    with pytest.raises(EpisodeError, match="has no tokens"):
        recorded.branches().branch(bare, [ReplyPrefix(turn=1, characters=0, tokens=0)], [0])
