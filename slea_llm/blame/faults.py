"""What a fault is, and the kinds that the referee knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal

from slea_llm.blame.view import Line

Party = Literal["agent", "user", "environment", "scorer"]
Weight = Literal["decisive", "serious", "suspect", "minor"]

KINDS: Mapping[str, str] = MappingProxyType(
    {
        # a user that is no user
        "leak": "speaks of its instructions or goal as such, or reads them out",
        "out_of_character": "says that it is a model or plays a part",
        "role_flip": "talks as the agent would",
        "both_sides": "speaks for the agent too",
        "reasons_aloud": "its private reasoning is heard",
        "stop_signal": "its stop signal is heard",
        "control_tokens": "writes control tokens",
        "structured": "writes calls, code or JSON where words are due",
        "placeholder": "leaves a blank where a value is due",
        "tampers": "tells the agent to drop its rules or to count the dialogue as a success",
        # a user that cannot be understood
        "empty": "says nothing although it was asked",
        "gibberish": "says nothing that can be understood",
        "wrong_language": "speaks another language than its task",
        "over_long": "talks on without end",
        "repeats": "says the same again although it was asked something else",
        "echoes": "gives the agent's words back",
        "abuses": "insults the agent",
        # a user that is not true to its goal
        "contradicts_goal": "tells a value that is not the one of its goal",
        "contradicts_itself": "denies what it said, or takes it back",
        "changes_goal": "wants something else than its goal",
        "invents": "asks for more than its goal holds",
        "made_up": "tells details that its goal does not hold",
        "wrong_agreement": "agrees to a wrong value that is read back",
        "wrong_denial": "rejects what is right",
        # a user that does not help
        "refuses": "refuses to say what it was asked for",
        "does_not_know": "does not know what its goal says",
        "withholds": "never says what it was asked for",
        "false_reference": "says that it told what it never told",
        "asks_own": "asks the agent for what only it can know",
        "claims_success": "says that it has what nobody has given it",
        "stops_early": "leaves before its goal is told or the agent could act",
        "never_stops": "goes on when all is done",
        "off_path": "a replayed user that the agent's words did not fit",
        "broke": "the simulator failed",
        # the others
        "fails": "nothing else explains the failure",
        "tool_failed": "a tool of the environment failed",
        "misheard": "the environment noted something else than the user said",
        "crashed": "environment or sampler failed",
        "contradicts_outcome": "the outcome is not what the record shows",
        "no_outcome": "a finished dialogue has no outcome",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that somebody did wrong, with the words that show it.

    `weight`: a *decisive* fault blames even where the dialogue succeeded, since the success is not the agent's; a
    *serious* one explains a failure; a *suspect* one does so when there is nothing better; a *minor* one is noted only.
    """

    party: Party
    kind: str
    turn: int
    quote: str
    weight: Weight = "serious"
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {key: value for key, value in asdict(self).items() if value != ""}


def of_user(kind: str, line: Line, quote: str = "", *, weight: Weight = "serious", note: str = "") -> Fault:
    """A fault of the user in one of its lines; the quote is the whole line where none is given."""
    return Fault(party="user", kind=kind, turn=line.turn, quote=(quote or line.text)[:300], weight=weight, note=note)
