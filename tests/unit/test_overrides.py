"""A reviewer's word on a dialogue: read once, said by name, and never lost in silence."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from slea_llm.errors import ConfigError
from slea_llm.interfaces import LocalReducer
from slea_llm.overrides import Override, Overrides, overridden, parse_override
from slea_llm.types import OVERRIDE, ScoredTrajectory
from tests.support import replay
from tests.support.experience import dialogue, on_ranks

WORD = {"trajectory": "a", "reward": -10, "reviewer": "ada", "reason": "asks the same thing again"}


def write(path: Path, *lines: Any, end: str = "\n") -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)


def reading(path: Path, said: list[str] | None = None) -> Overrides:
    return Overrides(path, main=True, gather=list, report=(said if said is not None else []).append)


def mixed(store: Any, *, version: int, fresh: tuple[ScoredTrajectory, ...] = ()) -> dict[str, float]:
    metrics: dict[str, float]
    _, metrics = store.mix(fresh, iteration=version, policy_version=version, progress=0.0, reducer=LocalReducer())
    return metrics


def test_the_reward_is_replaced_and_the_provenance_says_by_whom_and_why() -> None:
    one = dialogue([[("reply", 1)], [("reply", 1)]], rewards=[1.0, 9.0], name="a")
    changed = overridden(one, parse_override(WORD), policy_version=7)
    assert [turn.reward for turn in changed.trajectory.turns] == [1.0, -10.0]
    assert changed.trajectory.outcome == -9.0
    assert changed.trajectory.provenance[OVERRIDE] == [
        {"reviewer": "ada", "reason": WORD["reason"], "turn": 1, "reward": -10.0, "was": 9.0, "policy_version": 7}
    ]
    again = overridden(changed, Override(**{**WORD, "turn": 0, "reward": 0.0}), policy_version=8)  # type: ignore[arg-type]
    assert [turn.reward for turn in again.trajectory.turns] == [0.0, -10.0]
    assert [note["turn"] for note in again.trajectory.provenance[OVERRIDE]] == [1, 0]
    assert again.trajectory.traces == one.trajectory.traces


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": 1}, r"unknown key 'rewards'.*did you mean 'reward'"),
        ({"reviewer": " "}, "reviewer is ' '; it must say something"),
        ({"reason": None}, "reason is None"),
        ({"reward": "low"}, "reward 'low' is not a finite number"),
        ({"reward": True}, "reward True"),
        ({"reward": float("nan")}, "reward nan"),
        ({"turn": -1}, "turn -1 is not the number of a turn"),
        ({"turn": 1.5}, r"turn 1\.5"),
    ],
)
def test_a_word_that_cannot_be_looked_up_later_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_override({**WORD, **change})
    with pytest.raises(ConfigError, match="an override is an object"):
        parse_override([WORD])


def test_lines_are_read_once_and_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    path, said = tmp_path / "reviews.jsonl", list[str]()
    words = reading(path, said)
    assert words.fresh() == []  # no file yet
    write(path, WORD, "", {**WORD, "trajectory": "b"}, '{"trajectory": "c", "rew', end="")
    assert [word.trajectory for word in words.fresh()] == ["a", "b"]
    write(path, 'ard": 0, "reviewer": "ada", "reason": "r"}', "not json", {**WORD, "turn": "last"})
    assert [word.trajectory for word in words.fresh()] == ["c"]
    assert words.refused == 2
    assert "line 5 is not used: an override is an object" in said[0]
    assert "turn 'last'" in said[1]
    again = reading(path)
    again.restore(json.loads(json.dumps(words.state())))
    assert again.fresh() == []
    assert again.refused == 0


def test_an_override_takes_the_place_of_the_dialogue_and_its_age_counts_anew(tmp_path: Path) -> None:
    path = tmp_path / "reviews.jsonl"
    with closing(
        replay.buffer(tmp_path / "own", max_age=2, overrides="reviews", overrides_from=reading(path))
    ) as store:
        store.add(replay.several("a", "b"))
        write(path, WORD)
        metrics = mixed(store, version=2)
        assert metrics["replay/overrides"] == 1
        assert store.read("a").trajectory.outcome == -10
        assert set(store.ids) == {"a", "b"}
        mixed(store, version=3)
        assert store.ids == ("a",)  # b was of version 0
        state = store.state()
    with closing(
        replay.buffer(tmp_path / "own", max_age=2, overrides="reviews", overrides_from=reading(path))
    ) as again:
        again.restore(json.loads(json.dumps(state)))
        assert again.read("a").trajectory.provenance[OVERRIDE][0]["reviewer"] == "ada"
        assert mixed(again, version=3)["replay/overrides"] == 0


def test_a_dialogue_that_has_left_the_buffer_comes_back_from_the_log(tmp_path: Path) -> None:
    path, said = tmp_path / "reviews.jsonl", list[str]()
    log = {"old": replay.one("old"), "broken": replay.one("broken", termination="error")}
    store = replay.buffer(
        tmp_path / "own", overrides="reviews", overrides_from=reading(path, said), played=log.get, max_age=3
    )
    with closing(store):
        lines = [{**WORD, "trajectory": name} for name in ("old", "broken", "nobody")] + [{**WORD, "turn": 7}]
        store.add(replay.several("a", version=50))
        write(path, *lines)
        metrics = mixed(store, version=50)
        assert (metrics["replay/overrides"], metrics["replay/overrides_refused"]) == (1, 3)
        assert set(store.ids) == {"a", "old"}
        assert store.read("old").trajectory.policy_version == 0  # its weights are still those of who played it
        told = "\n".join(said)
        for part in ("'broken' is not used: trajectory broken broke", "has 1 turns; turn 7", "of 'nobody' is not used"):
            assert part in told


def test_all_ranks_take_the_first_ranks_lines(tmp_path: Path) -> None:
    path = tmp_path / "reviews.jsonl"
    write(path, {**WORD, "trajectory": "1.a"}, "rubbish")
    lines: list[Any] = []

    def rank(reducer: Any) -> Any:
        def gather(own: list[Any]) -> list[Any]:
            lines.extend(own)
            reducer.sum([0.0])
            return list(lines)

        number = reducer.rank
        words = Overrides(path, main=number == 0, gather=gather, report=lambda _: None)
        folder = tmp_path / str(number)
        with closing(replay.buffer(folder, rank=number, world_size=2, overrides="r", overrides_from=words)) as store:
            store.add(replay.several(f"{number}.a"))
            _, metrics = store.mix([], iteration=1, policy_version=0, progress=0.0, reducer=reducer)
            return metrics, store.read(f"{number}.a").trajectory.outcome

    (metrics, first), (same, second) = on_ranks(rank)
    assert metrics == same
    assert (first, second) == (1.0, -10.0)
    assert (metrics["replay/overrides"], metrics["replay/overrides_refused"]) == (1, 1)
