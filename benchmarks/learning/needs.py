"""What a GPU would need for a run whose throughput was measured here: from the tokens and seconds of its kept result.

    python benchmarks/learning/needs.py benchmarks/learning/results/.../streams_own_start-401.json --parameters 135e6

An estimate, not a measurement. Operations a token of a row, P parameters: 2 P to read or sample it, 2 P in each pass of
the statistics (policy, reference, critic), 4 P in an update of an adapter (forward, backward through frozen weights),
2 P more where activations are computed again; of policy and critic, for every epoch. Sampling is bound by memory on a
GPU: every step reads all weights once for all dialogues at a time. The GPU's figures are its maker's; `--mfu` is the
share of the operations that training is taken to reach.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from measures import spent
from protocol import changed_recipe
from runs import Result
from tuning import row


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Dense bfloat16 operations and bytes of memory a second, as its maker states them."""

    name: str
    operations: float
    bandwidth: float


DEVICES = (
    Device(name="NVIDIA L4", operations=121e12, bandwidth=300e9),
    Device(name="NVIDIA A100 80 GB", operations=312e12, bandwidth=2039e9),
    Device(name="NVIDIA H100 SXM", operations=989e12, bandwidth=3350e9),
)
BYTES = 2
"""Of a parameter in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a dialogue of a run asks for, by its settings and its measured lengths."""

    operations: float
    """Of reading it for statistics and of updates."""
    steps: float
    """Tokens that are sampled one after the other, over all its turns."""

    @classmethod
    def of(cls, result: Result, parameters: float) -> Work:
        recipe = changed_recipe(result.recipe, result.changes)
        models = 1 if recipe.model.critic == "none" else 2
        update = 4 + 2 * recipe.model.gradient_checkpointing
        reference = any(loss.name == "reference_kl" for loss in recipe.losses)
        passes = 2 * (models + reference) + recipe.trainer.epochs * models * update
        dialogues = spent(result.curve, None).dialogues
        return cls(
            operations=(2 + passes) * parameters * result.tokens["rows"] / dialogues,
            steps=result.tokens["sampled"] / dialogues,
        )

    def seconds(self, device: Device, *, parameters: float, at_once: int, mfu: float) -> float:
        """Of one dialogue, `at_once` of them being sampled together."""
        return (
            self.operations / (mfu * device.operations) + self.steps * parameters * BYTES / device.bandwidth / at_once
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="a finished run that `study.py run` has kept")
    parser.add_argument("--parameters", type=float, required=True, help="parameters of the model, such as 135e6")
    parser.add_argument("--mfu", type=float, default=0.3, help="share of the operations that is reached (default 0.3)")
    parser.add_argument("--at-once", type=int, default=128, help="dialogues sampled together (default 128)")
    parser.add_argument(
        "--dialogues", type=float, nargs="+", default=[1e3, 1e4, 1e5], help="how many to play and train on"
    )
    arguments = parser.parse_args()
    print("\n".join(table(Result.read(arguments.result), arguments)))


def table(result: Result, arguments: argparse.Namespace) -> list[str]:
    """Markdown: measured here, and hours that each device would take."""
    work, whole = Work.of(result, arguments.parameters), spent(result.curve, None)
    measured = whole.wall / whole.dialogues
    lines = [
        f"{whole.dialogues:,} dialogues, {result.tokens['rows'] / whole.dialogues:.0f} tokens each "
        f"({work.steps:.0f} sampled), {measured:.2f} s a dialogue here ({whole.cpu / whole.dialogues:.2f} CPU s); "
        f"{work.operations / 1e12:.2f} Tflop a dialogue to train: {work.operations / measured / 1e9:.1f} Gflop/s here.",
        "",
        row("hours for so many dialogues", *(f"{count:,.0f}" for count in arguments.dialogues)),
        row(*["---"] * (1 + len(arguments.dialogues))),
        row("here, measured", *(f"{measured * count / 3600:,.2f}" for count in arguments.dialogues)),
    ]
    for device in DEVICES:
        seconds = work.seconds(device, parameters=arguments.parameters, at_once=arguments.at_once, mfu=arguments.mfu)
        lines.append(
            row(f"{device.name}, computed", *(f"{seconds * count / 3600:,.3f}" for count in arguments.dialogues))
        )
    return lines


if __name__ == "__main__":
    main()
