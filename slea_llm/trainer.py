"""The training loop: collect, stats, credit, update, sync. It receives built parts and knows no algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from slea_llm import checkpoint, run_folder, startup_checks
from slea_llm.batching import blank, collate, microbatches
from slea_llm.distributed import AcceleratorReducer
from slea_llm.errors import CheckpointError, ConfigError, GenerationError, TrainingError
from slea_llm.health import Health
from slea_llm.metrics_log import MetricsLog, PhaseClock, asking_metrics, episode_metrics, peak_memory, update_metrics
from slea_llm.mixing import Mixing
from slea_llm.models.stats import sampler_stats, token_stats
from slea_llm.progress import Progress
from slea_llm.startup_checks import Numerics, Tolerances
from slea_llm.updates import Updater, UpdateReport, deal, to_device

if TYPE_CHECKING:
    from accelerate import Accelerator

    from slea_llm.interfaces import Generator, Imitator, LossTerm, Reducer, Replay
    from slea_llm.models.policy import PolicyCritic
    from slea_llm.questions import Usage
    from slea_llm.settings import RolloutSettings, StreamSettings, TrainerSettings
    from slea_llm.tensors import Batch
    from slea_llm.types import AugmentedExperience, ScoredTrajectory, TokenStats


class Collector(Protocol):
    """Where scored dialogues come from: fresh rollouts, a buffer, or a recording."""

    def collect(self, *, iteration: int, policy_version: int) -> Sequence[ScoredTrajectory]:
        """This rank's dialogues of an iteration, failed ones included; ranks hold consecutive pieces."""
        ...

    def state(self) -> Mapping[str, Any]:
        """This rank's position in the data and in its logs, as JSON values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position; what this rank logged after it will be made again, and is cut off."""
        ...


@runtime_checkable
class Spending(Protocol):
    """A collector whose dialogues are scored by chat models that cost something."""

    def spent(self) -> Mapping[str, Usage]:
        """What they have cost this rank since it was last asked, by component: the same components on every rank."""
        ...


