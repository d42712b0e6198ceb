"""Every component by kind, with what it is for. Third-party packages add theirs by entry points `slea_llm.<kind>`."""

from __future__ import annotations

import argparse
import ast
import re
from importlib import resources

from slea_llm import registry
from slea_llm.cli.output import say
from slea_llm.errors import ConfigError, nearest

_SENTENCE_END = re.compile(r"[.:;](?=\s|$)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", help=f"only this kind: {', '.join(registry.KINDS)}")
    parser.add_argument("--places", action="store_true", help="module and class of each in place of what it is for")


def run(arguments: argparse.Namespace) -> int:
    wanted = arguments.kind
    if wanted is not None and wanted not in registry.KINDS:
        raise ConfigError(
            f"unknown kind {wanted!r}; one of {', '.join(registry.KINDS)}{nearest(wanted, registry.KINDS)}"
        )
    for kind in registry.KINDS if wanted is None else (wanted,):
        say(f"{kind}:")
        names = registry.names(kind)
        width = max(map(len, names), default=0)
        for name, place in sorted(names.items()):
            if name not in registry.ROWS[kind]:
                what = f"{place}  (third party)"  # its files are not looked for: that would import its package
            else:
                what = place if arguments.places else purpose(place)
            say(f"  {name:<{width}}  {what}")
    return 0


def purpose(place: str) -> str:
    """What the module of `module:Class` of this package says that it is, read without importing it.

    Where several components share a module, the first sentence on the class.
    """
    module, _, name = place.partition(":")
    *folders, last = module.split(".")[1:]
    tree = ast.parse(resources.files("slea_llm").joinpath(*folders, f"{last}.py").read_text("utf-8"))
    shared = sum(row.startswith(f"{module}:") for rows in registry.ROWS.values() for row in rows.values()) > 1
    of_class = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), tree)
    words = " ".join((ast.get_docstring(of_class if shared else tree) or place).partition("\n\n")[0].split())
    if not shared:
        return words.removesuffix(".")
    end = _SENTENCE_END.search(words)
    return words[: end.start()] if end else words
