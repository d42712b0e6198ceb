"""`slea list`: every component with a line of what it is for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from slea_llm import registry
from slea_llm.cli import main
from slea_llm.cli.listing import purpose


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_component_says_what_it_is_for_on_one_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", kind]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"{kind}:"
    said = dict(line.split(maxsplit=1) for line in lines)
    for name, place in registry.ROWS[kind].items():
        assert place not in said[name]
        assert 20 < len(said[name]) < 140
    assert len(set(said.values())) == len(said)


def test_places_are_shown_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "evaluator", "--places"]) == 0
    assert "slea_llm.evaluators.rules:Rules" in capsys.readouterr().out


def test_components_of_one_module_speak_for_themselves() -> None:
    assert purpose(registry.ROWS["evaluator"]["counterfactual"]).startswith("Plays on")
    assert purpose(registry.ROWS["evaluator"]["counterfactual_prediction"]).startswith("Asks a fitted model")


def test_nothing_is_imported_for_the_list() -> None:
    code = "import sys; from slea_llm.cli import main; main(['list']); assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
