"""The environment that docs/environments.md writes is run: it keeps what the contract asks of every environment."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slea_llm.environments.speech import Speech
from slea_llm.errors import ConfigError
from slea_llm.interfaces import Environment
from slea_llm.users.scripted import ScriptedUser
from tests.contract.test_environments import SayOnly, same
from tests.support.dialogue import play, resume

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    code, check = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    code += check  # the script that checks it stands under it
    folder = tmp_path_factory.mktemp("guide")
    (folder / "parking_guide.py").write_text(code, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield vars(importlib.import_module("parking_guide"))
    sys.modules.pop("parking_guide")


def test_the_guide_works(written: dict[str, Any]) -> None:
    environment: Environment = written["Parking"](written["Parking"].Config())
    user = ScriptedUser(ScriptedUser.Config())
    for seed in range(20):
        task = environment.task(seed)
        played = play(environment, user, environment.expert(task), task, seed=seed)
        assert (played.termination, played.turns) == ("success", 2)
        for agent in (environment.idler(task), SayOnly()):
            assert play(environment, user, agent, task).termination in {"failure", "user_left"}
        erring = environment.expert(task, error_rate=0.5)
        whole = play(environment, user, erring, task, seed=seed)
        for turn in range(whole.turns):
            assert same(whole, resume(environment, user, erring, task, whole=whole, turn=turn))
    assert len({json.dumps(environment.task(seed).goal) for seed in range(1000)}) > 900


def test_data_that_do_not_fit_are_refused(written: dict[str, Any]) -> None:
    data = written["DATA"]
    with pytest.raises(ConfigError, match="slot_names and slots differ in plate"):
        Speech.of({**data, "slot_names": {}}, code="en", source="parking")
    with pytest.raises(ConfigError, match=r"values\.plate needs choices, or pattern and form"):
        Speech.of({**data, "values": {"plate": {}}}, code="en", source="parking")
    with pytest.raises(ConfigError, match="read_back names colour, no slot of it"):
        Speech.of({**data, "read_back": {"plate": "{plate}", "plate+colour": "x"}}, code="en", source="parking")
    two = {name: {**data[name], "colour": data[name]["plate"]} for name in ("slot_names", "values")}
    asks = {**data["understanding"], "ask": {"plate": ["plate"], "colour": ["colour"]}}
    with pytest.raises(ConfigError, match="read_back has no form for colour"):
        Speech.of({**data, **two, "slots": ["plate", "colour"], "understanding": asks}, code="en", source="parking")
    broken = {**data["understanding"], "request": ["("]}
    with pytest.raises(ConfigError, match="is not a regular expression"):
        Speech.of({**data, "understanding": broken}, code="en", source="parking")
