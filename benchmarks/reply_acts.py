"""What the sentences of replies do: the rules of the parser `reply`, and the rules with its light model.

    python benchmarks/reply_acts.py TASKMASTER4 [DIALOGUES] [--model use-multilingual] [--odds 20]

TASKMASTER4 holds tm4_reward_handed.json. reply_acts.json marks 150 of its agents' sentences: row, message (the reply of
the row stands behind its context), first and last character, and what the sentence does; where two readings are good,
both are right. They were marked before any parse of them had been seen. DIALOGUES holds multiwoz_sample.json and
crosswoz_sample.json in the unified format; there an utterance, not a sentence, carries the acts that others marked, and
F1 is over utterances of user and system: asked for something (request, reqmore), refused (nooffer, nobook).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from slea_llm.parsers.reply import ReplyParser
from slea_llm.parsers.sentences import Whole, sentence_cuts

MARKS = Path(__file__).parent / "reply_acts.json"
INTENTS: Mapping[str, str] = {
    "request": "asks_information",
    "reqmore": "asks_information",
    "nooffer": "refuses",
    "nobook": "refuses",
}


def marked(parser: ReplyParser, folder: Path) -> float:
    """Share of the marked sentences whose act is one that was marked."""
    rows = json.loads((folder / "tm4_reward_handed.json").read_text(encoding="utf-8"))
    right = 0
    marks = json.loads(MARKS.read_text(encoding="utf-8"))
    for row, place, start, end, acts in marks:
        said = [*json.loads(rows[row]["context"]), json.loads(rows[row]["generation"])][place]
        (act,) = parser._what([said["text"][start:end]])
        right += act in acts
    return right / len(marks)


def utterances(parser: ReplyParser, file: Path) -> dict[str, Counter[str]]:
    """Act -> right, wrong and missed over utterances."""
    counts: dict[str, Counter[str]] = {act: Counter() for act in INTENTS.values()}
    for dialogue in json.loads(file.read_text(encoding="utf-8")):
        for turn in dialogue["turns"]:
            intents = [one["intent"].lower() for part in turn["dialogue_acts"].values() for one in part]
            true = {INTENTS[intent] for intent in intents if intent in INTENTS}
            found = set(parser._what(sentences(turn["utterance"])))
            for act, count in counts.items():
                count["right"] += act in true and act in found
                count["wrong"] += act in found and act not in true
                count["missed"] += act in true and act not in found
    return counts


def sentences(text: str) -> list[str]:
    cuts = [0, *sentence_cuts(text, 0, len(text), Whole(text)), len(text)]
    return [text[begin:end] for begin, end in pairwise(cuts) if text[begin:end].strip()]


def score(counts: Sequence[Counter[str]]) -> float:
    total = sum(counts, Counter())
    return 2 * total["right"] / max(1, 2 * total["right"] + total["wrong"] + total["missed"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("taskmaster", type=Path)
    parser.add_argument("dialogues", type=Path, nargs="?")
    parser.add_argument("--model", default="use-multilingual")
    parser.add_argument("--odds", type=float, default=20.0)
    arguments = parser.parse_args()
    begun = time.process_time()
    both = ReplyParser(ReplyParser.Config(model=arguments.model, odds=arguments.odds))
    print(f"light model fitted in {time.process_time() - begun:.1f} CPU s")
    for name, made in (("rules", ReplyParser(ReplyParser.Config())), (f"rules and {arguments.model}", both)):
        begun = time.process_time()
        print(f"{name}: {marked(made, arguments.taskmaster):.3f} of the marked sentences", end="")
        if arguments.dialogues:
            for sample in ("multiwoz", "crosswoz"):
                counts = utterances(made, arguments.dialogues / f"{sample}_sample.json")
                each = ", ".join(f"{act} {score([count]):.3f}" for act, count in counts.items())
                print(f"; {sample} F1 {score(list(counts.values())):.3f} ({each})", end="")
        print(f"; {time.process_time() - begun:.1f} CPU s")


if __name__ == "__main__":
    main()
