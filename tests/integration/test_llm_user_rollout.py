"""64 dialogues at once with a user behind a real server: all accounted for, also when the server dies half-way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from slea_llm import endpoints
from slea_llm.adjudication import RefereedRollout
from slea_llm.endpoints import Endpoint
from slea_llm.models.chat import ChatTokenizer
from slea_llm.referee import Referee
from slea_llm.rollout import FailedEpisodesError, Rollout
from slea_llm.settings import RolloutSettings
from slea_llm.types import GenerationRequest, Trajectory
from slea_llm.users.llm import LlmUser
from tests.support import tokenizers as kinds
from tests.support.chat_server import Asked, Reply, completion, serving
from tests.support.toy import ToyEnvironment, ToyGenerator, toy_task

pytestmark = pytest.mark.integration
DIALOGUES = 64
LINES = ("hello there", "two pizzas", "done")


class Mortal:
    """A model that answers `answers` times and then hangs up on everybody."""

    def __init__(self, answers: int) -> None:
        self._left, self._lock = answers, threading.Lock()

    def __call__(self, asked: Asked) -> Reply:
        with self._lock:
            self._left -= 1
            alive = self._left >= 0
        said = len(asked["messages"])
        return Reply(body=completion(f"I said this as number {said}."), hang_up=not alive)


def play(answers: int, max_error_rate: float) -> tuple[list[Trajectory], LlmUser]:
    chat = ChatTokenizer(kinds.all_kinds(kinds.CHATML)["byte_level"])

    def reply(request: GenerationRequest) -> Sequence[int]:
        return chat.encode_reply(LINES[min(request.key[2], len(LINES) - 1)])

    settings = RolloutSettings(max_turns=4, max_reply_tokens=64, max_context_tokens=900, max_error_rate=max_error_rate)
    with serving(Mortal(answers)) as server:
        endpoint = Endpoint(url=server.url, model="m", attempts=2, concurrency=DIALOGUES, timeout_s=60.0)
        user = LlmUser(LlmUser.Config(endpoint=endpoint))
        generator = ToyGenerator(reply=reply, stop_ids=chat.stop_ids)
        rollout = Rollout(ToyEnvironment(), user, generator, chat, settings, environment_name="toy", seed=1)
        judged = RefereedRollout(rollout, Referee(Referee.Config()))
        tasks = [toy_task(seed) for seed in range(DIALOGUES)]
        return judged.run(tasks, first_episode=0, policy_version=0), user


def test_every_dialogue_ends_and_pins_its_user() -> None:
    records, user = play(answers=10_000, max_error_rate=0.0)
    assert len(records) == DIALOGUES
    assert all(one.success for one in records)
    assert {one.provenance["user"]["model"] for one in records} == {"m"}
    assert all(len(one.provenance["user"]["prompt_hash"]) == 16 for one in records)
    assert user.usage.questions == 3 * DIALOGUES
    assert user.usage.unanswered == 0


def test_a_server_that_dies_leaves_records_with_the_cause_and_loses_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.01)
    with pytest.raises(FailedEpisodesError, match=r"more than rollout\.max_error_rate 0\.1 allows") as stopped:
        play(answers=100, max_error_rate=0.1)
    records = stopped.value.trajectories
    assert len({one.id for one in records}) == DIALOGUES
    broken = [one for one in records if one.failed]
    assert len(broken) > 0.1 * DIALOGUES
    for one in broken:
        assert "the simulated user did not answer" in str(one.error)
        assert str(one.error).endswith(", user]")
        assert one.outcome is None
        assert (one.provenance["blame"]["party"], one.provenance["blame"]["kind"]) == ("user", "broke")
    said = [one for one in caplog.records if "broke" in one.getMessage()]
    assert len(said) == len(broken)
    assert not any(one.exc_info for one in said), "the cause is a line; a traceback of it for each dialogue is noise"
