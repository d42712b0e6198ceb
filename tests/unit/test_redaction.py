"""Secrets appear nowhere; what only looks like one stays readable."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slea_llm.errors import ConfigError
from slea_llm.redaction import (
    REDACTED,
    RedactingFormatter,
    environment_secrets,
    find_secrets,
    names_a_secret,
    redact,
    redact_text,
    refuse_secrets,
)

BR_095_ENV = {"WANDB_API_KEY": "wk-0000FAKE"}
BR_095_CONFIG: dict[str, Any] = {"run": {"name": "x"}, "hub_token": "hf_0000FAKE"}
FAKES = ("wk-0000FAKE", "hf_0000FAKE")


def occurrences(text: str) -> int:
    return sum(text.count(fake) for fake in FAKES)


def test_br_095_a_saved_or_tracked_config_holds_no_secret() -> None:
    config = {**BR_095_CONFIG, "note": f"launched with --key {BR_095_ENV['WANDB_API_KEY']}"}
    written = json.dumps(redact(config, secrets=environment_secrets(BR_095_ENV)))
    assert occurrences(written) == 0
    assert json.loads(written)["hub_token"] == REDACTED
    assert json.loads(written)["run"] == {"name": "x"}


def test_br_095_logs_hold_no_secret_tracebacks_included() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(RedactingFormatter("%(message)s", secrets=("plainvalue123",)))
    logger = logging.Logger("redaction")
    logger.addHandler(handler)
    try:
        int(FAKES[1])
    except ValueError:
        logger.exception("token %s, env %s, other plainvalue123", *FAKES)
    assert occurrences(stream.getvalue()) == 0
    assert "plainvalue123" not in stream.getvalue()
    assert stream.getvalue().count(REDACTED) == 4


def test_br_095_a_recipe_with_a_secret_is_refused_without_quoting_it() -> None:
    with pytest.raises(ConfigError, match=r"recipe.yaml: hub_token, judge.keys\[0\].*environment variable") as error:
        refuse_secrets({**BR_095_CONFIG, "judge": {"keys": ["sk-0000FAKE00"]}}, source="recipe.yaml")
    assert occurrences(str(error.value)) == 0
    assert "sk-0000FAKE00" not in str(error.value)


def test_a_secret_in_the_place_of_a_key_is_found_and_blanked() -> None:
    config = {"section": {FAKES[1]: 1}}
    assert occurrences(json.dumps(redact(config))) == 0
    assert find_secrets(config) == ["a key of section"]


@pytest.mark.parametrize(
    "name", ["hub_token", "WANDB_API_KEY", "api_key", "apiKey", "aws-secret", "HF_TOKEN", "password", "smtpPassword"]
)
def test_names_of_secrets(name: str) -> None:
    assert names_a_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "max_reply_tokens",
        "gamma_tokens",
        "eos_token",
        "pad_token",
        "tokenizer",
        "keyboard",
        "api_key_env",
        "tokens",
        "",
    ],
)
def test_names_that_only_speak_of_tokens(name: str) -> None:
    assert not names_a_secret(name)


def test_numbers_under_such_names_are_settings() -> None:
    config = {"gamma_token": 1.0, "lam_token": 0.95, "max_reply_tokens": 64, "token": None}
    assert redact(config) == config
    assert find_secrets(config) == []


@pytest.mark.parametrize(
    "text",
    [
        "sk-proj-abc123def456",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "Authorization: Bearer abcdef0123456789",
        "https://user:hunter2@example.org/x",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_known_shapes_are_blanked_under_any_name(text: str) -> None:
    blanked = redact_text(f"before {text} after")
    assert REDACTED in blanked
    assert text not in blanked
    assert blanked.startswith("before ")
    assert blanked.endswith(" after")


@pytest.mark.parametrize(
    "text", ["hf_transfer", "sk-learn", "runs/models/smollm2-135m", "task-0001-something", "wk-end", "risk-1234567890"]
)
def test_ordinary_words_are_left_alone(text: str) -> None:
    assert redact_text(text) == text


def test_short_environment_values_do_not_blank_ordinary_text() -> None:
    assert environment_secrets({"SOME_TOKEN": "1", "HOME": "/home/someone", "X_SECRET": "abcdef"}) == {"abcdef"}


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(config=st.dictionaries(st.text(max_size=6), plain, max_size=4), text=st.text(max_size=5))
def test_a_planted_secret_never_survives_and_redacting_twice_changes_nothing(config: dict[str, Any], text: str) -> None:
    config["deep"] = [{"note": f"{text} {FAKES[1]} {text}"}, config.copy()]
    once = redact(config, secrets=["another-value"])
    assert occurrences(json.dumps(once, ensure_ascii=False)) == 0
    assert redact(once, secrets=["another-value"]) == once
    assert find_secrets(once) == []


def test_a_list_of_secrets_is_blanked_item_by_item() -> None:
    config = {"api_key": ["one", ("two", "")], "words": ["one"]}
    assert redact(config) == {"api_key": [REDACTED, [REDACTED, ""]], "words": ["one"]}
    assert find_secrets(redact(config)) == []


def test_the_working_directory_is_no_secret() -> None:
    secrets = environment_secrets({"PWD": "/home/me/project", "OLDPWD": "/home/me/other", "DB_PWD": "hunter2hunter2"})
    assert secrets == {"hunter2hunter2"}
    refuse_secrets({"output_dir": "/home/me/project/runs/demo"}, source="recipe", secrets=secrets)
