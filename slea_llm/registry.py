"""Name -> component, imported only when asked for. Third parties add rows by entry points `slea_llm.<kind>`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from slea_llm.errors import ConfigError, nearest

ROWS: MappingProxyType[str, MappingProxyType[str, str]] = MappingProxyType(
    {
        "environment": MappingProxyType(
            {
                "order_taking": "slea_llm.environments.order_taking:OrderTaking",
                "complaint": "slea_llm.environments.complaint:Complaint",
                "tech_support": "slea_llm.environments.tech_support:TechSupport",
                "trip_planning": "slea_llm.environments.trip_planning:TripPlanning",
                "strategy_game": "slea_llm.environments.strategy_game:StrategyGame",
                "code_task": "slea_llm.environments.code_task:CodeTask",
                "gymnasium": "slea_llm.environments.gymnasium_text:GymnasiumText",
                "textworld": "slea_llm.environments.textworld_games:TextWorldGames",
                "verifiers": "slea_llm.environments.verifiers_tasks:VerifiersTasks",
            }
        ),
        "user": MappingProxyType(
            {
                "scripted": "slea_llm.users.scripted:ScriptedUser",
                "recorded": "slea_llm.users.recorded:RecordedUser",
                "llm": "slea_llm.users.llm:LlmUser",
            }
        ),
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
                "rules": "slea_llm.evaluators.rules:Rules",
                "tool_use": "slea_llm.evaluators.tool_use:ToolUse",
                "tool_use_outcomes": "slea_llm.evaluators.tool_use_outcomes:ToolUseOutcomes",
                "knowledge_base": "slea_llm.evaluators.knowledge_base:KnowledgeBase",
                "return_decomposition": "slea_llm.evaluators.return_decomposition:ReturnDecomposition",
                "hindsight": "slea_llm.evaluators.hindsight:HindsightEvaluator",
                "counterfactual": "slea_llm.evaluators.counterfactual:Counterfactual",
                "counterfactual_prediction": "slea_llm.evaluators.counterfactual:CounterfactualPrediction",
                "llm_judge": "slea_llm.evaluators.llm_judge:LlmJudge",
                "reward_model": "slea_llm.evaluators.reward_model:RewardModel",
                "causal_reward_model": "slea_llm.evaluators.causal_reward_model:CausalRewardModel",
                "blend": "slea_llm.evaluators.blend:Blend",
            }
        ),
        "referee": MappingProxyType({"rules": "slea_llm.referee:Referee"}),
        "augmenter": MappingProxyType(
            {
                "value_shaping": "slea_llm.augmenters.value_shaping:ValueShaping",
                "attention_credit": "slea_llm.augmenters.attention_credit:AttentionCredit",
                "slot_progress": "slea_llm.augmenters.slot_progress:SlotProgress",
                "success_backprop": "slea_llm.augmenters.success_backprop:SuccessBackprop",
                "repeat_penalty": "slea_llm.augmenters.repeat_penalty:RepeatPenalty",
                "info_density": "slea_llm.augmenters.info_density:InfoDensity",
            }
        ),
        "credit": MappingProxyType(
            {
                "nested_gae": "slea_llm.credit.nested_gae:NestedGae",
                "group_relative": "slea_llm.credit.group_relative:GroupRelative",
            }
        ),
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
        # Asked in this order whether a record is theirs: the form that others share comes last.
        "log_format": MappingProxyType(
            {
                "slea": "slea_llm.logs.own:OwnLog",
                "tau_bench": "slea_llm.logs.tau_bench:TauBench",
                "tau2_bench": "slea_llm.logs.tau2_bench:Tau2Bench",
                "nemo_gym": "slea_llm.logs.nemo_gym:NemoGym",
                "swe_agent": "slea_llm.logs.swe_agent:SweAgent",
                "openhands": "slea_llm.logs.openhands:OpenHands",
                "inspect": "slea_llm.logs.inspect_ai:InspectLog",
                "atif": "slea_llm.logs.atif:Atif",
                "toolbench": "slea_llm.logs.toolbench:ToolBench",
                "otel_genai": "slea_llm.logs.otel_genai:OtelGenAi",
                "sharegpt": "slea_llm.logs.sharegpt:ShareGpt",
                "anthropic": "slea_llm.logs.anthropic:AnthropicMessages",
                "reflexion": "slea_llm.logs.reflexion:ReflexionLog",
                "react": "slea_llm.logs.react:ReactLog",
                "openai_chat": "slea_llm.logs.openai_chat:OpenAIChat",
            }
        ),
    }
)

KINDS: tuple[str, ...] = tuple(ROWS)


def names(kind: str) -> dict[str, str]:
    """Every known name of a kind with the place it is imported from.

    Built-in rows win over entry points, and the first entry point over others, with a warning.
    """
    if kind not in ROWS:
        raise ConfigError(f"unknown component kind {kind!r}; one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    found: dict[str, str] = dict(ROWS[kind])
    for point in entry_points(group=f"slea_llm.{kind}"):
        if found.setdefault(point.name, point.value) != point.value:
            warnings.warn(
                f"{kind} {point.name!r} of {point.value} is passed over: that name is {found[point.name]}; rename one",
                stacklevel=2,
            )
    return found


def load(kind: str, name: str, known: Mapping[str, str] | None = None) -> Any:
    """The component class of that name; `known` is what `names` gave, for who loads many.

    Raises ConfigError for an unknown name (with the nearest known one) and for a row that cannot be imported.
    """
    known = names(kind) if known is None else known
    if name not in known:
        raise ConfigError(f"unknown {kind} {name!r}; one of {', '.join(sorted(known))}{nearest(name, known)}")
    module_name, _, attribute = known[name].partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} {name!r} could not be imported from {known[name]!r}: {error}") from error
