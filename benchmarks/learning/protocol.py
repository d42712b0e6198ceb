"""What is compared, as protocol.yaml says it: arms, studies, the space of tuning, and the jobs that follow."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml
from torch.quasirandom import SobolEngine

from slea_llm.config import Recipe, load_recipe
from slea_llm.errors import nearest

HERE = Path(__file__).resolve().parent
PROTOCOL = HERE / "protocol.yaml"
PLUGINS = HERE / "plugins"
"""Folder of the evaluators that are wrong on purpose; they are found while it is on the path."""
FIRST_REPORTED_SEED = 100
"""Seeds below are for tuning and trials alone; no table of results ever holds one."""

Draw = Mapping[str, float]
"""Knobs of tuning by name, those of `space` in protocol.yaml. Empty: the recipe's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of a comparison: settings over the recipe, and by what trainer they are run."""

    name: str
    about: str
    changes: Mapping[str, Any]
    outcome: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the stream that holds the outcome; `sources` are added to those that it has."""
    losses: Sequence[Mapping[str, Any]] = ()
    """Losses beside those that the settings give."""
    trainer: Literal["slea", "trl"] = "slea"
    tuned_as: str = ""
    """The arm whose tuned values are used; empty: its own."""

    @property
    def tuning(self) -> str:
        return self.tuned_as or self.name

    def with_part(
        self,
        part: str,
        *,
        about: str,
        changes: Mapping[str, Any] = MappingProxyType({}),
        outcome: Mapping[str, Any] = MappingProxyType({}),
        losses: Sequence[Mapping[str, Any]] = (),
    ) -> Arm:
        """This arm with one thing more, and with its own tuned values."""
        return replace(
            self,
            name=f"{self.name}_{part}",
            about=f"{self.name}, and {about}",
            changes={**self.changes, **changes},
            outcome={**self.outcome, **outcome},
            losses=[*self.losses, *losses],
            tuned_as=self.tuning,
        )

    def settings(self, recipe: str, common: Mapping[str, Any]) -> dict[str, Any]:
        """All settings over the recipe, the further losses and the settings of the outcome's stream worked in."""
        found = {**common, **self.changes}
        plain = changed_recipe(recipe, found)
        if self.losses:
            found["losses"] = [*({"name": one.name, **one.options} for one in plain.losses), *self.losses]
        for name, stream in plain.streams.items():
            if "outcome" in stream.sources:
                for key, value in self.outcome.items():
                    found[f"streams.{name}.{key}"] = [*stream.sources, *value] if key == "sources" else value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Where the tuned values of an arm come from."""

    arm: str
    draw: int
    values: Draw
    files: str
    """SHA-256 over the files of the tuning runs that were compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An arm under a seed. `changes` are dotted settings over the recipe, tuned values among them."""

    arm: str
    seed: int
    recipe: str
    changes: Mapping[str, Any]
    iterations: int
    until: int
    """Iterations that are played; where fewer than `iterations`, the schedules are still those of a whole run."""
    trainer: Literal["slea", "trl"] = "slea"
    tuned: Tuned | None = None
    label: str = ""
    """What tells two jobs of an arm and a seed apart: the number of a draw, or how far they go."""

    @property
    def name(self) -> str:
        return "-".join(part for part in (self.arm, self.label, str(self.seed)) if part)

    @property
    def complete(self) -> bool:
        return self.until == self.iterations

    @property
    def whole(self) -> Job:
        """The run that this one is the beginning of; itself where it is whole."""
        return self if self.complete else replace(self, until=self.iterations, label="")

    def settings(self, *, base: str, output: str) -> list[str]:
        """Overrides for `slea`: the arm's, the seed's, and where this run lies."""
        return [*self.warming(base=base, output=output), *overrides({"model.base": base})]

    def warming(self, *, base: str, output: str) -> list[str]:
        """The same for the warm start, which begins with the recipe's own model and writes the base of the run."""
        own = {
            **self.changes,
            "run.seed": self.seed,
            "run.output_dir": output,
            "warm_start.output": base,
            "trainer.iterations": self.iterations,
        }
        return overrides(own)

    def resolved(self) -> Recipe:
        """The recipe as this job runs it, its own base model named. Raises ConfigError with every fault."""
        return _recipe(self.recipe, tuple(self.warming(base="WARM", output="RUN")))

    def digest(self) -> str:
        """Changes with every setting that recipe and arm write down; not with comments, code and its defaults."""
        facts = [_written(self.recipe), dict(self.changes), self.seed, self.trainer, self.iterations, self.until]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def warm_digest(self) -> str:
        """What the warm start and its panel depend on: arms that agree in it share them."""
        recipe = self.resolved().model_dump(mode="json")
        facts = [recipe[name] for name in ("environment", "user", "warm_start", "run", "evaluation")]
        facts += [recipe["model"][name] for name in ("base", "revision", "dtype")]
        rollout = ("max_turns", "max_context_tokens", "max_reply_tokens", "temperature", "thoughts")
        facts += [recipe["rollout"][name] for name in rollout]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The search that every arm gets alike."""

    seeds: tuple[int, ...]
    draws: int
    dialogues: int
    """Dialogues of a tuning run, the first of a run of `of` dialogues."""
    of: int
    space: Mapping[str, Sequence[float]]

    def values(self) -> list[Draw]:
        """The same draws for all arms: the recipe's own values, then a scrambled Sobol sequence over the space."""
        count = self.draws - 1
        places = SobolEngine(len(self.space), scramble=True, seed=0).draw(count).tolist()
        knobs = self.space.items()
        return [
            {},
            *(
                {name: _chosen(name, choices, place) for (name, choices), place in zip(knobs, row, strict=True)}
                for row in places
            ),
        ]


