"""What passes between a component and a chat model: questions, their answers, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

from slea_llm.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question to a chat model. `read` makes the answer's value of the JSON object that came back.

    `schema` is a JSON schema, asked for where the model can be held to one; `read` checks in any case and raises
    ValueError with the fault, which is told to the model before it is asked again, followed by `again`. Without a
    schema the answer is plain text: `read` gets `{"text": ..., "cut": ...}`, where `cut` says that it reached the
    model's limit of tokens.
    """

    name: str
    messages: tuple[Message, ...]
    schema: Mapping[str, Any] | None
    read: Callable[[Mapping[str, Any]], Any]
    again: str = "Answer again with the JSON object alone."


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a question: a value (never None), or the reason why there is none."""

    value: Any = None
    reason: str | None = None
    attempts: int = 0

    def __post_init__(self) -> None:
        if (self.value is None) == (self.reason is None):
            raise ValueError("an answer has exactly one of value and reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What questions have cost so far. `unmetered`: responses that did not say how many tokens they took."""

    questions: int = 0
    unanswered: int = 0
    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    unmetered: int = 0
    cost: float = 0.0

    def plus(self, **amounts: float) -> Usage:
        return replace(self, **{name: getattr(self, name) + amount for name, amount in amounts.items()})

    def since(self, before: Usage) -> Usage:
        """What was spent after `before`, an earlier count of the same."""
        return Usage(**{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)})

    def line(self) -> str:
        """All of it in one line."""
        text = (
            f"{self.questions} questions, {self.unanswered} without an answer; {self.requests} requests, "
            f"{self.retries} of them retries; {self.prompt_tokens} prompt and {self.completion_tokens} answer tokens"
        )
        if self.unmetered:
            text += f" ({self.unmetered} responses did not say)"
        return text + (f"; cost {self.cost:.4f}" if self.cost else "")


class ChatModel(Protocol):
    """A model that answers questions in JSON: behind an endpoint, or in this process."""

    @property
    def usage(self) -> Usage:
        """What has been asked so far, and what it took."""
        ...

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer for each question, in their order; what fails is a reason, never an exception."""
        ...


class AsyncChatModel(Protocol):
    """A chat model that many coroutines ask at once, each waiting for its own answer alone."""

    @property
    def usage(self) -> Usage: ...

    async def answer(self, question: Question) -> Answer:
        """The answer to one question; what fails is a reason, never an exception."""
        ...


@runtime_checkable
class Asking(Protocol):
    """A component that asks a chat model and counts what that costs."""

    name: ClassVar[str]

    @property
    def usage(self) -> Usage: ...
