"""The frame of the command line: names, errors, folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from slea_llm.assets import find
from slea_llm.cli import COMMANDS, main
from slea_llm.cli.arguments import prepare_folder
from slea_llm.errors import ConfigError


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def test_unknown_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["score", "log.jsonl", "--resme=yes", "--zzz"])
    assert stopped.value.code == 2
    assert "--resme=yes (did you mean '--resume'?); --zzz\n" in capsys.readouterr().err


def test_a_setting_written_as_an_option_is_told_how_settings_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["train", "recipe.yaml", "--output_dir=there"])
    assert stopped.value.code == 2
    assert "settings of the recipe are written without dashes: run.output_dir=FOLDER" in capsys.readouterr().err


def test_a_library_error_is_one_readable_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "no-such-recipe.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("slea plan: recipe no-such-recipe.yaml cannot be read")
    assert "Traceback" not in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert f"slea {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "override", ["hub_token=hf_0000FAKE", "model.revision=hf_0000FAKE", "run.output_dir=wk-0000FAKE"]
)
def test_br_095_a_secret_given_as_an_override_is_refused_and_never_printed(
    override: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "wk-0000FAKE")
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(find("recipes", "order_taking_tiny.yaml")), override]) == 2
    printed = capfd.readouterr()
    assert override.partition("=")[0] in printed.err
    assert "0000FAKE" not in printed.out + printed.err
    assert not list(tmp_path.iterdir())


def test_an_existing_run_is_refused_or_moved_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    prepare_folder(folder, fresh=False)
    (folder / "logs").mkdir()
    (folder / "logs" / "play.log").touch()
    prepare_folder(folder, fresh=False)  # a rollout or an evaluation was here, no run
    (folder / "metrics.jsonl").write_text("kept", encoding="utf-8")
    with pytest.raises(ConfigError, match="already holds something; give --fresh"):
        prepare_folder(folder, fresh=False)
    (folder / "recipe.yaml").touch()
    with pytest.raises(ConfigError, match=r"a run without a checkpoint .*; give --fresh"):
        prepare_folder(folder, fresh=False)
    (folder / "checkpoints" / "step-3").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run; give --resume to go on from its newest checkpoint"):
        prepare_folder(folder, fresh=False)
    prepare_folder(folder, fresh=True)
    assert not list(folder.iterdir())
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text(encoding="utf-8") == "kept"


def test_options_may_stand_between_recipe_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(find("recipes", "order_taking_tiny.yaml")), "--gpus", "0", "trainer.epochs=3"]) == 0
    assert "3 epochs" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "evaluate"])
def test_only_the_recipe_is_required(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command])
    assert capsys.readouterr().err.endswith("the following arguments are required: recipe\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "{recipe}", "evaluators=[rules]"], "evaluators.0: a component is a mapping: write {name: rules}"),
        (["plan", "{recipe}", "user.name=recorded"], "user 'recorded' needs the log that it replays"),
        (["plan", "{recipe}", "user={name: recorded, log: none.jsonl}"], "log none.jsonl is no file"),
        (["evaluate", "{recipe}", "model.base=/no/base"], "`slea warm-start RECIPE` makes its base first"),
        (["plan", "{recipe}", "evaluators=[{name:rules}]"], "got the key 'name:rules'; YAML wants a space after"),
        (["plan", "{recipe}", "trainer.epochs=-1"], "  trainer: epochs -1 is out of range; allowed: 1 or more\n"),
        (["list", "parsers"], "unknown kind 'parsers'; one of environment, user, parser"),
        (["plan", "{recipe}", "run.seed=-1"], "seed -1 is out of range; allowed: 0 to 2^63 - 1"),
        (["plan", "{recipe}", "trainer.learning_rate=.inf"], "learning_rate inf is out of range; allowed: 0 or more"),
        (["train", "{recipe}", "run.output_dir={recipe}"], "is a file, and a folder is wanted"),
        (["train", "{recipe}", "run.output_dir={recipe}/x"], "cannot be made: File exists; name another folder"),
        (
            ["warm-start", "{recipe}", "warm_start.output={recipe}/x"],
            "cannot be made: File exists; name another folder",
        ),
        (["train", "{recipe}", "run.output_dir=/no/such", "--resume"], "/no/such holds no run to go on with"),
        (["evaluate", "{recipe}", "--log", "{recipe}"], "exists already; give another name"),
        (["convert", "x", "--to", "openai_chat", "--output", "y", "--at-least", "nan"], "--at-least nan is no finite"),
        (["convert", "x", "--to", "openai_chat", "--output", "y", "--at-least", "1"], "--weight-by names whose score"),
        (["convert", "x", "--to", "hub_dataset", "--output", "y", "--plain"], "--plain is for openai_chat"),
        (["fit-evaluator", "x", "--output", "y", "--seed", "-1"], "--seed -1 is below 0"),
        (["export", "/no/run"], "/no/run is no output folder of `slea train`"),
    ],
)
def test_what_is_missing_is_said_with_what_to_do(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(find("recipes", "order_taking_tiny.yaml"))
    assert main([word.replace("{recipe}", recipe) for word in words]) == 2
    assert said in capsys.readouterr().err
