"""Search trees of ToolBench: `{win, tree, answer_generation}`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from slea_llm.logs.chat import add_message
from slea_llm.logs.facts import facts_of
from slea_llm.logs.fields import (
    arguments_text,
    first_text,
    mapping,
    name_text,
    optional_list,
    optional_mapping,
    optional_text,
    result_text,
    shown,
    truth,
)
from slea_llm.logs.formats import JsonFormat, LogRecord, RecordError
from slea_llm.logs.transcript import Transcript
from slea_llm.types import ToolCall, Trajectory

Node = Mapping[str, Any]
DEEPEST = 500
"""Nodes from the root to a leaf; a deeper tree is refused."""


class ToolBench(JsonFormat):
    """One tree a record. The dialogue is the path of the answer, else the last path that was tried.

    The other paths are in `provenance.branches`, each as its nodes and whether it was pruned.
    """

    name: ClassVar[str] = "toolbench"

    def recognises(self, value: Any) -> bool:
        return isinstance(value, dict) and "answer_generation" in value and isinstance(value.get("tree"), dict)

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        value = record.value
        answer = mapping(value.get("answer_generation"), "answer_generation")
        root = mapping(mapping(value.get("tree"), "tree").get("tree"), "tree.tree")
        paths = list(_paths(root))
        if not paths:
            raise RecordError("its tree has no node below the root")
        chosen = next((path for path in paths if _is_answer(path[-1])), paths[-1])
        transcript = Transcript(record.flags)
        self._opening(transcript, answer)
        self._path(transcript, chosen)
        branches = [_branch(path) for path in paths if path is not chosen]
        query = optional_text(answer.get("query"))
        facts = facts_of(
            value,
            ("tree", "answer_generation", "compare_candidates", "win"),
            transcript.flags,
            task={"query": query} if query else {},
            success=truth(value.get("win")),
            more={
                "branches": branches,
                "finish_type": answer.get("finish_type"),
                "final_answer": answer.get("final_answer"),
            },
        )
        yield transcript.trajectory(record, self.name, facts)

    def _opening(self, transcript: Transcript, answer: Mapping[str, Any]) -> None:
        """The messages before the first reply; where they are not kept, the query."""
        rows = optional_list(answer.get("train_messages"))
        first = optional_list(rows[0]) if rows else ()
        for index, message in enumerate(first):
            one = optional_mapping(message)
            if one.get("role") == "assistant":
                break
            add_message(transcript, mapping(message, f"train_messages[0][{index}]"), f"train_messages[0][{index}]")
        if not first and (query := first_text(answer, "query")):
            transcript.say("user", query)

    def _path(self, transcript: Transcript, path: Sequence[Node]) -> None:
        action = ""
        for index, node in enumerate(path):
            what, kind = f"node {index}", node.get("node_type")
            text = result_text(node.get("description"), f"{what}.description", transcript.flags)
            if kind == "Thought":
                transcript.close()
                transcript.add(("thought", text))
            elif kind == "Action":
                action = text
            elif kind == "Action Input":
                transcript.add(("call", ToolCall(id="", name=action or "action", arguments=arguments_text(text))))
            else:
                raise RecordError(f"{what} is of type {shown(kind)}, which is not known")
            if "observation" in node:
                observed = result_text(node.get("observation"), f"{what}.observation", transcript.flags)
                transcript.say("tool", observed, name=action or None)


def _paths(root: Node) -> Iterator[list[Node]]:
    """Every path from below the root to a leaf, in the order they were tried. Raises RecordError when too deep."""
    waiting: list[tuple[Node, list[Node]]] = [(child, []) for child in reversed(_children(root))]
    while waiting:
        node, before = waiting.pop()
        path = [*before, node]
        if len(path) > DEEPEST:
            raise RecordError(f"its tree is deeper than {DEEPEST} nodes")
        children = _children(node)
        if not children:
            yield path
        waiting += [(child, path) for child in reversed(children)]


def _children(node: Node) -> list[Node]:
    return [mapping(child, "child") for child in optional_list(node.get("children"))]


def _is_answer(leaf: Node) -> bool:
    return bool(leaf.get("is_terminal") or leaf.get("finished")) and not leaf.get("pruned")


def _branch(path: Sequence[Node]) -> dict[str, Any]:
    return {
        "pruned": bool(path[-1].get("pruned")),
        "nodes": [[name_text(node.get("node_type")), optional_text(node.get("description")) or ""] for node in path],
    }
