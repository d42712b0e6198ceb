"""Fit a learnt augmenter on the dialogues of the run itself; in between, a frozen copy shapes and weighs.

The first copy is the one that the part was made with, if it was made with any.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slea_llm.errors import CheckpointError, SleaError
from slea_llm.interfaces import Fittable, Versioned
from slea_llm.records import decode_scored, encode_scored
from slea_llm.types import ScoredTrajectory

Gather = Callable[[list[ScoredTrajectory]], list[ScoredTrajectory]]


class Refitting:
    """Keeps the newest dialogues of all ranks and fits `part` anew whenever enough of them have come in.

    A fit sees the dialogues of earlier iterations only, so that what is credited now was never learnt from before, and
    the gate judges every copy on dialogues that are new to it. The first rank fits and writes a folder; all ranks load
    the same one. A fit that fails leaves the present copy in place and says so.
    """

    def __init__(
        self,
        part: Fittable,
        *,
        folder: Path,
        main: bool,
        gather: Gather,
        seed: int,
        report: Callable[[str], None],
    ) -> None:
        """`folder` receives one subfolder a fit. `gather` gives on every rank the dialogues of all ranks in order."""
        self._part, self._folder, self._main, self._gather = part, folder, main, gather
        self._seed, self._report = seed, report
        self._known: deque[ScoredTrajectory] = deque(maxlen=part.window)
        self._fresh: list[ScoredTrajectory] = []
        self._waiting = 0
        self._current = ""
        self._pinned: set[str] = set()

    def observe(self, iteration: int, scored: Sequence[ScoredTrajectory]) -> None:
        """Fit when that is due, on what came before; then take in the dialogues of this iteration. All ranks call."""
        if self._waiting >= self._part.refresh_every:
            self._refit(iteration)
        everyone = self._gather([_light(one, self._part.reads) for one in scored if _counts(one)])
        self._waiting += len(everyone)
        if self._main:  # the others wait for what the first rank writes
            self._fresh.extend(everyone)

    def state(self) -> Mapping[str, Any]:
        """JSON values. The copy that a checkpoint names is never removed."""
        self._pinned.add(self._current)
        return {
            "copy": self._current,
            "version": self._version,
            "waiting": self._waiting,
            "known": [encode_scored(one) for one in self._known],
            "fresh": [encode_scored(one) for one in self._fresh],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError when another copy is in force than was, StorageError when its folder is gone."""
        self._known.clear()
        self._known.extend(decode_scored(one) for one in state["known"])
        self._fresh = [decode_scored(one) for one in state["fresh"]]
        self._waiting, self._current = int(state["waiting"]), str(state["copy"])
        self._pinned.add(self._current)
        if self._current:
            self._part.load(self._folder / self._current)
        if (version := state["version"]) != self._version:
            raise CheckpointError(
                f"{self._part.name}: the checkpoint was written with the copy {version}, here is {self._version}; put "
                "the folder that the run started from back, or start a fresh run"
            )

    @property
    def _version(self) -> str:
        return self._part.version if isinstance(self._part, Versioned) else ""

    def _refit(self, iteration: int) -> None:
        name, failed = f"iteration-{iteration}", ""
        if self._main:
            try:
                self._part.fit(list(self._known), self._fresh, seed=self._seed + iteration, folder=self._folder / name)
            except SleaError as error:
                failed = f"{self._part.name}: not fitted, the copy of before goes on: {error}"
                self._report(failed)
                shutil.rmtree(self._folder / name, ignore_errors=True)
            self._known.extend(self._fresh)
            self._fresh = []
        self._waiting = 0
        self._gather([])  # nobody loads before the first rank has written
        if not (self._folder / name).is_dir():
            return
        self._part.load(self._folder / name)
        before, self._current = self._current, name
        if self._main:
            if before and before not in self._pinned:
                shutil.rmtree(self._folder / before, ignore_errors=True)
            self._report(f"fitted before iteration {iteration + 1}: {self._part.gate.line}")


def _counts(scored: ScoredTrajectory) -> bool:
    return not scored.trajectory.failed and bool(scored.trajectory.turns)


def _light(scored: ScoredTrajectory, reads: frozenset[str]) -> ScoredTrajectory:
    """Without tokens, and with those scores alone that the part reads."""
    return dataclasses.replace(
        scored,
        trajectory=dataclasses.replace(scored.trajectory, traces=()),
        scores=tuple(one for one in scored.scores if one.evaluator in reads),
        evaluator_versions={name: one for name, one in scored.evaluator_versions.items() if name in reads},
        shut=(),
    )
