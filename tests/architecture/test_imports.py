"""What is light stays light: torch-free rooms import without torch, and the command line starts at once."""

from __future__ import annotations

import subprocess
import sys

TORCH_FREE = (
    "slea_llm.types",
    "slea_llm.interfaces",
    "slea_llm.registry",
    "slea_llm.settings",
    "slea_llm.assets",
    "slea_llm.prompts",
    "slea_llm.storage",
    "slea_llm.config",
    "slea_llm.scoring",
    "slea_llm.crediting",
    "slea_llm.measures",
    "slea_llm.environments.order_taking",
    "slea_llm.environments.complaint",
    "slea_llm.environments.tech_support",
    "slea_llm.environments.trip_planning",
    "slea_llm.environments.strategy_game",
    "slea_llm.environments.code_task",
    "slea_llm.sandbox.runner",
    "slea_llm.environments.gymnasium_text",
    "slea_llm.environments.textworld_games",
    "slea_llm.environments.verifiers_tasks",
    "slea_llm.users.scripted",
    "slea_llm.parsers.tagged",
    "slea_llm.parsers.auto",
    "slea_llm.parsers.coverage",
    "slea_llm.parsers.llm",
    "slea_llm.evaluators.knowledge_base",
    "slea_llm.evaluators.return_decomposition",
    "slea_llm.evaluators.hindsight",
    "slea_llm.evaluators.counterfactual",
    "slea_llm.evaluators.blend",
    "slea_llm.evaluators.llm_judge",
    "slea_llm.evaluators.reward_model",
    "slea_llm.augmenters.slot_progress",
    "slea_llm.credit.nested_gae",
    "slea_llm.rollout",
    "slea_llm.continuations",
    "slea_llm.cli",
    "slea_llm.cli.score",
    "slea_llm.cli.parse",
    "slea_llm.cli.fit_evaluator",
    "slea_llm.cli.listing",
)


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return result.stdout.strip()


def test_torch_free_rooms_import_without_torch() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = [m for m in ('torch', 'transformers', 'vllm', 'trl') if m in sys.modules]\n"
        "    assert not heavy, (name, heavy)\n"
    )
    run(code)


def test_help_imports_no_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "slea_llm", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert "slea_llm.cli" in imported
    assert not imported & {"torch", "numpy", "transformers", "pydantic", "vllm"}
    assert "train" in result.stdout


def test_importing_the_package_does_nothing() -> None:
    out = run(
        "import logging, warnings, os\nbefore = (dict(os.environ), list(warnings.filters), logging.root.level)\n"
        "import slea_llm\nprint(before == (dict(os.environ), list(warnings.filters), logging.root.level))"
    )
    assert out == "True"
