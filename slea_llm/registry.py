"""Name -> component, imported only when asked for. Third parties add rows by entry points `slea_llm.<kind>`."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from slea_llm.errors import ConfigError, nearest

ROWS: MappingProxyType[str, MappingProxyType[str, str]] = MappingProxyType(
    {
        "environment": MappingProxyType({"order_taking": "slea_llm.environments.order_taking:OrderTaking"}),
        "user": MappingProxyType({"scripted": "slea_llm.users.scripted:ScriptedUser"}),
        "parser": MappingProxyType(
            {
                "tagged": "slea_llm.parsers.tagged:TaggedParser",
                "markers": "slea_llm.parsers.markers:MarkersParser",
                "react": "slea_llm.parsers.react:ReactParser",
                "reply": "slea_llm.parsers.reply:ReplyParser",
                "auto": "slea_llm.parsers.auto:AutoParser",
                "llm": "slea_llm.parsers.llm:LlmParser",
            }
        ),
        "evaluator": MappingProxyType(
            {
                "knowledge_base": "slea_llm.evaluators.knowledge_base:KnowledgeBase",
                "return_decomposition": "slea_llm.evaluators.return_decomposition:ReturnDecomposition",
                "hindsight": "slea_llm.evaluators.hindsight:HindsightEvaluator",
                "counterfactual": "slea_llm.evaluators.counterfactual:Counterfactual",
                "counterfactual_prediction": "slea_llm.evaluators.counterfactual:CounterfactualPrediction",
                "llm_judge": "slea_llm.evaluators.llm_judge:LlmJudge",
                "reward_model": "slea_llm.evaluators.reward_model:RewardModel",
                "blend": "slea_llm.evaluators.blend:Blend",
            }
        ),
        "augmenter": MappingProxyType({"slot_progress": "slea_llm.augmenters.slot_progress:SlotProgress"}),
        "credit": MappingProxyType({"nested_gae": "slea_llm.credit.nested_gae:NestedGae"}),
        "loss": MappingProxyType(
            {
                "ppo": "slea_llm.losses.ppo:PpoLoss",
                "value": "slea_llm.losses.value:ValueLoss",
                "reference_kl": "slea_llm.losses.reference_kl:ReferenceKlLoss",
                "entropy": "slea_llm.losses.entropy:EntropyLoss",
                "imitation": "slea_llm.losses.imitation:ImitationLoss",
                "imitation_prototypes": "slea_llm.losses.imitation_prototypes:PrototypeLoss",
            }
        ),
        "generator": MappingProxyType(
            {
                "vllm": "slea_llm.generation.vllm:VllmGenerator",
                "transformers": "slea_llm.generation.transformers:TransformersGenerator",
            }
        ),
    }
)

KINDS: tuple[str, ...] = tuple(ROWS)


def names(kind: str) -> dict[str, str]:
    """Every known name of a kind with the place it is imported from; built-in rows win over entry points."""
    if kind not in ROWS:
        raise ConfigError(f"unknown component kind {kind!r}; one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    third_party = {point.name: point.value for point in entry_points(group=f"slea_llm.{kind}")}
    return {**third_party, **ROWS[kind]}


def load(kind: str, name: str) -> Any:
    """The component class of that name.

    Raises ConfigError for an unknown name (with the nearest known one) and for a row that cannot be imported.
    """
    known = names(kind)
    if name not in known:
        raise ConfigError(f"unknown {kind} {name!r}; one of {', '.join(sorted(known))}{nearest(name, known)}")
    module_name, _, attribute = known[name].partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} could not be imported from {known[name]!r}: {error}") from error
