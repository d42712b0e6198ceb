"""Size and shape budgets: a module is one idea, a function fits on a screen, a component has few knobs."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from slea_llm import registry, settings

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "slea_llm").rglob("*.py"))
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_COMPONENT_KNOBS = 12
MAX_CORE_KNOBS = 90


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_module_and_function_budgets(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= MAX_MODULE_LINES, f"{path.name} is more than one idea"
    for function in functions(ast.parse(source)):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{path.name}:{function.lineno} {function.name} has {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_level_state(path: Path) -> None:
    """Module level holds constants, types, functions and classes: no mutable literal, no call that builds state."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Global):
            pytest.fail(f"{path.name}:{node.lineno} global statement")
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.List | ast.Dict | ast.Set):
            names = [t.id for t in getattr(node, "targets", [getattr(node, "target", None)]) if isinstance(t, ast.Name)]
            frozen = isinstance(node, ast.AnnAssign) and "Mapping" in ast.unparse(node.annotation)
            assert frozen or names == ["__all__"], f"{path.name}:{node.lineno} {names} is mutable module-level state"


def test_third_party_imports_stay_in_their_room() -> None:
    """trl is imported by trl_seam alone, vllm by generation/vllm and generation/vllm_chat alone."""
    owners = {"trl": {"trl_seam.py"}, "vllm": {"vllm.py", "vllm_chat.py"}}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [node.module]
            for name in names:
                owner = owners.get(name.partition(".")[0])
                assert owner is None or path.name in owner, f"{path.name} imports {name}"


@pytest.mark.parametrize("kind", registry.KINDS)
def test_component_knob_budget(kind: str) -> None:
    for name in registry.ROWS[kind]:
        component = registry.load(kind, name)
        # `model` names the folder of what was fitted: nothing to turn.
        knobs = [field.name for field in dataclasses.fields(component.Config) if field.name != "model"]
        assert len(knobs) <= MAX_COMPONENT_KNOBS, f"{kind} {name}: {knobs}"


def test_core_knob_budget_and_every_field_is_read() -> None:
    """A setting that nothing reads is worse than none."""
    sections = [value for value in vars(settings).values() if dataclasses.is_dataclass(value)]
    fields = [(s.__name__, f.name) for s in sections for f in dataclasses.fields(s)]  # type: ignore[union-attr]
    assert len(fields) <= MAX_CORE_KNOBS
    texts = [p.read_text(encoding="utf-8") for p in MODULES if p.name != "settings.py"]
    unread = [f"{owner}.{name}" for owner, name in fields if not any(f".{name}" in text for text in texts)]
    assert not unread, f"settings that nothing reads: {unread}"


def test_no_type_check_exclusions() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    assert config["strict"] is True
    assert "exclude" not in config
    assert not any(override.get("ignore_errors") for override in config["overrides"])
