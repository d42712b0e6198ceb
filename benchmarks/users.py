"""Simulated users beside people: turns, words a turn, share of questions, slots told a turn.

python benchmarks/users.py HUMAN_FOLDER [--scripted N] [--log NAME=LOG ...]

HUMAN_FOLDER holds multiwoz_sample.json and crosswoz_sample.json (ConvLab form). `--scripted` plays N dialogues of the
scripted user with the expert in each language. `--log` adds dialogues of this project's format, such as those that
`slea rollout` wrote with the user `llm`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slea_llm.blame.view import view
from slea_llm.environments.order_taking import OrderTaking
from slea_llm.rollout import play
from slea_llm.storage import read_trajectories
from slea_llm.types import Trajectory
from slea_llm.users.scripted import ScriptedUser
from slea_llm.users.speech import words_of

_QUESTION = re.compile(
    r"[?？]|吗|呢|什么|哪|多少|几(?!乎)|^(?:what|which|where|when|how|who|is|are|do|does|can|could)\b", re.IGNORECASE
)


@dataclass(kw_only=True)
class Talk:
    """What the users of one kind said: utterances by dialogue, and the number of slots told in each."""

    dialogues: list[list[str]] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    def row(self, name: str) -> str:
        turns = [len(one) for one in self.dialogues]
        said = [text for one in self.dialogues for text in one]
        words = [len(words_of(text)) for text in said]
        asked = 100 * sum(bool(_QUESTION.search(text)) for text in said) / len(said)
        shares = Counter(min(count, 3) for count in self.told)
        slots = "/".join(f"{100 * shares[count] / len(self.told):.0f}" for count in range(4))
        mean = sum(self.told) / len(self.told)
        spread = statistics.stdev(words) if len(words) > 1 else 0.0
        return (
            f"| {name} | {len(turns)} | {statistics.mean(turns):.1f} | {statistics.mean(words):.1f} ({spread:.1f}) | "
            f"{asked:.0f} % | {slots} | {mean:.2f} |"
        )


def people(folder: Path) -> Iterator[tuple[str, Talk]]:
    for file in sorted(folder.rglob("*woz_sample.json")):
        talk = Talk()
        for one in json.loads(file.read_text(encoding="utf-8")):
            turns = [turn for turn in one["turns"] if turn["speaker"] == "user" and turn["utterance"].strip()]
            talk.dialogues.append([turn["utterance"] for turn in turns])
            talk.told += [_informed(turn["dialogue_acts"]) for turn in turns]
        yield file.stem.partition("_")[0], talk


def _informed(acts: dict[str, Any]) -> int:
    """The slots that an utterance informs about, by its annotation."""
    every = [act for kind in acts.values() for act in kind if act["intent"].lower() == "inform"]
    return len({(act["domain"], act["slot"]) for act in every})


def simulated(trajectories: Sequence[Trajectory]) -> Talk:
    talk = Talk()
    for trajectory in trajectories:
        seen = view(trajectory)
        said = [line.text for line in seen.user_lines if line.text.strip()]
        if said:
            talk.dialogues.append(said)
            talk.told += [sum(slot.told_in(text) for slot in seen.wanted) for text in said]
    return talk


def scripted(count: int, language: Any) -> list[Trajectory]:
    environment, user = OrderTaking(OrderTaking.Config(language=language)), ScriptedUser(ScriptedUser.Config())
    tasks = [environment.task(seed) for seed in range(count)]
    return [play(environment, user, environment.expert(task), task, seed=task.seed, max_turns=12) for task in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("human", type=Path)
    parser.add_argument("--scripted", type=int, default=0)
    parser.add_argument("--log", action="append", default=[], metavar="NAME=LOG")
    arguments = parser.parse_args()
    print(
        "| users | dialogues | turns | words a turn (standard deviation) | questions | slots told 0/1/2/3+ % | mean |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, talk in people(arguments.human):
        print(talk.row(name))
    for language in ("en", "zh") if arguments.scripted else ():
        print(simulated(scripted(arguments.scripted, language)).row(f"scripted, {language}"))
    for entry in arguments.log:
        name, _, log = entry.partition("=")
        print(simulated([one for one in read_trajectories(log) if not one.failed]).row(name))


if __name__ == "__main__":
    main()
