"""The command line. Each command is a module of this package, imported only when it is the one asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from slea_llm import __version__
from slea_llm.errors import SleaError, nearest

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "train": ("train", "train an agent by a recipe (start it with `accelerate launch`)"),
        "plan": ("plan", "check a recipe, print the batch arithmetic and a memory plan, start nothing"),
        "warm-start": ("warm_start", "imitate scripted dialogues, so that training starts from a model that can talk"),
        "rollout": ("rollout", "run dialogues with a model and write them to a log"),
        "parse": ("parse", "cut logged dialogues or texts into steps and report how far that goes"),
        "fit-evaluator": ("fit_evaluator", "fit a reward model on logged dialogues, and say whether it may be used"),
        "score": ("score", "score every step of logged dialogues"),
        "convert": ("convert", "logs of any known format to our own, to OpenAI chat rows or to a Hub dataset"),
