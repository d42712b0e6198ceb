"""The replay buffer: what is kept, what is drawn, and what it weighs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.buffer import ERROR_FLOOR, ReplayBuffer, error_priority, importance, probabilities, success_priority
from slea_llm.demonstrations import TOKENISED
from slea_llm.errors import CheckpointError, ConfigError, CreditError, StorageError
from slea_llm.interfaces import LocalReducer
from slea_llm.settings import ReplaySettings
from tests.support import replay
from tests.support.experience import on_ranks
from tests.support.replay import credited, ids, one, several

pytestmark = pytest.mark.integration

Make = Callable[..., ReplayBuffer]


@pytest.fixture
def buffer() -> Iterator[Make]:
    """Makes buffers, and closes them when the test is over."""
    with ExitStack() as stack:

        def make(folder: Path, **options: Any) -> ReplayBuffer:
            return stack.enter_context(closing(replay.buffer(folder, **options)))

        yield make


def mixed(store: Any, fresh: Any, *, version: int, progress: float = 0.0, iteration: int | None = None) -> Any:
    return store.mix(
        fresh,
        iteration=version if iteration is None else iteration,
        policy_version=version,
        progress=progress,
        reducer=LocalReducer(),
    )


@pytest.mark.parametrize(
    ("power", "chances", "weak", "full"),
    [
        (0.0, [0.25] * 4, [1.0] * 4, [1.0] * 4),
        (
            0.6,
            [0.1482295, 0.22467391, 0.28655461, 0.34054197],
            [1.0, 0.84674531, 0.76822936, 0.71697762],
            [1.0, 0.65975396, 0.51728186, 0.43527528],
        ),
        (1.0, [0.1, 0.2, 0.3, 0.4], [1.0, 0.75785828, 0.64439401, 0.57434918], [1.0, 0.5, 0.33333333, 0.25]),
    ],
)
def test_prioritised_chances_and_weights(power: float, chances: Any, weak: Any, full: Any) -> None:
    got = probabilities(np.array([1.0, 2, 3, 4]), power)
    assert got.tolist() == pytest.approx(chances, abs=1e-6)
    assert importance(got, 0.4).tolist() == pytest.approx(weak, abs=1e-6)
    assert importance(got, 1.0).tolist() == pytest.approx(full, abs=1e-6)


def test_full_weights_leave_the_mean_what_it_is() -> None:
    chances = probabilities(np.array([1.0, 2, 3, 4]), 0.6)
    raw = 1.0 / (len(chances) * chances)
    assert float((chances * raw * [10, 20, 30, 40]).sum()) == pytest.approx(25.0, abs=1e-9)
    assert importance(chances, 1.0).tolist() == pytest.approx((raw / raw.max()).tolist())


def test_chances_by_the_error_of_the_critic() -> None:
    found = [error_priority(credited(one("t"), error=error), 0.0) for error in (0.5, -0.1, 0.0, 1.2)]
    assert found == pytest.approx([0.51, 0.11, ERROR_FLOOR, 1.21])
    expected = [0.31524011, 0.12558419, 0.02979198, 0.52938372]
    assert probabilities(np.array(found), 0.6).tolist() == pytest.approx(expected, abs=1e-6)


def test_a_success_has_twice_the_priority() -> None:
    got = [success_priority(credited(one("t", termination=end)), 0.5) for end in ("success", "failure", "max_turns")]
    assert got == [2.0, 1.0, 1.0]


def test_fresh_dialogues_come_first_and_are_drawn_from_the_next_round_on(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path)
    first, metrics = mixed(store, several("a", "b"), version=0)
    assert ids(first) == ["a", "b"]
    assert metrics["replay/drawn"] == metrics["replay/share"] == 0
    second, metrics = mixed(store, several("c", "d", version=1), version=1)
    assert ids(second)[:2] == ["c", "d"]
    assert set(ids(second)[2:]) <= {"a", "b"}
    assert metrics["replay/age_max"] == metrics["replay/age_mean"] == 1
    assert metrics["replay/size"] == len(store) == 4


def test_what_is_stored_comes_back_to_the_bit_and_holds_no_advantage(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path)
    put = several("a", "b", version=3)
    store.add(put)
    assert [store.read("a"), store.read("b")] == put
    (file,) = tmp_path.glob("*.jsonl")
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        record = json.loads(line)
        assert set(record) == {"group", "entered", "scored", "crc32"}
        assert set(record["scored"]) == {"trajectory", "steps", "scores", "parser", "evaluator_versions"}
        assert record["scored"]["trajectory"]["policy_version"] == 3
        assert record["scored"]["evaluator_versions"] == {"judge": "1"}
    with pytest.raises(KeyError, match="no dialogue 'z'"):
        store.read("z")


@settings(deadline=None, max_examples=20)
@given(share=st.floats(0.05, 0.75), fresh=st.integers(0, 12), size=st.integers(1, 3), seed=st.integers(0, 99))
def test_replayed_dialogues_are_at_most_their_share(
    tmp_path_factory: pytest.TempPathFactory, share: float, fresh: int, size: int, seed: int
) -> None:
    store = replay.buffer(tmp_path_factory.mktemp("buffer"), share=share, seed=seed)
    store.add([one(f"old{group}.{n}", task=str(group)) for group in range(9) for n in range(size)])
    got, metrics = mixed(store, several(*(f"new{n}" for n in range(fresh)), version=1), version=1)
    assert metrics["replay/drawn"] == len(got) - fresh
    assert metrics["replay/share"] <= share + 1e-12
    drawn = ids(got)[fresh:]
    assert len(set(drawn)) == len(drawn)
    groups = {name.partition(".")[0] for name in drawn}
    assert sorted(drawn) == sorted(f"{group}.{n}" for group in groups for n in range(size))
    store.close()


def test_br_105_no_dialogue_older_than_the_limit_is_drawn(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path, max_age=2, share=0.75)
    for version in range(8):
        got, metrics = mixed(store, several(f"{version}a", f"{version}b", version=version), version=version)
        ages = [version - each.trajectory.policy_version for each in got]
        assert max(ages) <= 2
        assert metrics["replay/expired"] == (2 if version > 2 else 0)
    assert set(store.ids) == {f"{version}{letter}" for version in (5, 6, 7) for letter in "ab"}


def test_the_oldest_groups_leave_whole_when_the_buffer_is_full(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path, capacity=5)
    for group in range(3):
        _, metrics = mixed(store, [one(f"{group}.{n}", task=str(group)) for n in range(2)], version=0, iteration=group)
    assert store.ids == ("1.0", "1.1", "2.0", "2.1")
    assert metrics["replay/evicted"] == 2


def test_the_disk_of_what_left_is_given_back(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path, capacity=8)
    sizes = []
    for number in range(60):
        mixed(store, several(f"t{number}"), version=0, iteration=number)
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    assert store.bytes_on_disk == sizes[-1]
    assert max(sizes) <= sizes[0] * 10
    assert len(store) == 8


def test_files_that_a_checkpoint_counts_on_stay_until_it_is_gone(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path, capacity=1, checkpoints=2)
    store.add(several("a"))
    states = [store.state()]
    for number in range(6):
        mixed(store, several(f"t{number}"), version=0, iteration=number)
        states.append(json.loads(json.dumps(store.state())))
        for kept in states[-2:]:
            again = buffer(tmp_path / "copy", capacity=1)
            (tmp_path / "copy").mkdir(exist_ok=True)
            for path in tmp_path.glob("*.jsonl"):
                (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())
            again.restore(kept)
            assert again.read(again.ids[0]).trajectory.id == kept["ids"][0]
            again.close()
    assert len(list(tmp_path.glob("*.jsonl"))) <= 5


def test_br_055_what_was_not_consumed_is_there_after_a_resume(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path, max_draws=1, share=0.5, priority="error", max_age=9)
    five = [one(f"t{number}", version=number) for number in range(1, 6)]
    store.add(five)
    store.weigh([credited(each, error=1e12 if each.trajectory.id in ("t1", "t2") else 0.0) for each in five],
                reducer=LocalReducer())  # fmt: skip
    got, _ = mixed(store, several("new", "newer", version=5), version=5, iteration=2)
    assert ids(got)[2:] == ["t1", "t2"]
    state = json.loads(json.dumps(store.state()))
    again = buffer(tmp_path, max_draws=1, share=0.5, priority="error", max_age=9)
    again.restore(state)
    assert again.ids[:3] == ("t3", "t4", "t5")
    assert [again.read(name).trajectory.policy_version for name in again.ids[:3]] == [3, 4, 5]


def test_a_restored_buffer_draws_what_the_first_would_have_drawn(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path, priority="error")
    for version in range(3):
        got, _ = mixed(store, several(*(f"{version}.{n}" for n in range(4)), version=version), version=version)
        store.weigh([credited(each, error=0.1 * n) for n, each in enumerate(got)], reducer=LocalReducer())
    state = json.loads(json.dumps(store.state()))
    fresh = several("x", "y", version=3)
    wanted = mixed(store, fresh, version=3)
    weights = store.weigh([credited(each) for each in wanted[0]], reducer=LocalReducer())
    store.close()
    again = buffer(tmp_path, priority="error")
    again.restore(state)
    assert mixed(again, fresh, version=3) == wanted
    same = again.weigh([credited(each) for each in wanted[0]], reducer=LocalReducer())
    assert [e.weights.tolist() for e in same[0]] == [e.weights.tolist() for e in weights[0]]
    assert same[1] == weights[1]
    assert again.priorities == store.priorities


def test_weights_undo_priorities_and_the_fresh_weigh_exactly_one(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path, priority="error")
    old = several("a", "b", "c", "d")
    store.add(old)
    store.weigh([credited(each, error=n + 1 - ERROR_FLOOR) for n, each in enumerate(old)], reducer=LocalReducer())
    assert store.priorities == pytest.approx((1.0, 2.0, 3.0, 4.0))
    fresh = several(*(f"f{n}" for n in range(16)), version=1)
    got, _ = mixed(store, fresh, version=1, progress=1.0)
    weighed, metrics = store.weigh([credited(each) for each in got], reducer=LocalReducer())
    by_id = {each.scored.trajectory.id: float(each.weights[0]) for each in weighed}
    assert all(by_id[name] == 1.0 for name in ids(fresh))
    expected = {"a": 1.0, "b": 0.65975396, "c": 0.51728186, "d": 0.43527528}
    times = {name: by_id[name] / expected[name] for name in ids(got)[16:]}
    assert sum(times.values()) == pytest.approx(16, abs=1e-6)  # drawn twice: once, with twice the weight
    assert all(often == pytest.approx(round(often), abs=1e-6) for often in times.values())
    drawn = np.array([by_id[name] for name in ids(got)[16:]])
    assert metrics["replay/weight"] == pytest.approx(drawn.mean())
    assert metrics["replay/ess"] == pytest.approx(drawn.sum() ** 2 / (len(drawn) * np.square(drawn).sum()))


def test_equal_priorities_weigh_exactly_one_a_draw(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path)
    store.add(several("a", "b", "c"))
    got, _ = mixed(store, several("x", version=1), version=1)
    weighed, metrics = store.weigh([credited(each) for each in got], reducer=LocalReducer())
    assert [each.weights.tolist() for each in weighed] == [[1.0] * 5] * 2
    assert metrics == {"replay/weight": 1.0, "replay/ess": 1.0}


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 1000))
def test_draws_follow_the_chances(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    store = replay.buffer(tmp_path_factory.mktemp("buffer"), priority="error", seed=seed, max_age=1000, share=0.75)
    old = several("a", "b")
    store.add(old)
    store.weigh([credited(old[0], error=1.0), credited(old[1], error=15.0)], reducer=LocalReducer())
    wanted = probabilities(np.array([1.01, 15.01]), 0.6)[0]
    store.close()
    store._read = lambda row: dataclasses.make_dataclass("Record", ["scored"])(old[row])  # type: ignore[method-assign]
    count = {"a": 0.0, "b": 0.0}
    chances = np.array([wanted, 1 - wanted])
    for iteration in range(40):
        drawn = store.draw(30, iteration=iteration, progress=1.0)
        for name in ids(drawn):
            count[name] += store._weights[name] / importance(chances, 1.0)["ab".index(name)]
    assert sum(count.values()) == pytest.approx(1200)
    assert count["a"] / 1200 == pytest.approx(wanted, abs=5 * np.sqrt(wanted * (1 - wanted) / 1200))


def test_a_dialogue_that_is_stored_again_takes_the_place_of_the_older_one(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path)
    store.add(several("a", "b"))
    store.add(several("a", version=4))
    assert store.ids == ("b", "a")
    assert store.read("a").trajectory.policy_version == 4


@pytest.mark.parametrize("kind", ["broken", "text", "tokenised"])
def test_what_no_policy_sampled_is_refused(buffer: Make, tmp_path: Path, kind: str) -> None:
    made = one("odd", termination="error" if kind == "broken" else "success")
    if kind == "text":
        turns = tuple(dataclasses.replace(turn, span=None) for turn in made.trajectory.turns)
        made = dataclasses.replace(made, trajectory=dataclasses.replace(made.trajectory, traces=(), turns=turns))
    if kind == "tokenised":
        marked = dataclasses.replace(made.trajectory, provenance={TOKENISED: "text"})
        made = dataclasses.replace(made, trajectory=marked)
    store = buffer(tmp_path)
    with pytest.raises(ValueError, match=r"trajectory odd has no tokens that were sampled.*never replayed"):
        store.add([*several("fine"), made])
    assert store.ids == ()


def test_a_damaged_record_is_an_error_when_it_is_drawn(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path)
    store.add(several("a"))
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(file.read_bytes().replace(b'"thought"', b'"thighht"'))
    with pytest.raises(StorageError, match="the checksum is wrong"):
        mixed(store, several("x", version=1), version=1)


def test_a_state_of_other_settings_or_without_its_file_is_refused(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path)
    store.add(several("a"))
    state = store.state()
    with pytest.raises(CheckpointError, match=r"share: 0.5 there, 0.25 here"):
        buffer(tmp_path, share=0.25).restore(state)
    buffer(tmp_path, overrides="later.jsonl").restore(state)
    (file,) = tmp_path.glob("*.jsonl")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"segment-000001.jsonl is gone or shorter"):
        buffer(tmp_path).restore(state)


def test_every_rank_has_its_own_share_and_ranks_agree_on_the_metrics(buffer: Make, tmp_path: Path) -> None:
    def rank(reducer: Any) -> Any:
        number = reducer.rank
        store = buffer(tmp_path / str(number), rank=number, world_size=2, capacity=6)
        store.mix(
            several(*(f"{number}.{n}" for n in range(4))), iteration=0, policy_version=0, progress=0.0, reducer=reducer
        )
        fresh = several(f"{number}.new", version=1) if number == 0 else []
        got, metrics = store.mix(fresh, iteration=1, policy_version=1, progress=0.5, reducer=reducer)
        weighed, more = store.weigh([credited(each) for each in got], reducer=reducer)
        return ids(got), len(store), metrics | more, len(weighed)

    (first, size, metrics, weighed), (second, other, same, none) = on_ranks(rank)
    assert metrics == same
    assert first[0] == "0.new"
    assert first[1].startswith("0.")
    assert second == []
    assert (size, other, weighed, none) == (3, 3, 2, 0)
    assert metrics["replay/size"] == 6
    assert metrics["replay/share"] == 0.5


def test_priorities_that_cannot_be_drawn_by_are_refused(buffer: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"priority 'weights' needs weights in use by the sampler.*error, success"):
        buffer(tmp_path, priority="weights")
    for odd in (0.0, -1.0, float("nan"), float("inf")):
        store = buffer(tmp_path / str(odd), priority="weights", priority_of=lambda *_, odd=odd: odd)
        store.add(several("a"))
        with pytest.raises(CreditError, match="must be above 0 and finite"):
            store.weigh([credited(one("a"))], reducer=LocalReducer())


def test_scores_of_another_version_are_counted(buffer: Make, tmp_path: Path) -> None:
    store = buffer(tmp_path)
    store.add([dataclasses.replace(one("old"), evaluator_versions={"judge": "0"})])
    _, metrics = mixed(store, several("new", version=1), version=1)
    assert (metrics["replay/drawn"], metrics["replay/stale_scores"]) == (1, 1)


def test_settings_out_of_range_are_refused() -> None:
    for odd in (
        {"share": 0.8},
        {"capacity": 0},
        {"max_age": 0},
        {"overrides": "file"},
        {"max_draws": -1},
    ):
        with pytest.raises(ValueError, match="is out of range"):
            ReplaySettings(**odd)
