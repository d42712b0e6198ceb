"""The causal reward model on Taskmaster-4's judged next steps, a small part of them: it reads whole dialogues.

    python benchmarks/causal_steps.py FOLDER --base FOLDER_OF_A_CHAT_MODEL [--openings N] [--epochs N] [--max-tokens N]

The rows are those of the first N openings (see taskmaster.py) that hold a context with good and bad next steps and are
no longer than --max-tokens. Folds are made of openings. --epochs 0 fits the heads alone, on states of the bare base.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from taskmaster import read

from slea_llm.fitting.causal import CausalSettings, fit_causal, token_examples
from slea_llm.fitting.evaluator import lines
from slea_llm.fitting.labels import StepLabel
from slea_llm.models.step_reader import open_reader
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.settings import ModelSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", required=True)
    parser.add_argument("--openings", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=0)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--ridge", type=float, default=100.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = ModelSettings(base=arguments.base)
    opened = open_reader(base, longest=arguments.max_tokens, seed=arguments.seed)
    said, judged, contexts = read(arguments.folder)
    both = {
        one.task["id"]
        for one, context in zip(said, contexts, strict=True)
        if len({label for label, other in zip(judged, contexts, strict=True) if other == context}) == 2
    }
    chosen = sorted(both)[: arguments.openings]
    cut = TaggedParser(TaggedParser.Config())
    parsed = [(one, cut.parse(one.turns[0], one.id, None)) for one in said if one.task["id"] in chosen]
    target = {one.id: label for one, label in zip(said, judged, strict=True)}
    labels = [
        StepLabel(trajectory=one.id, turn=0, step=steps[-1].index, source="hand", target=target[one.id])
        for one, steps in parsed
    ]
    rows, _ = token_examples(parsed, labels, opened, report=print)
    tokens = sum(len(one.row) for one in rows)
    print(f"{len(rows)} rows of {len(chosen)} openings, {tokens} tokens", flush=True)
    begun = time.perf_counter()
    settings = CausalSettings(
        folds=arguments.folds,
        epochs=arguments.epochs,
        learning_rate=arguments.learning_rate,
        ridge=arguments.ridge,
        batch_tokens=2048,
    )
    fitted = fit_causal(
        rows,
        labels,
        opened,
        base=base,
        settings=settings,
        seed=arguments.seed,
        report=lambda line: print(line, flush=True),
    )
    print(f"fitted {settings.folds + 1} times in {time.perf_counter() - begun:.0f} s")
    for line in lines(fitted.card):
        print(line)


if __name__ == "__main__":
    main()
