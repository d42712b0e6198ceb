"""Seconds per trained token against TRL's GRPOTrainer, in one run: the update, then a whole iteration.

The same model, LoRA, batch, lengths and dtype on both sides; a process for each side, which work in turn. Also counts
the tokens that run forward when a dialogue is one row and when it is a row a turn. docs/performance.md says what is in
each figure.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice

from common import Sample, Side, Spread, model_folder, paired_ratio, race, seconds_per_token, set_quiet, table
from update_sides import Job, grpo, iteration, update

from slea_llm.types import Message

POLICY, CRITIC, GRPO = "this project, policy", "this project, policy and own critic", "TRL GRPOTrainer"
PHASES = ("generation", "stats", "credit", "update", "sync", "iteration")
PROMPTS = 16
MILLI = 1000.0


def main() -> None:
    arguments = _arguments()
    set_quiet()
    base = model_folder(arguments.model)
    job = _job(base, arguments)
    print(_heading(job))
    rounds = arguments.repeats
    updates = race(
        {
            POLICY: Side(update, job, "none"),
            CRITIC: Side(update, job, "own_adapter"),
            GRPO: Side(grpo, job, True),
        },
        rounds=rounds,
    )
    print(f"\nupdate, {rounds} paired rounds\n\n{_race_table(updates, 'update')}", flush=True)
    print(
        f"\ntokens run forward by an update, scripted dialogues\n\n{_rows_table(base, arguments.dialogues)}", flush=True
    )
    if arguments.only_update:
        return
    rounds = max(1, arguments.repeats - 1)
    iterations = race(
        {
            POLICY: Side(iteration, job, "none"),
            CRITIC: Side(iteration, job, "own_adapter"),
            GRPO: Side(grpo, job, False),
        },
        rounds=rounds,
    )
    print(f"\niteration, {rounds} paired rounds\n\n{_race_table(iterations, 'iteration')}")
    print(f"\nseconds by phase, median\n\n{_phase_table(iterations)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a name of `slea fetch-model`, a folder or a hub name")
    parser.add_argument("--rows", type=int, default=8, help="rows of an update, a multiple of 8 (default 8)")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=128,
        help="tokens of a row that are read only (default 128: of an order dialogue's row a fifth is sampled)",
    )
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of a row that are trained (default 32)")
    parser.add_argument("--repeats", type=int, default=3, help="measured rounds of each side (default 3)")
    parser.add_argument("--dialogues", type=int, default=64, help="scripted dialogues to count tokens in (default 64)")
    parser.add_argument("--only-update", action="store_true", help="leave the iterations, which need vllm, out")
    parser.add_argument("--quick", action="store_true", help="one round of 8 rows x (16 + 16) tokens: does it run")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.prompt_tokens, arguments.new_tokens, arguments.repeats = 8, 16, 16, 1
    if arguments.rows % 8 or arguments.rows < 8 or min(arguments.repeats, arguments.prompt_tokens) < 1:
        parser.error("--rows must be a multiple of 8, --repeats and --prompt-tokens at least 1")
    return arguments


def _job(base: str, arguments: argparse.Namespace) -> Job:
    texts = _prompt_texts(base, arguments.prompt_tokens)
    return Job(
        base=base,
        prompts=tuple(islice(texts, PROMPTS)),
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        rows=arguments.rows,
        group=8,  # GRPOConfig's own default
    )


def _prompt_texts(base: str, length: int) -> Iterator[str]:
    """Pieces of scripted dialogues that are exactly so many tokens, also when their text is encoded again."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    spoken = (message.content for dialogue in _dialogues() for message in dialogue)
    ids: list[int] = []
    for text in spoken:
        ids += tokenizer(f"{text}\n", add_special_tokens=False)["input_ids"]
        if len(ids) >= length:
            piece, ids = ids[:length], ids[length:]
            prompt = tokenizer.decode(piece)
            if tokenizer(prompt)["input_ids"] == piece:
                yield prompt


def _dialogues() -> Iterator[list[Message]]:
    """Order dialogues of the scripted expert, without end."""
    from slea_llm.environments.order_taking import OrderTaking
    from slea_llm.rollout import play
    from slea_llm.users.scripted import ScriptedUser

    environment = OrderTaking(OrderTaking.Config(prompt="full"))
    user = ScriptedUser(ScriptedUser.Config())
    for seed in count():
        task = environment.task(seed)
        trajectory = play(environment, user, environment.expert(task), task, seed=seed, max_turns=12)
        messages: list[Message] = []
        for turn in trajectory.turns:
            messages += [*turn.context, Message(role="assistant", content=turn.text)]
        yield messages


def _heading(job: Job) -> str:
    return (
        f"{job.rows} rows x ({job.prompt_tokens} prompt + {job.new_tokens} trained) tokens, one batch, LoRA r16 "
        f"all-linear, float32, no gradient checkpointing, {os.environ['OMP_NUM_THREADS']} threads; rounds after one to "
        "warm up; median (smallest to largest)"
    )


def _race_table(samples: Mapping[str, Sequence[Sample]], key: str) -> str:
    clocks = {side: seconds_per_token(one, key) for side, one in samples.items()}
    used = {side: seconds_per_token(one, key, cpu=True) for side, one in samples.items()}
    rows = []
    for side, one in samples.items():
        row = [side]
        for numbers in (clocks, used):
            row.append(f"{MILLI * Spread.of(numbers[side]).median:.2f}")
            row.append("1" if side == GRPO else paired_ratio(numbers[side], numbers[GRPO]).text())
        row += [f"{max(sample.memory[name] for sample in one):.1f}" for name in ("peak", "added")]
        rows.append(row)
    header = ["side", "ms a trained token", "ratio", "CPU ms a trained token", "ratio", "peak GiB", "of it added"]
    return table(header, rows)


def _phase_table(samples: Mapping[str, Sequence[Sample]]) -> str:
    rows = [[side, *(_median_seconds(one, phase) for phase in PHASES)] for side, one in samples.items()]
    return table(["side", *PHASES], rows)


def _median_seconds(samples: Sequence[Sample], phase: str) -> str:
    found = [sample.seconds[phase] for sample in samples if phase in sample.seconds]
    return f"{Spread.of(found).median:.2f}" if found else "-"


def _rows_table(base: str, dialogues: int) -> str:
    """Tokens of one row a dialogue against a row a turn (each with all that came before), the same dialogues."""
    from slea_llm.models.chat import ChatTokenizer
    from slea_llm.models.loading import load_tokenizer
    from slea_llm.settings import ModelSettings

    chat = ChatTokenizer(load_tokenizer(ModelSettings(base=base)), thoughts="keep")
    counts: dict[int, list[tuple[int, int, int]]] = {}
    for dialogue in islice(_dialogues(), dialogues):
        ((ids, trained),) = chat.encode_rows(dialogue)
        ends = [at for at in range(1, len(ids) + 1) if trained[at - 1] and (at == len(ids) or not trained[at])]
        counts.setdefault(len(ends), []).append((sum(trained), len(ids), sum(ends)))
    everything = [one for several in counts.values() for one in several]
    groups = [*((str(turns), counts[turns]) for turns in sorted(counts)), ("all", everything)]
    rows = []
    for turns, several in groups:
        trained, once, by_turn = (sum(column) for column in zip(*several, strict=True))
        rows.append([turns, str(len(several)), str(trained), str(once), str(by_turn), f"{once / by_turn:.2f}"])
    return table(["turns", "dialogues", "trained", "one row a dialogue", "one row a turn", "ratio"], rows)


if __name__ == "__main__":
    main()
