"""Refit a learnt evaluator on the dialogues of the run itself; in between, a frozen copy scores."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slea_llm.encoders import CachingEncoder, load_encoder
from slea_llm.errors import ConfigError, SleaError
from slea_llm.evaluators.reward_model import RewardModel
from slea_llm.fitting.evaluator import FitSettings, fit_evaluator
from slea_llm.fitting.labels import examples, outcome_labels
from slea_llm.records import decode_scored, encode_scored
from slea_llm.types import ScoredTrajectory

MINIMUM = 64
"""Dialogues, half of them successes, below which nothing is refitted."""

Gather = Callable[[list[Any]], list[Any]]
"""This rank's items to those of all ranks, in rank order, on every rank; all ranks call it."""


class Cotraining:
    """Keeps the newest finished dialogues and refits `model` on as many successes as failures among them.

    Every rank observes its own dialogues; when a refit is due the first rank fits on those of all ranks and writes the
    folder, and all ranks load the same one. The gate judges every refit anew by its held-out groups, so it can shut
    again. A refit that fails or lacks dialogues leaves the present copy in place and says so.
    """

    def __init__(
        self,
        model: RewardModel,
        *,
        folder: Path,
        parser: Mapping[str, Any],
        main: bool,
        gather: Gather,
        seed: int,
        report: Callable[[str], None],
        settings: FitSettings | None = None,
    ) -> None:
        """`folder`, which all ranks see, receives one subfolder a refit; `parser`, as in a recipe, cuts the steps."""
        if model.config.refresh_every < 1:
            raise ConfigError(f"refresh_every {model.config.refresh_every} of {model.name} must be 1 or more to refit")
        self._model, self._folder, self._main, self._gather = model, folder, main, gather
        self._parser, self._seed, self._report = parser, seed, report
        self._settings = settings or FitSettings(folds=3, members=1)
        self._window: deque[tuple[int, ScoredTrajectory]] = deque(maxlen=model.config.window)
        self._current = ""

    def observe(self, iteration: int, scored: Sequence[ScoredTrajectory]) -> None:
        """Take in the dialogues of an iteration (0 is the first), and refit when that is due. All ranks call it."""
        self._window.extend((iteration, _light(one)) for one in scored if outcome_labels(one.trajectory, one.steps))
        if (iteration + 1) % self._model.config.refresh_every == 0:
            self._refit(iteration + 1)

    def state(self) -> Mapping[str, Any]:
        return {
            "model": self._current,
            "iterations": [iteration for iteration, _ in self._window],
            "window": [encode_scored(one) for _, one in self._window],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._window.clear()
        self._window.extend(zip(state["iterations"], map(decode_scored, state["window"]), strict=True))
        self._current = state["model"]
        if self._current:
            self._model.load(self._folder / self._current)

    def _refit(self, iteration: int) -> None:
        # In the order in which one process would have played them, so that the newest are those of all ranks alike.
        gathered: list[tuple[int, ScoredTrajectory]] = self._gather(list(self._window))
        gathered.sort(key=lambda item: item[0])
        everyone = [one for _, one in gathered[-self._model.config.window :]]
        chosen = balanced(everyone, self._model.config.window)
        name = f"iteration-{iteration}"
        if len(chosen) < MINIMUM:
            good = sum(one.trajectory.success for one in everyone)
            self._say(
                f"{self._model.name}: not refitted after iteration {iteration}: {good} successes and "
                f"{len(everyone) - good} failures are at hand, {MINIMUM // 2} of each are needed"
            )
            return
        # Nobody loads before the first rank has written, and nothing that an earlier run left under that name.
        written = self._gather([name] if self._main and self._fit(chosen, name) else [])
        if not written:
            return
        self._model.load(self._folder / name)
        self._current = name
        self._say(f"refitted on {len(chosen)} dialogues after iteration {iteration}: {self._model.gate.line}")

    def _fit(self, chosen: Sequence[ScoredTrajectory], name: str) -> bool:
        """Whether a new folder was written."""
        encoder = CachingEncoder(load_encoder(self._model.config.encoder), size=self._model.config.cache)
        labels = [label for one in chosen for label in outcome_labels(one.trajectory, one.steps)]
        try:
            rows = examples([(one.trajectory, one.steps) for one in chosen], labels, encoder, "apart")
            fitted = fit_evaluator(
                rows, labels, encoder=encoder.name, encoding="apart", settings=self._settings, seed=self._seed
            )
            written = dataclasses.replace(fitted, card=fitted.card.cut_by(self._parser))
            written.save(self._folder / name, overwrite=True)
        except SleaError as error:
            self._say(f"{self._model.name}: not refitted, the copy of before goes on scoring: {error}")
            return False
        return True

    def _say(self, line: str) -> None:
        if self._main:
            self._report(line)


def balanced(scored: Sequence[ScoredTrajectory], most: int) -> list[ScoredTrajectory]:
    """The newest (last) dialogues, as many successes as failures and at most `most` in all, in their order."""
    places: dict[bool, list[int]] = {True: [], False: []}
    for place, one in enumerate(scored):
        places[one.trajectory.success].append(place)
    count = min(len(places[True]), len(places[False]), most // 2)
    kept = sorted(place for group in places.values() for place in group[len(group) - count :])
    return [scored[place] for place in kept]


def _light(scored: ScoredTrajectory) -> ScoredTrajectory:
    """Without tokens and scores, which no refit reads."""
    return dataclasses.replace(
        scored,
        trajectory=dataclasses.replace(scored.trajectory, traces=()),
        scores=(),
        evaluator_versions={},
        shut=(),
    )
