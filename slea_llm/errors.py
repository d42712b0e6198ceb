"""The exception tree. Whatever the library raises on purpose derives from `SleaError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SleaError(Exception):
    """Base of every error this library raises on purpose. Its text names the value, what is allowed and the mend."""


class ConfigError(SleaError):
    """A setting is unknown, out of range, or does not go with another."""


class UnsupportedError(SleaError):
    """A combination that this library refuses, said before any model is loaded."""


class MissingDependencyError(SleaError):
    """An optional package is not installed; the text holds the line that installs it."""


class StorageError(SleaError):
    """A file could not be read or written; nothing already written was lost."""


class CheckpointError(SleaError):
    """A checkpoint is incomplete, unsafe to load, or does not fit this run."""


class ExportError(SleaError):
    """An exported adapter or model is not what was trained."""


class GenerationError(SleaError):
    """The sampler failed, or serves other weights than it should."""


class TemplateError(SleaError):
    """The chat template cannot be used as the run asks."""


class StartupCheckError(SleaError):
    """A start-up or step-0 check did not hold."""


class TrainingError(SleaError):
    """An update cannot be made (a loss or gradient is not finite, nothing to train on); nothing was stepped."""


class EpisodeError(SleaError):
    """One episode broke; it becomes a record with termination `error`."""


class CreditError(SleaError):
    """Rewards, values and sampled tokens of a trajectory do not fit together."""


class EvaluatorError(SleaError):
    """An evaluator cannot be used here; a single step that it cannot score is a reason in the record instead."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest known name, or the empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
