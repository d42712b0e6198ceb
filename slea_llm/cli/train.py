"""Train an agent by a recipe: `accelerate launch --config_file recipes/accelerate/<x>.yaml -m slea_llm train ...`."""

from __future__ import annotations

import argparse
import ctypes
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slea_llm import run_folder
from slea_llm.cli.arguments import add_recipe, prepare_folder, read_recipe
from slea_llm.cli.output import say
from slea_llm.config import COMPONENT_SECTIONS, Recipe, differences, read_document
from slea_llm.errors import CheckpointError
from slea_llm.folders import held, make_folder
from slea_llm.storage import atomic_write

if TYPE_CHECKING:
    from accelerate import Accelerator

    from slea_llm.buffer import ReplayBuffer
    from slea_llm.cli.session import Session
    from slea_llm.collection import Log, Observer, Rank
    from slea_llm.crediting import Crediting
    from slea_llm.evaluation import EvaluationReport
    from slea_llm.imitation import Imitation
    from slea_llm.models.policy import PolicyCritic
    from slea_llm.scoring import Scorer
    from slea_llm.trainer import Trainer
    from slea_llm.types import AugmentedExperience, ScoredTrajectory, Task, Trajectory


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe(parser)
    parser.add_argument("--fresh", action="store_true", help="move an existing output folder aside and start anew")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest whole checkpoint; what the recipe changes is said"
    )
    parser.add_argument("--until", type=int, default=None, metavar="N", help="stop after N iterations of the run")


def run(arguments: argparse.Namespace) -> int:
    recipe = read_recipe(arguments)
    from slea_llm import planning
    from slea_llm.cli.session import check_secrets, quiet_third_parties
    from slea_llm.distributed import make_accelerator

    check_secrets(recipe)
    notes = planning.check(recipe)
    keep_freed_memory()
    output = Path(recipe.run.output_dir)
    if arguments.resume:
        notes += _changes(output / run_folder.RECIPE, recipe)
    accelerator = make_accelerator(recipe.trainer, output_dir=output)
    with ExitStack() as stack:
        if accelerator.is_main_process:
            stack.enter_context(_held(output))
            if not arguments.resume:
                prepare_folder(output, fresh=arguments.fresh)
            for note in notes:
                say(f"note: {note}")
        accelerator.wait_for_everyone()
        stack.enter_context(quiet_third_parties(output / run_folder.LOGS / f"rank{accelerator.process_index}.log"))
        TrainingRun(recipe, accelerator).run(resume=arguments.resume, until=arguments.until)
        accelerator.end_training()
    return 0


def write_recipe(output: Path, recipe: Recipe) -> None:
    """The resolved recipe of a run, which `slea export` and `slea report` read."""
    with atomic_write(output / run_folder.RECIPE) as file:
        file.write(recipe.to_yaml())


def _held(output: Path) -> AbstractContextManager[None]:
    """Hold the output folder while it is trained in. The lock lies beside it: `--fresh` moves the folder aside."""
    make_folder(output.parent)
    busy = f"another process trains in {output}; wait until it has ended, or name another folder by run.output_dir=..."
    return held(output.with_name(f".{output.name}.lock"), busy)


def keep_freed_memory() -> None:
    """Let glibc keep what an update frees for the next one: a tenth of a small model's update is page faults else.

    Blocks above 32 MiB, the most that glibc allows here, still go back at once. Does nothing elsewhere.
    """
    if not sys.platform.startswith("linux") or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return
    library.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
    library.mallopt(_M_TRIM_THRESHOLD, 512 * 2**20)


def _changes(written: Path, recipe: Recipe) -> list[str]:
    """What a run that is gone on with says differently than before, where nobody else would notice.

    Rollout, trainer and replay are compared with the checkpoint, and a weight of another shape fits no model. Raises
    CheckpointError when policy or critic would be others, and when there is no run.
    """
    if not written.is_file():
        raise CheckpointError(f"{written.parent} holds no run to go on with; leave --resume out")
    before, now = read_document(written), recipe.model_dump(mode="json")
    free = dict.fromkeys(("gradient_checkpointing", "declared_base", "trust_remote_code"))  # not in the weights
    if odd := differences({**now["model"], **before["model"], **free}, {**now["model"], **free}, "model"):
        raise CheckpointError(f"{written.parent} was begun with another model ({'; '.join(odd)}); start a fresh run")
    sections = (*COMPONENT_SECTIONS, "streams", "weights", "kl_in_reward")
    found = [line for name in sections for line in differences(before.get(name), now[name], name)]
    return [f"resumed under other settings: {line}" for line in found]


