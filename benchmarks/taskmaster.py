"""The reward model on Taskmaster-4's judged next steps: grouped folds, pair accuracy, reliability, baselines.

    python benchmarks/taskmaster.py FOLDER [--encoder NAME] [--seed N] [--controls]

FOLDER holds tm4_reward_handed.json: rows of conversation_id, context, generation and reward (0 or 1). Every row becomes
a dialogue of one turn with a hand label. A context's pair accuracy is the share of its (good, bad) pairs that held-out
scores order rightly, and the mean is over contexts that have both kinds.

The ids of the file are no conversations: all 1,950 differ, also those of rows with one context. Folds are therefore
made of openings (`--group opening`, the default): rows whose users began with the same words stay together, and so
do all rows of one context. `--group id` splits by the ids as they stand, so that alternatives of one context, and with
them the same reply to the same words, are on both sides.
Controls: contexts shuffled, labels shuffled, labels shuffled within each context, and good steps exchanged. In the
last, of two contexts and the good step of each, a step is to score above the other's where it stands in its own
context: whatever its text alone says counts as often for as against, so that a model that ignores contexts gets 0.5.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slea_llm.encoders import DEFAULT_ENCODER, load_encoder
from slea_llm.fitting.evaluator import FitSettings, HeldOut, cross_validate, reliability, shape_of
from slea_llm.fitting.labels import StepLabel, examples
from slea_llm.fitting.training import Example, TrainingSettings, fit, folds, predict
from slea_llm.measures import PairedDifference, pair_accuracies, paired_bootstrap
from slea_llm.parsers.tagged import TaggedParser
from slea_llm.types import Message, Role, Trajectory, Turn

ROLES: dict[str, Role] = {"agent": "assistant", "user": "user", "api": "tool"}


def message(said: dict[str, Any]) -> Message:
    return Message(
        role=ROLES[said["role"]], content=said.get("text") or json.dumps(said.get("api") or said.get("response"))
    )


def reply(said: dict[str, Any]) -> str:
    if "text" in said:
        return str(said["text"])
    ((name, arguments),) = said["api"].items()
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def group_of(row: dict[str, Any], by: str) -> str:
    """What stays on one side of a split: see the head of this file."""
    if by == "id":
        return str(row["conversation_id"])
    first = next((said["text"] for said in json.loads(row["context"]) if said["role"] == "user"), "")
    return " ".join(str(first).lower().split())


def read(
    folder: Path, order: Sequence[int] | None = None, *, group: str = "opening"
) -> tuple[list[Trajectory], list[float], list[str]]:
    """Dialogues, labels, true contexts; `order` says whose context every row gets instead of its own.

    Groups are those of the true contexts, whatever context a row is given.
    """
    rows = json.loads((folder / "tm4_reward_handed.json").read_text(encoding="utf-8"))
    found = []
    for index, row in enumerate(rows):
        said = json.loads(rows[index if order is None else order[index]]["context"])
        turn = Turn(index=0, context=tuple(map(message, said)), text=reply(json.loads(row["generation"])))
        found.append(
            Trajectory(
                id=f"row-{index}",
                task={"id": group_of(row, group)},
                environment="taskmaster4",
                seed=0,
                policy_version=0,
                turns=(turn,),
                traces=(),
                outcome=None,
                termination="budget",
            )
        )
    return found, [float(row["reward"]) for row in rows], [row["context"] for row in rows]


def examples_of(trajectories: Sequence[Trajectory], labels: Sequence[float], encoder: str) -> list[Example]:
    parser = TaggedParser(TaggedParser.Config())
    parsed = [(one, parser.parse(one.turns[0], one.id, None)) for one in trajectories]
    given = [
        StepLabel(trajectory=one.id, turn=0, step=steps[-1].index, source="hand", target=label)
        for (one, steps), label in zip(parsed, labels, strict=True)
    ]
    return examples(parsed, given, load_encoder(encoder), "apart")


def pairs(scores: Any, labels: Sequence[float], contexts: Sequence[str]) -> dict[str, float]:
    """Context -> pair accuracy; alternatives are rows of one context as it stands in the file."""
    return pair_accuracies(scores.tolist(), [label > 0.5 for label in labels], contexts)


def against(held_out: HeldOut, rule: str, labels: Sequence[float], contexts: Sequence[str]) -> PairedDifference:
    own, other = (pairs(scores, labels, contexts) for scores in (held_out.logits, held_out.baselines[rule]))
    return paired_bootstrap([other[name] for name in own], list(own.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--encoder", default=DEFAULT_ENCODER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--group", choices=("opening", "id"), default="opening")
    parser.add_argument("--settings", default="{}", help="JSON of FitSettings")
    parser.add_argument("--training", default="{}", help="JSON of TrainingSettings")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = FitSettings(
        **json.loads(arguments.settings), training=TrainingSettings(**json.loads(arguments.training))
    )
    begun = time.perf_counter()
    trajectories, labels, contexts = read(arguments.folder, group=arguments.group)
    own = examples_of(trajectories, labels, arguments.encoder)
    print(f"{len(own)} steps encoded in {time.perf_counter() - begun:.0f} s", flush=True)
    begun = time.perf_counter()
    held_out = cross_validate(own, settings, seed=arguments.seed)["label"]
    found = reliability(held_out)
    ordered = pairs(held_out.logits, labels, contexts)
    print(f"5 folds in {time.perf_counter() - begun:.0f} s")
    print(
        f"pair accuracy {np.mean(list(ordered.values())):.4f} over {len(ordered)} contexts; "
        f"AUC {found.auc:.4f}; ECE {found.ece:.4f}"
    )
    for rule, auc in found.baselines.items():
        accuracy = np.mean(list(pairs(held_out.baselines[rule], labels, contexts).values()))
        print(f"  {rule:<24} pair accuracy {accuracy:.4f}  AUC {auc:.4f}")
    gain = against(held_out, "popularity_with_overlap", labels, contexts)
    print(f"minus popularity_with_overlap: {gain.mean:+.4f} (95 % {gain.interval[0]:+.4f} to {gain.interval[1]:+.4f})")
    if arguments.controls:
        controls(arguments, own, labels, settings)
        swapped(arguments, own, labels, settings)


def controls(
    arguments: argparse.Namespace, own: Sequence[Example], labels: Sequence[float], settings: FitSettings
) -> None:
    """What is left without the contexts, and without the labels."""
    rng = np.random.default_rng(arguments.seed)
    mixed_up, _, contexts = read(arguments.folder, rng.permutation(len(own)).tolist(), group=arguments.group)
    strange = examples_of(mixed_up, labels, arguments.encoder)
    places: dict[str, list[int]] = {}
    for place, context in enumerate(contexts):
        places.setdefault(context, []).append(place)
    within = np.array(labels)
    for alike in places.values():
        within[alike] = rng.permutation(within[alike])
    for name, rows, truth in (
        ("contexts shuffled throughout", strange, labels),
        ("labels shuffled", relabelled(own, rng.permutation(labels)), labels),
        ("labels shuffled within contexts", relabelled(own, within), within.tolist()),
    ):
        held_out = cross_validate(rows, settings, seed=arguments.seed)["label"]
        # Alternatives are those of the true contexts, whatever context the model was shown.
        found, auc = pairs(held_out.logits, truth, contexts), reliability(held_out).auc
        rules = ", ".join(
            f"{rule} {np.mean(list(pairs(scores, truth, contexts).values())):.4f}"
            for rule, scores in held_out.baselines.items()
            if rule.startswith("popularity")
        )
        print(f"{name}: pair accuracy {np.mean(list(found.values())):.4f}, AUC {auc:.4f}; {rules}", flush=True)


def swapped(
    arguments: argparse.Namespace, own: Sequence[Example], labels: Sequence[float], settings: FitSettings
) -> None:
    """Do held-out scores know which of two good steps belongs to which of two contexts?"""
    said, _, contexts = read(arguments.folder, group=arguments.group)
    fold = folds([one.group for one in own], settings.folds, seed=arguments.seed)
    rng = np.random.default_rng(arguments.seed)
    right: list[float] = []
    for number in range(settings.folds):
        good = [place for place in np.flatnonzero(fold == number) if labels[place] > 0.5]
        rng.shuffle(good)
        chosen = [
            (left, other)
            for left, other in zip(good[::2], good[1::2], strict=False)
            if contexts[left] != contexts[other] and said[left].turns[0].text != said[other].turns[0].text
        ]
        train = [one for one, place in zip(own, fold, strict=True) if place != number]
        fitted = fit(train, shape_of(own, settings), settings.training, seed=arguments.seed + number)
        rows = [own[place] for pair in chosen for place in pair]
        moved = [exchanged(said[place], said[other]) for pair in chosen for place, other in (pair, pair[::-1])]
        strange = examples_of(moved, [1.0] * len(moved), arguments.encoder)
        at_home, away = (np.array([logits[-1, 0] for logits in predict(fitted, part)]) for part in (rows, strange))
        right += (0.5 * (1.0 + np.sign(at_home - away))).tolist()
    error = np.std(right) / np.sqrt(len(right))
    print(
        f"good steps exchanged: {np.mean(right):.4f} of {len(right)} stand above (standard error {error:.3f})",
        flush=True,
    )


def exchanged(one: Trajectory, other: Trajectory) -> Trajectory:
    """The context of one with the step of the other."""
    turn = dataclasses.replace(one.turns[0], text=other.turns[0].text)
    return dataclasses.replace(one, turns=(turn,))


def relabelled(rows: Sequence[Example], labels: Sequence[float]) -> list[Example]:
    return [
        dataclasses.replace(one, targets=np.where(one.weights > 0, label, 0.0))
        for one, label in zip(rows, labels, strict=True)
    ]


if __name__ == "__main__":
    main()
