"""How often the referee is right: planted faults of a folder, and dialogues that are clean.

python benchmarks/referee.py [--planted FOLDER] [--human FOLDER] [--scripted N] [--show]

`--planted`: `*.jsonl` or `*.jsonl.gz` files with one dialogue a line:
    {"id", "goal": {slot: value, ...} or any goal, "language": "en" or "zh", "ending": a termination,
     "messages": [{"role": "user", "assistant" or "tool", "content"}], "party": whose fault, or null, "kind": free text}
`--human`: the folder with multiwoz_sample.json, crosswoz_sample.json (ConvLab form) and, if it is there,
    taskmaster4/tm4_reward_handed.json or dialogues of that form. Each is judged as a success and as a failure.
`--scripted`: dialogues of scripted users, half of them with agents that err, judged without saying that a script spoke.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slea_llm.environments.order_taking import OrderTaking
from slea_llm.measures import wilson
from slea_llm.referee import Referee, Ruling
from slea_llm.rollout import play
from slea_llm.types import Message, Trajectory, Turn
from slea_llm.users.scripted import ScriptedUser


def dialogue(name: str, messages: Sequence[Mapping[str, str]], **task: Any) -> Trajectory:
    """A record of messages alone; `task` holds goal, language and ending."""
    ending = task.pop("ending", "failure")
    turns: list[Turn] = []
    context: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append(Turn(index=len(turns), context=tuple(context), text=message["content"]))
            context = []
        else:
            context.append(Message(role=message["role"], content=message["content"]))  # type: ignore[arg-type]
    return Trajectory(
        id=name,
        task=task,
        environment="logged",
        seed=0,
        policy_version=-1,
        turns=tuple(turns),
        traces=(),
        outcome=1.0 if ending == "success" else 0.0,
        termination=ending,
        provenance={"last_messages": [{"role": one.role, "content": one.content} for one in context]},
    )


def planted(folder: Path) -> Iterator[tuple[Trajectory, str | None, str]]:
    """`(dialogue, party, kind)` of every line of a folder's files."""
    for file in sorted((*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz"))):
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for number, line in enumerate(data.decode("utf-8").splitlines()):
            if not line.strip():
                continue
            one = json.loads(line)
            task = {"goal": one["goal"], "language": one.get("language", ""), "ending": one.get("ending", "failure")}
            yield (
                dialogue(str(one.get("id", f"{file.stem}-{number}")), one["messages"], **task),
                one.get("party", "user"),
                str(one.get("kind", file.stem)),
            )


def human(folder: Path) -> Iterator[tuple[str, list[dict[str, str]], dict[str, Any], str]]:
    """`(name, messages, goal, language)` of recorded dialogues between people."""
    for name, language in (("multiwoz", "en"), ("crosswoz", "zh")):
        for file in sorted(folder.rglob(f"{name}_sample.json")):
            for one in json.loads(file.read_text(encoding="utf-8")):
                messages = [
                    {"role": "user" if turn["speaker"] == "user" else "assistant", "content": turn["utterance"]}
                    for turn in one["turns"]
                ]
                yield one["dialogue_id"], messages, _goal(one), language
    for file in sorted(folder.rglob("tm4_reward_handed.json")):
        yield from _taskmaster(json.loads(file.read_text(encoding="utf-8")))


def _goal(one: Mapping[str, Any]) -> dict[str, Any]:
    goal = dict(one["goal"])
    if not goal.get("inform"):
        told = {}
        for part in one.get("user_state_init", ()):
            for domain, state in part.items():
                told[domain] = {**told.get(domain, {}), **{slot: value[0] for slot, value in state["inform"].items()}}
        goal["inform"] = told
    return goal


def _taskmaster(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, list[dict[str, str]], dict[str, Any], str]]:
    """Dialogues that are no beginning of another one; they say no goal."""
    texts: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        messages = [
            {"role": {"agent": "assistant", "api": "tool"}.get(line["role"], "user"), "content": line["text"]}
            for line in json.loads(row["context"])
            if "text" in line
        ]
        texts[json.dumps(messages)] = messages
    keys = sorted(texts)
    for key, following in zip(keys, [*keys[1:], ""], strict=True):
        messages = texts[key]
        if not following.startswith(key[:-1]) and sum(one["role"] == "user" for one in messages):
            yield f"tm4-{len(messages)}-{abs(hash(key)) % 10**6}", messages, {}, "en"


def scripted(count: int) -> Iterator[Trajectory]:
    """Dialogues of the scripted user with experts, erring experts and idlers, as if a person had spoken."""
    user = ScriptedUser(ScriptedUser.Config())
    for number in range(count):
        environment = OrderTaking(OrderTaking.Config(language="zh" if number % 4 == 3 else "en"))
        task = environment.task(number)
        kinds = (environment.expert(task), environment.expert(task, error_rate=0.5), environment.idler(task))
        played = play(environment, user, kinds[(0, 1, 0, 1, 1, 2)[number % 6]], task, seed=number, max_turns=12)
        yield Trajectory(
            **{**_fields(played), "provenance": {k: v for k, v in played.provenance.items() if k != "user"}}
        )


def _fields(trajectory: Trajectory) -> dict[str, Any]:
    return {name: getattr(trajectory, name) for name in Trajectory.__dataclass_fields__}


def report(name: str, judged: Sequence[tuple[Trajectory, Ruling]], *, show: bool) -> None:
    """How many of these clean dialogues the user is blamed for."""
    blamed = [(one, ruling) for one, ruling in judged if ruling.party == "user"]
    _, high = wilson(len(blamed), len(judged))
    share = 100 * len(blamed) / len(judged)
    kinds = Counter(ruling.fault.kind for _, ruling in blamed if ruling.fault)
    parties = Counter(str(ruling.party) for _, ruling in judged)
    print(f"{name}: user blamed in {len(blamed)} of {len(judged)} = {share:.2f} % (95 % below {100 * high:.1f})")
    print(f"   user {dict(kinds)}; all rulings {dict(parties)}")
    for one, ruling in blamed if show else ():
        print(f"   {one.id} {ruling.fault}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=Path)
    parser.add_argument("--human", type=Path)
    parser.add_argument("--scripted", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what was judged wrongly")
    arguments = parser.parse_args()
    referee = Referee(Referee.Config())
    if arguments.planted:
        rows = list(planted(arguments.planted))
        rulings = referee.judge_many([one for one, _, _ in rows])
        right: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for (one, party, kind), ruling in zip(rows, rulings, strict=True):
            total[kind] += 1
            right[kind] += ruling.party == party
            if arguments.show and ruling.party != party:
                print(
                    f"   {one.id} [{kind}] is {party}'s, laid to {ruling.party}: {ruling.fault and ruling.fault.kind}"
                )
        for kind in sorted(total):
            print(f"  {kind:<28} {right[kind]}/{total[kind]}")
        low, high = wilson(sum(right.values()), sum(total.values()))
        share = 100 * sum(right.values()) / sum(total.values())
        print(
            f"planted: blame right in {sum(right.values())} of {sum(total.values())} = {share:.1f} % "
            f"(95 % {100 * low:.1f} to {100 * high:.1f})"
        )
    if arguments.human:
        texts = list(human(arguments.human))
        for ending in ("success", "failure"):
            made = [
                dialogue(name, messages, goal=goal, language=language, ending=ending)
                for name, messages, goal, language in texts
            ]
            report(
                f"people, judged as {ending}",
                list(zip(made, referee.judge_many(made), strict=True)),
                show=arguments.show,
            )
    if arguments.scripted:
        made = list(scripted(arguments.scripted))
        failed = sum(not one.success for one in made)
        report(
            f"scripted ({failed} failed)", list(zip(made, referee.judge_many(made), strict=True)), show=arguments.show
        )


if __name__ == "__main__":
    main()