class Crediter(Protocol):
    """Scores and values to credit; `slea_llm.crediting.Crediting` is one."""

    streams: dict[str, StreamSettings]
    heads: tuple[str, ...]

    def credit(
        self, scored: Sequence[ScoredTrajectory], stats: Sequence[TokenStats], *, progress: float, reducer: Reducer
    ) -> tuple[AugmentedExperience, ...]: ...

    def summary(
        self, scored: Sequence[ScoredTrajectory], experiences: Sequence[AugmentedExperience], *, reducer: Reducer
    ) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop calls, built by whoever puts a run together."""

    losses: Sequence[LossTerm]
    collector: Collector
    crediting: Crediter
    generator: Generator
    replay: Replay | None = None
    imitation: Imitator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """What is neither a setting of the recipe nor a part.

    `numerics`: the coarsest type of sampler and trainer. `reference`: whether credit or a loss reads the reference's
    log-probabilities; if not, only the check before the first update makes that pass, and they are NaN afterwards.
    """

    output_dir: Path
    seed: int
    pad_id: int
    numerics: Numerics = "float32"
    reference: bool = True
    progress: bool = False
    report: Callable[[str], None] = field(default=lambda _line: None)


class Trainer:
    """Trains policy and critic for `settings.iterations` rounds.

    An iteration makes `epochs * episodes / minibatch` optimizer updates on every rank, however many turns, steps or
    failed dialogues there were. After `run`, `resume` and `save` all ranks hold the same weights and counters:
    `iteration` (rounds done), `update` (optimizer updates done) and `policy_version`.
    """

    def __init__(
        self,
        model: PolicyCritic,
        settings: TrainerSettings,
        rollout: RolloutSettings,
        parts: Parts,
        *,
        accelerator: Accelerator,
        options: TrainerOptions,
    ) -> None:
        if rollout.episodes % settings.minibatch:
            raise ConfigError(f"minibatch {settings.minibatch} does not divide the {rollout.episodes} episodes")
        if accelerator.gradient_accumulation_steps != 1:
            raise ConfigError(
                f"the launch config sets gradient_accumulation_steps {accelerator.gradient_accumulation_steps}; "
                "set it to 1: trainer.microbatch says how an update is cut"
            )
        self.iteration = self.update = self.policy_version = 0
        self._model, self._settings, self._rollout = model, settings, rollout
        self._parts, self._options, self._accelerator = parts, options, accelerator
        self._mixing = Mixing(parts.replay, parts.imitation)
        self._reducer = AcceleratorReducer(accelerator)
        self._minibatches = rollout.episodes // settings.minibatch
        self._updater = Updater(
            model,
            parts.losses,
            settings=settings,
            total_updates=settings.iterations * settings.epochs * self._minibatches,
            accelerator=accelerator,
            reducer=self._reducer,
        )
        self._dtype = torch.float64 if self._updater.groups["policy"][0].dtype == torch.float64 else torch.float32
        self._tolerances = Tolerances.of(options.numerics)
        self._clock = PhaseClock()
        self._log = MetricsLog(options.output_dir / run_folder.METRICS)
        self._metrics: dict[str, float] = {}
        self._health = Health(parts.crediting.streams)
        self._started = False
        self._unchecked = True

    @property
    def checkpoints(self) -> Path:
        """Folder of this run's checkpoints."""
        return self._options.output_dir / run_folder.CHECKPOINTS

    def run(self, *, until: int | None = None) -> None:
        """Go on to the end, or until `until` iterations are done.

        Raises StartupCheckError when a check before or in the first iteration does not hold, and TrainingError when too
        many dialogues failed or an update cannot be made.
        """
        last = self._settings.iterations if until is None else min(until, self._settings.iterations)
        self._start()
        with closing(self._progress()) as progress:
            while self.iteration < last:
                scored = self._collect()
                stats = self._stats(scored)
                experiences = self._credit(scored, stats)
                stepped = self._update(experiences)
                self._sync(stepped)
                progress.advance(*self._record())
                self._save_when_due()

    def _start(self) -> None:
        """Say what will be done, and bring the sampler to the trainer's version."""
        if self._started:
            return
        self._started = True
        if self._settings.trackers:
            # Numbers of the trainer alone: nothing in them can be a secret.
            config = {key: value for key, value in asdict(self._settings).items() if key != "trackers"}
            self._accelerator.init_trackers("slea_llm", config=config)
        world_size = self._reducer.world_size
        self._report(startup_checks.arithmetic_line(self._rollout, self._settings, world_size=world_size))
        self._report(startup_checks.check_equal_updates(self._settings.epochs * self._minibatches, self._reducer))
        # A sampler starts with the bare base; a policy that starts from an adapter is not that.
        if self._parts.generator.policy_version != self.policy_version or self._model.settings.adapter is not None:
            self._load_sampler()

    def _moment(self) -> Mapping[str, Any]:
        progress = self.iteration / self._settings.iterations
        return {"iteration": self.iteration, "progress": progress, "reducer": self._reducer}

    def _collect(self) -> Sequence[ScoredTrajectory]:
        """This rank's dialogues that can be trained on, replayed ones last; too many failures stop the run."""
        with self._clock.phase("collect"):
            collected = self._parts.collector.collect(iteration=self.iteration, policy_version=self.policy_version)
        trajectories = [one.trajectory for one in collected]
        if isinstance(self._parts.collector, Spending):
            self._metrics |= asking_metrics(self._parts.collector.spent(), reducer=self._reducer)
        self._metrics |= episode_metrics(trajectories, policy_version=self.policy_version, reducer=self._reducer)
        failed = self._metrics["episodes/failed"]
        played, excluded = self._metrics["episodes/played"], self._metrics["episodes/excluded"]
        total = failed + played + excluded
        if not failed and not played:
            raise TrainingError(
                f"all {total:.0f} dialogues of iteration {self.iteration} are excluded by the referee: they say "
                "nothing about the agent (`slea referee` on the log shows why)"
            )
        if failed / total > self._rollout.max_error_rate:
            reasons = [one.error for one in trajectories if one.failed]
            raise TrainingError(
                f"{failed:.0f} of {total:.0f} dialogues of iteration {self.iteration} failed, more than the share "
                f"{self._rollout.max_error_rate:g} that is allowed; {reasons[0] if reasons else 'none on this rank'}"
            )
        kept = [one for one in collected if not one.trajectory.failed and not one.trajectory.excluded]
        scored = [one for one in kept if one.trajectory.sampled_tokens]
        if self._unchecked:
            self._report(startup_checks.check_trainable_tokens(scored, self._reducer))
            self._report(startup_checks.steps_line(scored, self._reducer))
        with self._clock.phase("collect"):
            mixed, metrics = self._mixing.mix(scored, policy_version=self.policy_version, **self._moment())
        self._metrics |= metrics
        return mixed

    def _stats(self, scored: Sequence[ScoredTrajectory]) -> list[TokenStats]:
        """What the models say today of each dialogue, in order."""
        if self._settings.proximal == "sampler" and not self._unchecked:
            trajectories = [one.trajectory for one in scored]
            heads = self._parts.crediting.heads
            return sampler_stats(trajectories, streams=heads, critic_version=self.update)
        first_check = self._unchecked and self.policy_version == 0
        # The same autocast as in the updates, which accelerate wraps around `forward` alone.
        with self._clock.phase("stats"), self._accelerator.autocast():
            stats = token_stats(
                self._model,
                [one.trajectory for one in scored],
                microbatch=self._settings.microbatch,
                policy_version=self.policy_version,
                critic_version=self.update,
                pad_id=self._options.pad_id,
                reference=self._options.reference or first_check,
            )
        gap = startup_checks.sampler_gap(scored, stats, self._reducer)
        self._metrics |= {"sampler/gap_mean": gap.mean, "sampler/gap_max": gap.peak} if gap.tokens else {}
        if self._unchecked:
            self._report(startup_checks.check_sampler(gap, self._tolerances))
        if first_check:
            self._report(startup_checks.check_reference(stats, self._tolerances, self._reducer))
        return stats

    def _credit(self, scored: Sequence[ScoredTrajectory], stats: Sequence[TokenStats]) -> Sequence[AugmentedExperience]:
        progress = self.iteration / self._settings.iterations
        with self._clock.phase("credit"):
            experiences = self._parts.crediting.credit(scored, stats, progress=progress, reducer=self._reducer)
            self._metrics |= self._parts.crediting.summary(scored, experiences, reducer=self._reducer)
            mixed, metrics = self._mixing.credited(experiences, **self._moment())
        self._metrics |= metrics
        return mixed

    def _update(self, experiences: Sequence[AugmentedExperience]) -> bool:
        """All updates of an iteration, as many on every rank. True when the policy was stepped in any."""
        reports: list[UpdateReport] = []
        train_policy = self.iteration >= self._settings.critic_warmup_iterations
        with self._clock.phase("update"):
            plan = self._plan(experiences)
            if self._unchecked:
                self._report(self._check_gradients(plan[0][0]))
            for batches in plan:
                report = self._updater.run([self._collate(rows) for rows in batches], train_policy=train_policy)
                if self._unchecked:
                    line = startup_checks.check_first_update(report.kl, report.max_log_ratio, self._tolerances)
                    self._report(line)
                    self._unchecked = False
                train_policy = report.policy_stepped
                self.update += 1
                reports.append(report)
        self._metrics |= update_metrics(reports)
        return any(report.policy_stepped for report in reports)

    def _plan(self, experiences: Sequence[AugmentedExperience]) -> list[list[list[AugmentedExperience]]]:
        """Micro-batches by update; empty ones make up the number when another rank has more."""
        world_size, rank = self._reducer.world_size, int(self._accelerator.process_index)
        counts = self._reducer.sum([float(len(experiences)) if one == rank else 0.0 for one in range(world_size)])
        total, offset = int(sum(counts)), int(sum(counts[:rank]))
        if total < self._minibatches:
            broke = f"{self._metrics.get('episodes/failed', 0):.0f} of this iteration broke"
            raise TrainingError(f"{total} dialogues are left for {self._minibatches} minibatches; {broke}")
        plan: list[list[list[AugmentedExperience]]] = []
        for epoch in range(self._settings.epochs):
            dealt = deal(total, self._minibatches, seed=(self._options.seed, self.iteration, epoch))
            own = dealt[offset : offset + len(experiences)]
            for minibatch in range(self._minibatches):
                mine = [one for one, part in zip(experiences, own, strict=True) if part == minibatch]
                plan.append(microbatches(mine, trajectories=self._settings.microbatch))
        most = self._reducer.max([float(len(batches)) for batches in plan])
        return [batches + [[]] * (int(count) - len(batches)) for batches, count in zip(plan, most, strict=True)]

    def _collate(self, rows: Sequence[AugmentedExperience]) -> Batch:
        heads = self._parts.crediting.heads
        if not rows:
            return blank(streams=len(heads), pad_id=self._options.pad_id, dtype=self._dtype)
        return collate(rows, streams=heads, pad_id=self._options.pad_id, dtype=self._dtype)

    def _check_gradients(self, rows: Sequence[AugmentedExperience]) -> str:
        batch = to_device(self._collate(rows), self._accelerator.device)
        return startup_checks.check_gradients(self._model, self._parts.losses, batch, self._reducer)

    def _sync(self, stepped: bool) -> None:
        """Hand new weights to the sampler. An iteration that left the policy alone makes no new version."""
        self.iteration += 1
        if stepped:
            self.policy_version += 1
            self._load_sampler()

    def _load_sampler(self) -> None:
        with self._clock.phase("sync"):
            self._parts.generator.load(self._model, self.policy_version)
        served = self._parts.generator.policy_version
        if served != self.policy_version:
            raise GenerationError(
                f"the sampler serves policy version {served}, the trainer is at {self.policy_version}"
            )

    def _record(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """One line of metrics, the same on every rank and written by the first; seconds and peaks are its own."""
        metrics, self._metrics = self._metrics, {}
        seconds, peak = self._clock.reset(), peak_memory()
        alarms = self._health.observe(metrics)
        for alarm in alarms:
            if alarm.first:
                self._report(alarm.line())
        counters = {"iteration": self.iteration, "update": self.update, "policy_version": self.policy_version}
        if self._settings.trackers:
            told = {f"seconds/{name}": value for name, value in seconds.items()}
            told |= {f"peak_gib/{name}": value for name, value in peak.items()}
            self._accelerator.log({**counters, **metrics, **told}, step=self.iteration)
        if self._accelerator.is_main_process:
            own = {"seconds": seconds, "cpu_seconds": self._clock.cpu_seconds(), "peak_gib": peak}
            self._log.append({**counters, "metrics": metrics, **own, "alarms": [alarm.name for alarm in alarms]})
        return metrics, seconds

    def _save_when_due(self) -> None:
        every, done = self._settings.save_every, self.iteration == self._settings.iterations
        if done or (every and self.iteration % every == 0):
            self.save()

    def save(self) -> Path:
        """Write a checkpoint (the first rank does, the others wait) and remove older ones once it is whole.

        Raises StorageError when it cannot be written; what was there before is untouched.
        """
        with self._clock.phase("save"):
            own = {"rng": checkpoint.rng_state(), "collector": dict(self._parts.collector.state())}
            own |= self._mixing.state()
            ranks = gather_object([own])
            target = self.checkpoints / f"step-{self.iteration}"
            if self._accelerator.is_main_process:
                checkpoint.write(self.checkpoints, self.iteration, self._snapshot(ranks))
                checkpoint.prune(self.checkpoints, newest=self.iteration, keep=self._settings.keep_checkpoints)
            self._accelerator.wait_for_everyone()
        return target

    def _snapshot(self, ranks: Sequence[Mapping[str, Any]]) -> checkpoint.Snapshot:
        weights: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self._model.trainable_state().items():
            weights.setdefault(name.partition(".")[0], {})[name] = tensor
        optimizer = checkpoint.optimizer_snapshot(self._updater.optimizer, self._named())
        state = {
            "iteration": self.iteration,
            "update": self.update,
            "policy_version": self.policy_version,
            "schedule": self._updater.scheduler.state_dict(),
            "metrics_position": self._log.position,
            "recipe": self._recipe(),
            "losses": self._updater.state(),
            "health": self._health.state(),
        }
        documents = {**optimizer.documents, "trainer": state, "ranks": list(ranks)}
        return checkpoint.Snapshot(tensors={**optimizer.tensors, **weights}, documents=documents)

    def resume(self, folder: Path) -> None:
        """Go back to a checkpoint: weights, optimizer, schedule, random states, data position, versions and metrics.

        Raises CheckpointError when the folder is not whole, holds a pickle, lacks a weight, or was written under other
        settings or by another number of processes.
        """
        snapshot = checkpoint.read(folder)
        state, ranks = snapshot.documents["trainer"], snapshot.documents["ranks"]
        self._check_recipe(state["recipe"], folder)
        if len(ranks) != self._reducer.world_size:
            raise CheckpointError(
                f"{folder} was written by {len(ranks)} process(es), this run has {self._reducer.world_size}; "
                "start as many"
            )
        weights = {key: value for key, value in snapshot.tensors.items() if key != "optimizer"}
        self._model.load_trainable_state({name: one for part in weights.values() for name, one in part.items()})
        checkpoint.restore_optimizer(self._updater.optimizer, self._named(), snapshot)
        self._updater.scheduler.load_state_dict(state["schedule"])
        self._updater.restore(state.get("losses", {}))
        if "health" in state:  # a checkpoint of an earlier version has none, and nothing but alarms is lost
            self._health.restore(state["health"])
        own = ranks[int(self._accelerator.process_index)]
        self._mixing.restore(own)
        self._parts.collector.restore(own["collector"])
        self.iteration, self.update = state["iteration"], state["update"]
        self.policy_version = state["policy_version"]
        if self._accelerator.is_main_process:
            self._log.rewind(state["metrics_position"])
        self._accelerator.wait_for_everyone()
        checkpoint.restore_rng(own["rng"])
        self._report(f"resumed from {folder.name}: iteration {self.iteration}, policy version {self.policy_version}")

    def _recipe(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be resumed; how often to save and how to cut an update may change."""
        free = {"iterations", "microbatch", "save_every", "keep_checkpoints", "trackers"}
        free |= {"concurrency", "deadline_s", "max_error_rate", "scoring_ahead"}
        settings = {**asdict(self._rollout), **asdict(self._settings), "seed": self._options.seed}
        return {key: value for key, value in settings.items() if key not in free}

    def _check_recipe(self, stored: Mapping[str, Any], folder: Path) -> None:
        own = self._recipe()
        odd = [
            f"{key}: {stored.get(key)!r} there, {own.get(key)!r} here"
            for key in sorted(stored.keys() | own.keys())
            if stored.get(key) != own.get(key)
        ]
        if odd:
            raise CheckpointError(f"{folder} was written under other settings ({'; '.join(odd)}); start a fresh run")

    def _named(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [*self._model.policy_parameters(), *self._model.critic_parameters()]

    def _progress(self) -> Progress:
        return Progress(
            total=self._settings.iterations,
            done=self.iteration,
            episodes=self._rollout.episodes,
            shown=self._options.progress and bool(self._accelerator.is_main_process),
            report=self._report,
        )

    def _report(self, line: str) -> None:
        if self._accelerator.is_main_process:
            with tqdm.external_write_mode():  # a bar on the screen steps aside
                self._options.report(line)
