"""Trajectories as a dataset in the layout of the Hugging Face Hub: `data/train-*.parquet` and a card."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slea_llm.errors import MissingDependencyError
from slea_llm.folders import whole_folder
from slea_llm.logs.openai_export import Weighting, messages_of
from slea_llm.types import ScoredStep, ScoredTrajectory, Step

if TYPE_CHECKING:
    import pyarrow as pa

SHARD_BYTES = 400_000_000
"""Characters of rows after which the next file is begun; the Hub advises files below 5 GB and several of them."""
GROUP_BYTES = 16_000_000
"""Characters of rows that are held until they are written as a row group."""

CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

# Agent trajectories with step scores

{rows} trajectories, written by `slea convert`. One row a trajectory:

| column | what it holds |
|---|---|
| `id` | id of the trajectory |
| `environment`, `task` | where it was played, and the task as JSON |
| `termination`, `outcome`, `error` | how it ended; `unknown` and null where the log does not say |
| `messages` | role, content, tool calls and ids in order; `turn` numbers the agent's replies; `weight` is 0 or 1 |
| `steps` | turn, index, kind, label, text and character span of every step |
| `scores` | turn, step, evaluator, version, score or the reason why there is none, rationale |
| `provenance` | where it came from, as JSON |

{weights}
"""


def write_hub_dataset(
    folder: Path, items: Iterable[ScoredTrajectory], weighting: Weighting | None = None, *, overwrite: bool = False
) -> int:
    """Write the dataset, whole or not at all; the number of rows.

    Raises StorageError when the folder exists and may not be replaced or cannot be written, MissingDependencyError
    without pyarrow.
    """
    try:
        import pyarrow.parquet  # noqa: F401 - tried before anything is written
    except ImportError as error:
        raise MissingDependencyError("writing parquet needs pyarrow: pip install pyarrow") from error
    with whole_folder(folder, overwrite=overwrite) as partial:
        data = partial / "data"
        data.mkdir()
        count, shards = _write_shards(data, items, weighting)
        for index, path in enumerate(shards):
            path.rename(data / f"train-{index:05d}-of-{len(shards):05d}.parquet")
        told = (
            "No weights were asked for: `weight` is null."
            if weighting is None
            else f"`weight` is 1 where the mean score of a reply's steps by `{weighting.evaluator}` is at least "
            f"{weighting.threshold:g}."
        )
        (partial / "README.md").write_text(CARD.format(rows=count, weights=told), encoding="utf-8")
    return count


def _write_shards(data: Path, items: Iterable[ScoredTrajectory], weighting: Weighting | None) -> tuple[int, list[Path]]:
    """Rows written, and the files in order; a file for no rows too, so that the columns are there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    shards: list[Path] = []
    writer: Any = None
    count = written = 0
    try:
        for group, size in _groups(items, weighting):
            if writer is None or written + size > SHARD_BYTES:
                if writer is not None:
                    writer.close()
                shards.append(data / f"shard-{len(shards):05d}.parquet")
                writer, written = pq.ParquetWriter(shards[-1], schema, compression="zstd"), 0
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            written += size
            count += len(group)
    finally:
        if writer is not None:
            writer.close()
    return count, shards


def _groups(
    items: Iterable[ScoredTrajectory], weighting: Weighting | None
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Rows in groups of about GROUP_BYTES, with their size; at least one group, maybe empty."""
    held: list[dict[str, Any]] = []
    size = 0
    given = False
    for scored in items:
        row = _row(scored, weighting)
        held.append(row)
        size += sum(len(message["content"] or "") for message in row["messages"]) + len(row["provenance"]) + 200
        if size >= GROUP_BYTES:
            yield held, size
            held, size, given = [], 0, True
    if held or not given:
        yield held, size


def _row(scored: ScoredTrajectory, weighting: Weighting | None) -> dict[str, Any]:
    if weighting is not None and scored.trajectory.turns:
        weighting.check(scored)
    trajectory = scored.trajectory
    return {
        "id": trajectory.id,
        "environment": trajectory.environment,
        "task": json.dumps(trajectory.task, ensure_ascii=False),
        "termination": trajectory.termination,
        "outcome": trajectory.outcome,
        "error": trajectory.error,
        "messages": list(_messages(scored, weighting)),
        "steps": [_step(step) for step in scored.steps],
        "scores": [_score(word) for word in scored.scores],
        "provenance": json.dumps(trajectory.provenance, ensure_ascii=False),
    }


def _messages(scored: ScoredTrajectory, weighting: Weighting | None) -> Iterator[dict[str, Any]]:
    places = iter(_turn_numbers(scored))
    for message in messages_of(scored, weighting, plain=True):
        calls = [
            {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in message.get("tool_calls", ())
        ]
        yield {
            "role": message["role"],
            "content": message["content"],
            "name": message.get("name"),
            "tool_call_id": message.get("tool_call_id"),
            "tool_calls": calls,
            "turn": next(places),
            "weight": message.get("weight"),
        }


def _turn_numbers(scored: ScoredTrajectory) -> Iterator[int | None]:
    """The turn of each message in order; None for what the agent was given."""
    for turn in scored.trajectory.turns:
        yield from (None for _ in turn.context)
        yield turn.index
    yield from (None for _ in scored.trajectory.closing)


def _step(step: Step) -> dict[str, Any]:
    return {
        "turn": step.turn,
        "index": step.index,
        "parent": step.parent,
        "kind": step.kind,
        "label": step.label,
        "text": step.text,
        "start": step.span.start,
        "end": step.span.end,
    }


def _score(word: ScoredStep) -> dict[str, Any]:
    return {
        "turn": word.turn,
        "step": word.step,
        "evaluator": word.evaluator,
        "version": word.version,
        "score": word.score,
        "reason": word.reason,
        "rationale": word.rationale,
    }


def _schema() -> pa.Schema:
    import pyarrow as pa

    def rows(**columns: Any) -> Any:
        return pa.list_(pa.struct(list(columns.items())))

    text, whole, number = pa.string(), pa.int32(), pa.float64()
    call = rows(id=text, name=text, arguments=text)
    return pa.schema(
        [
            ("id", text),
            ("environment", text),
            ("task", text),
            ("termination", text),
            ("outcome", number),
            ("error", text),
            (
                "messages",
                rows(role=text, content=text, name=text, tool_call_id=text, tool_calls=call, turn=whole, weight=whole),
            ),
            (
                "steps",
                rows(turn=whole, index=whole, parent=whole, kind=text, label=text, text=text, start=whole, end=whole),
            ),
            (
                "scores",
                rows(turn=whole, step=whole, evaluator=text, version=text, score=number, reason=text, rationale=text),
            ),
            ("provenance", text),
        ]
    )
