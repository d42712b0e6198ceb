"""A reward model refitted on two ranks: one fits, all read the same file, and a resumed run goes on with it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slea_llm.evaluators.reward_model_words import UNFITTED
from tests.distributed.launching import launch
from tests.support import training

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("refits")
    training.write_base(folder / "base")
    for processes in (2, 1):
        launch(folder, ["refits"], processes=processes)
    names = ("refits-2-rank0", "refits-2-rank1", "refits-1-rank0")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def test_all_ranks_score_by_the_one_copy_that_the_first_rank_fitted(found: dict[str, dict[str, Any]]) -> None:
    first, second = found["refits-2-rank0"], found["refits-2-rank1"]
    assert first["versions"] == second["versions"]
    assert first["scores"] == second["scores"]
    # The 48 dialogues of one iteration are too few; then two refits, each another model.
    assert first["versions"][0] == UNFITTED
    assert len(set(first["versions"])) == 3
    too_few, *refitted = first["said"]
    assert too_few.startswith("reward_model: not refitted after iteration 1: ")
    assert [line.partition(" dialogues")[0] for line in refitted] == ["refitted on 92", "refitted on 88"]
    assert second["said"] == []
    assert first["own"] > second["own"] > 0


def test_two_ranks_fit_what_one_process_fits(found: dict[str, dict[str, Any]]) -> None:
    """The dialogues of all ranks in rank order are those of one process, so the weights are the same to the byte."""
    assert found["refits-2-rank0"]["versions"] == found["refits-1-rank0"]["versions"]


def test_a_resumed_run_scores_by_the_copy_of_its_checkpoint_and_refits_alike(found: dict[str, dict[str, Any]]) -> None:
    for one in found.values():
        assert one["restored"] == one["versions"][1]
        assert one["again"] == one["versions"][2:]
