"""What lies where in the output folder of a training run."""

from __future__ import annotations

from typing import Final

RECIPE: Final = "recipe.yaml"
"""The recipe as it was resolved."""
METRICS: Final = "metrics.jsonl"
"""A line an iteration."""
EVALUATIONS: Final = "evaluation.jsonl"
"""A line for every panel that was played."""
ROLLOUTS: Final = "rollouts"
"""Folder of the scored dialogues, one log a rank."""
CHECKPOINTS: Final = "checkpoints"
LOGS: Final = "logs"
"""Folder for what other libraries print."""