def _chosen(name: str, choices: Sequence[float], place: float) -> float:
    """The value at a place in [0, 1): of a rate between its two bounds, by its logarithm; else one of the choices."""
    if name == "learning_rate":
        low, high = (math.log(bound) for bound in choices)
        return float(f"{math.exp(low + place * (high - low)):.2g}")
    return choices[int(place * len(choices))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """The whole file."""

    window: int
    thresholds: tuple[float, ...]
    reached_share: float
    fall: float
    resamples: int
    confidence: float
    common: Mapping[str, Any]
    arms: Mapping[str, Arm]
    tuning: Tuning
    studies: Mapping[str, Mapping[str, Any]]
    recipe: str

    @classmethod
    def read(cls, path: Path = PROTOCOL) -> Protocol:
        """Raises SystemExit with what is wrong in the file."""
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        arms = {name: Arm(name=name, **row) for name, row in document.pop("arms").items()}
        bases = [known(name, arms, "arm") for name in document.pop("parts_on")]
        for part, row in document.pop("parts").items():
            for name in bases:
                arms[f"{name}_{part}"] = arms[name].with_part(part, **row)
        for arm in arms.values():
            known(arm.tuning, arms, "arm")
        space = document.pop("tuning")
        tuning = Tuning(**{**space, "seeds": tuple(space["seeds"])})
        if wrong := [seed for seed in tuning.seeds if seed >= FIRST_REPORTED_SEED]:
            raise SystemExit(f"{path}: tuning seeds {wrong} are not below {FIRST_REPORTED_SEED}")
        return cls(arms=arms, tuning=tuning, **{**document, "thresholds": tuple(document["thresholds"])})

    def study(self, name: str) -> Study:
        known(name, self.studies, "study")
        row = self.studies[name]
        arms = tuple(self.arm(arm) for arm in row["arms"])
        if wrong := [seed for seed in row["seeds"] if seed < FIRST_REPORTED_SEED]:
            raise SystemExit(f"study {name}: seeds {wrong} are kept for tuning; take {FIRST_REPORTED_SEED} or more")
        return Study(
            name=name,
            recipe=row.get("recipe", self.recipe),
            arms=arms,
            baseline=self.arm(row["baseline"]).name,
            best=self.arm(row["best"]).name if "best" in row else "",
            pairs=tuple((self.arm(one).name, self.arm(other).name) for one, other in row.get("pairs", ())),
            seeds=tuple(row["seeds"]),
            dialogues=row["dialogues"],
            until=row.get("until", row["dialogues"]),
            tuned=row.get("tuned", True),
            protocol=self,
        )

    def arm(self, name: str) -> Arm:
        known(name, self.arms, "arm")
        return self.arms[name]

    def job(self, arm: Arm, seed: int, *, recipe: str, draw: Draw, dialogues: int, until: int) -> Job:
        """The job of an arm with the values of a draw; both counts are dialogues."""
        changes = with_draw(arm.settings(recipe, self.common), draw, recipe=recipe, trainer=arm.trainer)
        episodes = changed_recipe(recipe, changes).rollout.episodes
        if dialogues % episodes or until % episodes:
            raise SystemExit(f"{episodes} dialogues an iteration divide {dialogues} or {until} dialogues with a rest")
        return Job(
            arm=arm.name,
            seed=seed,
            recipe=recipe,
            changes=changes,
            iterations=dialogues // episodes,
            until=until // episodes,
            trainer=arm.trainer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One row of `studies`."""

    name: str
    recipe: str
    arms: tuple[Arm, ...]
    baseline: str
    best: str
    """The arm that is set beside the articles' figures, named before the runs; empty: none."""
    pairs: tuple[tuple[str, str], ...]
    """Further arms that are set against each other, the first less or over the second."""
    seeds: tuple[int, ...]
    dialogues: int
    until: int
    """Dialogues of each run that are compared; below `dialogues`: the first of a run of that length, without panels."""
    tuned: bool
    """False: the recipe's own values, where they are of another model than the search was made with."""
    protocol: Protocol = field(repr=False)

    @property
    def folder(self) -> str:
        """Name of the folder of its results: studies of one recipe and length share their runs."""
        return f"{Path(self.recipe).stem}-{self.dialogues}"


def overrides(changes: Mapping[str, Any]) -> list[str]:
    """Settings as the command line takes them."""
    return [f"{name}={json.dumps(value)}" for name, value in changes.items()]


def changed_recipe(recipe: str, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with settings over it. Raises ConfigError with every fault."""
    return _recipe(recipe, tuple(overrides(changes)))


@lru_cache(maxsize=8)
def _written(path: str) -> Any:
    """The recipe file as it stands, nothing resolved. Read once: hundreds of kept runs are held against it."""
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))


@lru_cache(maxsize=512)
def _recipe(path: str, settings: tuple[str, ...]) -> Recipe:
    """Read once: many jobs ask for the same one."""
    return load_recipe(path, settings)


def known(name: str, names: Mapping[str, Any], what: str) -> str:
    """The name. Raises SystemExit, with the nearest one, when the protocol does not have it."""
    if name not in names:
        raise SystemExit(f"unknown {what} {name!r}; one of {', '.join(names)}{nearest(name, names)}")
    return name


def with_draw(changes: Mapping[str, Any], draw: Draw, *, recipe: str, trainer: str) -> dict[str, Any]:
    """The settings of an arm with the values of a draw.

    A knob that an arm does not have is left out: credit relative to a group has no lambda, GRPOTrainer no bonus for
    entropy.
    """
    if not draw:
        return dict(changes)
    plain = changed_recipe(recipe, changes)
    episodes = int(draw["episodes"])
    found: dict[str, Any] = {
        **changes,
        "trainer.learning_rate": draw["learning_rate"],
        "rollout.episodes": episodes,
        "trainer.minibatch": int(draw["minibatch"]),
    }
    if draw["entropy"] and trainer == "slea":
        losses = [{"name": one.name, **one.options} for one in plain.losses]
        found["losses"] = [*losses, {"name": "entropy", "weight": draw["entropy"]}]
    if plain.credit.name != "group_relative":
        for name, stream in plain.streams.items():
            if "outcome" in stream.sources:
                found[f"streams.{name}.lam_turn"] = draw["lam_turn"]
    return found
