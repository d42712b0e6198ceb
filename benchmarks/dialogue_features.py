"""How the word-only features of a step rank good next steps above bad ones.

    python benchmarks/dialogue_features.py DATA          DATA holds steps/taskmaster4/tm4_reward_handed.json

Mean pair accuracy over the contexts that have steps of both kinds; a tie counts half, so a feature that says nothing
gets 0.5. No slots of a domain are given, so that `specific` is left out.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import table

from slea_llm.evaluators.dialogue_features import Past, Scene, Told, Words, normalised
from slea_llm.evaluators.knowledge_file import read_words

Step = tuple[bool, Mapping[str, bool]]
SCORES: Mapping[str, Callable[[Mapping[str, bool]], float]] = {
    "ignores_feedback": lambda features: -features["ignores_feedback"],
    "repeats": lambda features: -features["repeats"],
    "coherent": lambda features: features["coherent"],
    "all three": lambda features: features["coherent"] - features["repeats"] - features["ignores_feedback"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    rows = json.loads((parser.parse_args().data / "steps/taskmaster4/tm4_reward_handed.json").read_text("utf-8"))
    words = read_words()
    contexts: dict[str, list[Step]] = defaultdict(list)
    for row in rows:
        scene = Scene(normalised(_text(json.loads(row["generation"]))), _past(json.loads(row["context"]), words), words)
        contexts[row["context"]].append((float(row["reward"]) > 0, scene.features))
    both = [steps for steps in contexts.values() if len({good for good, _ in steps}) == 2]
    print(f"{len(rows)} steps, {len(both)} contexts with good and bad ones")
    print(table(["feature", "pair accuracy"], [[name, f"{_accuracy(both, of):.4f}"] for name, of in SCORES.items()]))


def _text(message: Mapping[str, Any]) -> str:
    """What a message says; calls and results as JSON."""
    return str(message.get("text") or json.dumps({key: value for key, value in message.items() if key != "role"}))


def _past(context: Sequence[Mapping[str, Any]], words: Words) -> Past:
    said, told, now = [], [], []
    for message in context:
        text = normalised(_text(message))
        if message["role"] == "agent":
            said.append((text, words.content(text)))
            now = []
        else:
            told.append(Told(text, words))
            now.append(told[-1])
    return Past(tuple(told), tuple(now), tuple(said), bool(said and now))


def _accuracy(contexts: Sequence[Sequence[Step]], of: Callable[[Mapping[str, bool]], float]) -> float:
    shares = []
    for steps in contexts:
        good = [of(features) for is_good, features in steps if is_good]
        bad = [of(features) for is_good, features in steps if not is_good]
        shares.append(sum((x > y) + (x == y) / 2 for x in good for y in bad) / (len(good) * len(bad)))
    return sum(shares) / len(shares)


if __name__ == "__main__":
    main()
