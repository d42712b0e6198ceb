"""Which task comes next: a seeded permutation an epoch, resumed from nothing but a position."""

from __future__ import annotations

import random
from dataclasses import dataclass

from slea_llm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder:
    """An endless order over `tasks` tasks: each epoch is another permutation, the same at every replay.

    It holds no state: `take(position, count)` is a pure function, so a resumed run that knows how many tasks were taken
    goes on exactly where it stopped.
    """

    tasks: int
    seed: int

    def __post_init__(self) -> None:
        if self.tasks < 1:
            raise ConfigError(f"an order over {self.tasks} tasks is empty; give at least 1")

    def epoch(self, number: int) -> list[int]:
        """The permutation of epoch `number`, counted from 0."""
        order = list(range(self.tasks))
        random.Random(f"task order {self.seed} {number}").shuffle(order)  # noqa: S311 - reproducible on purpose
        return order

    def take(self, position: int, count: int) -> tuple[int, ...]:
        """The tasks at `position` to `position + count - 1` of the endless order."""
        if position < 0 or count < 0:
            raise ConfigError(f"position {position} and count {count} must not be negative")
        taken: list[int] = []
        epoch, offset = divmod(position, self.tasks)
        while len(taken) < count:
            taken += self.epoch(epoch)[offset : offset + count - len(taken)]
            epoch, offset = epoch + 1, 0
        return tuple(taken)