class TrainingRun:
    """One process of a training run: builds the parts, evaluates before and after, trains between."""

    def __init__(self, recipe: Recipe, accelerator: Accelerator) -> None:
        from slea_llm.collection import Rank
        from slea_llm.step_values import StepValues

        self._values = StepValues()
        self._recipe, self._accelerator = recipe, accelerator
        self._output = Path(recipe.run.output_dir)
        self._rank: Rank = Rank(index=int(accelerator.process_index), world_size=int(accelerator.num_processes))

    def run(self, *, resume: bool, until: int | None) -> None:
        from slea_llm.cli import compose
        from slea_llm.cli.session import open_session
        from slea_llm.models.policy import build
        from slea_llm.questions import Asking
        from slea_llm.storage import ScoredLog

        recipe = self._recipe
        session = open_session(recipe, seed_offset=self._rank.index)
        if self._accelerator.is_main_process:
            say(session.template)
        with ExitStack() as stack:
            stack.callback(session.generator.close)
            model = build(
                recipe.model,
                streams=compose.heads(recipe),
                temperature=recipe.rollout.temperature,
                seed=recipe.run.seed,
            )
            if self._accelerator.is_main_process and not resume:  # not before: a run that is refused leaves none behind
                write_recipe(self._output, recipe)
            log = stack.enter_context(ScoredLog(self._output / run_folder.ROLLOUTS / f"rank{self._rank.index}.jsonl"))
            trainer = self._trainer(session, model, log, stack)
            if resume:
                self._resume(trainer)
                if self._accelerator.is_main_process:  # not before: what cannot be gone on with changes nothing
                    write_recipe(self._output, recipe)
            trainer.run(until=until)
            if trainer.iteration == recipe.trainer.iterations:
                self._evaluate(session, "after", trainer.policy_version)
            self._say_values()
            self._say_memory()
            if isinstance(session.user, Asking) and self._accelerator.is_main_process:
                say(f"user {session.user.name}: {session.user.usage.line()}")

    def _trainer(self, session: Session, model: PolicyCritic, log: Log, stack: ExitStack) -> Trainer:
        """All parts put together; what they open is closed with `stack`."""
        from slea_llm.cli import compose
        from slea_llm.collection import OnlineCollector
        from slea_llm.step_values import ValuedCrediting
        from slea_llm.trainer import Parts, Trainer, TrainerOptions

        recipe = self._recipe
        main = bool(self._accelerator.is_main_process)

        def before(iteration: int, policy_version: int) -> None:
            every = recipe.evaluation.every
            if iteration == 0:
                self._evaluate(session, "before", policy_version)
            elif every and iteration % every == 0:
                self._evaluate(session, f"iteration {iteration}", policy_version)

        scorer = compose.scorer(
            recipe,
            chat=session.chat,
            available={"continuations": session.continuations, "chat_models": session.chat_models},
        )
        crediting = compose.crediting(recipe)
        if main:
            _say_gates(scorer, crediting)
        collector = OnlineCollector(
            environment=session.environment,
            rollout=session.rollout,
            scorer=scorer,
            settings=recipe.rollout,
            seed=recipe.run.seed,
            log=log,
            rank=self._rank,
            before=before,
            observers=self._observers(scorer, crediting),
        )
        losses = compose.losses(recipe)
        return Trainer(
            model,
            recipe.trainer,
            recipe.rollout,
            Parts(
                losses=losses,
                collector=collector,
                crediting=ValuedCrediting(crediting, self._values),
                generator=session.generator,
                replay=self._replay(crediting, stack),
                imitation=self._imitation(session),
            ),
            accelerator=self._accelerator,
            options=TrainerOptions(
                output_dir=self._output,
                seed=recipe.run.seed,
                pad_id=session.pad_id,
                numerics="bfloat16" if recipe.trainer.precision == "bf16" else recipe.model.dtype,
                reference=recipe.kl_in_reward > 0 or any(term.reads_reference for term in losses),
                progress=main,
                report=say,
            ),
        )

    def _replay(self, crediting: Crediting, stack: ExitStack) -> ReplayBuffer | None:
        """This rank's buffer under the run folder, if the recipe has one; `stack` closes it."""
        from accelerate.utils import gather_object

        from slea_llm.buffer import ReplayBuffer
        from slea_llm.overrides import Overrides
        from slea_llm.storage import read_scored

        recipe, rank = self._recipe, self._rank
        if not recipe.replay.share:
            return None

        def gather(own: list[Any]) -> list[Any]:
            everyone: list[Any] = gather_object(own)
            return everyone

        def played(name: str) -> ScoredTrajectory | None:
            log = self._output / run_folder.ROLLOUTS / f"rank{rank.index}.jsonl"
            return next((one for one in read_scored(log) if one.trajectory.id == name), None)

        main = bool(self._accelerator.is_main_process)
        path = recipe.replay.overrides

        def by_weights(experience: AugmentedExperience, progress: float) -> float:
            return crediting.weighting.priority(experience.scored, progress)

        buffer = ReplayBuffer(
            recipe.replay,
            self._output / "replay" / f"rank{rank.index}",
            seed=recipe.run.seed,
            rank=rank.index,
            world_size=rank.world_size,
            checkpoints=recipe.trainer.keep_checkpoints,
            priority=by_weights if recipe.replay.priority == "weights" else None,
            overrides=Overrides(Path(path), main=main, gather=gather, report=say) if path else None,
            played=played,
        )
        stack.callback(buffer.close)
        return buffer

    def _imitation(self, session: Session) -> Imitation | None:
        """What the imitation losses of the recipe learn from."""
        from slea_llm.cli import compose

        return compose.imitation(
            self._recipe, chat=session.chat, folder=self._output / "imitation" / f"rank{self._rank.index}",
            rank=self._rank.index, world_size=self._rank.world_size, report=say,
        )  # fmt: skip

    def _observers(self, scorer: Scorer, crediting: Crediting) -> dict[str, Observer]:
        """Learnt evaluators and augmenters that are fitted while the run goes on."""
        from accelerate.utils import gather_object

        from slea_llm.cotraining import Cotraining
        from slea_llm.evaluators.reward_model import RewardModel
        from slea_llm.interfaces import Fittable
        from slea_llm.refitting import Refitting

        def gather(own: list[Any]) -> list[Any]:
            everyone: list[Any] = gather_object(own)
            return everyone

        main, seed = bool(self._accelerator.is_main_process), self._recipe.run.seed
        evaluators, augmenters = self._output / "evaluators", self._output / "augmenters"
        parser = self._recipe.parser.model_dump(mode="json")
        refitted: dict[str, Observer] = {
            one.name: Cotraining(
                one, folder=evaluators / one.name, parser=parser, main=main, gather=gather, seed=seed, report=say
            )
            for one in scorer.evaluators
            if isinstance(one, RewardModel) and one.config.refresh_every
        }
        return refitted | {
            one.name: Refitting(one, folder=augmenters / one.name, main=main, gather=gather, seed=seed, report=say)
            for one in crediting.augmenters
            if isinstance(one, Fittable) and one.refresh_every
        }

    def _say_values(self) -> None:
        """The steps that this run's advantages valued most and least, over all processes."""
        from accelerate.utils import gather_object

        from slea_llm.step_values import StepValues

        everyone = gather_object([self._values.sums])
        if self._accelerator.is_main_process:
            whole = StepValues()
            for sums in everyone:
                whole.merge(sums)
            for line in whole.lines():
                say(line)

    def _say_memory(self) -> None:
        from slea_llm.distributed import AcceleratorReducer
        from slea_llm.metrics_log import peak_memory

        own = peak_memory()
        most = AcceleratorReducer(self._accelerator).max(list(own.values()))
        parts = ", ".join(f"{name} {peak:.2f} GiB" for name, peak in zip(own, most, strict=True) if peak)
        if self._accelerator.is_main_process:
            whose = "" if self._rank.world_size == 1 else " of the largest process"
            say(f"peak memory{whose}: {parts}")

    def _resume(self, trainer: Trainer) -> None:
        from slea_llm import checkpoint

        newest = checkpoint.latest_complete(trainer.checkpoints, report=say)
        if newest is None:
            raise CheckpointError(f"{trainer.checkpoints} holds no whole checkpoint to resume from")
        trainer.resume(newest)

    def _evaluate(self, session: Session, moment: str, policy_version: int) -> EvaluationReport | None:
        """Play the fixed panel, every rank its piece; the first rank says and writes what came of it."""
        from accelerate.utils import gather_object

        from slea_llm.collection import panel_player
        from slea_llm.evaluation import evaluate, panel, record

        settings = self._recipe.evaluation
        if not settings.tasks:
            return None
        tasks: Sequence[Task] = panel(session.environment, settings)

        def gather(played: list[Trajectory]) -> list[Trajectory]:
            everyone: list[Trajectory] = gather_object(played)
            return everyone

        play = panel_player(
            session.panel_rollout,
            rank=self._rank,
            gather=gather,
            policy_version=policy_version,
        )
        report = evaluate(play, tasks)
        if self._accelerator.is_main_process:
            say(f"{moment}: {report.line()}")
            record(self._output / run_folder.EVALUATIONS, report, moment=moment, policy_version=policy_version)
        return report


def _say_gates(scorer: Scorer, crediting: Crediting) -> None:
    """Whether what was learnt may move training: evaluators, then augmenters."""
    from slea_llm.interfaces import Gated

    learnt = [one.gate for one in crediting.augmenters if isinstance(one, Gated)]
    for gate in (*scorer.gates().values(), *learnt):
        say(gate.line)
