"""Every component by kind. Third-party packages add theirs by entry points of the group `slea_llm.<kind>`."""

from __future__ import annotations

import argparse

from slea_llm import registry
from slea_llm.cli.output import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", choices=registry.KINDS, help="only this kind")


def run(arguments: argparse.Namespace) -> int:
    for kind in (arguments.kind,) if arguments.kind else registry.KINDS:
        say(f"{kind}:")
        names = registry.names(kind)
        width = max(map(len, names), default=0)
        for name, place in sorted(names.items()):
            origin = "" if name in registry.ROWS[kind] else "  (third party)"
            say(f"  {name:<{width}}  {place}{origin}")
    return 0
