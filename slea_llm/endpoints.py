"""Ask a chat model behind an OpenAI-compatible HTTP endpoint: structured answers, within a deadline, or a reason.

Nothing here raises for what a server does. Every question comes back as an `Answer` with a value or with the reason why
there is none; retries, tokens and money are counted in `Usage`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import random
import re
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from slea_llm.errors import ConfigError, MissingDependencyError, UnsupportedError, nearest
from slea_llm.http_responses import ACCEPTED, read_body, seconds_to_wait
from slea_llm.questions import Answer, ChatModel, Question, Usage
from slea_llm.redaction import REDACTED, environment_secrets, redact_text

if TYPE_CHECKING:
    import ssl

    import httpx

T = TypeVar("T")

ENGINE = "engine"
"""The url of an endpoint that is no server: the model is loaded into this process."""
REFUSED_FOR_S = 30.0
"""Seconds for which questions fail at once after an endpoint could not be reached in all attempts of one question."""
MAX_BODY = 4 * 2**20
"""Bytes of a response, decompressed, beyond which it is not read."""
MOST_TOKENS = 10**9
"""A count of tokens above it is a server's nonsense and not counted."""
SHOWN = 8000
"""Characters of a faulty answer that its model is shown again."""
_FORMATS = ("json_schema", "json_object", "none")
_RETRIED = frozenset({408, 409, 425, 429})
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 20.0
_DECODER = json.JSONDecoder()
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a chat model answers, how long it may take, and what it costs."""

    url: str = "http://127.0.0.1:8000/v1"
    """Base of an OpenAI-compatible API (`.../v1`), or `engine`: vLLM in this process, with `model` as its folder."""
    model: str = ""
    """Name under which the endpoint serves the model. Empty: left out of the request, which vLLM's server accepts."""
    key_variable: str = ""
    """Environment variable that holds the API key. Empty: no key is sent. The key itself never stands in a recipe."""
    response_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the form of the answer is asked for; `none` for servers that know neither. It is checked in any case."""
    timeout_s: float = 60.0
    """Seconds that one attempt may take, above 0."""
    deadline_s: float = 180.0
    """Seconds that one question may take with all attempts and pauses, above 0."""
    attempts: int = 3
    """Most attempts for one question, 1 or more."""
    concurrency: int = 16
    """Questions in flight at once, 1 or more."""
    max_tokens: int = 512
    """Most tokens of one answer, 1 or more."""
    temperature: float = 0.0
    """0 or above."""
    price_in: float = 0.0
    price_out: float = 0.0
    """Price of a million prompt and of a million answer tokens, in any currency, 0 or above."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.username or parts.password:
            raise ConfigError("an endpoint's url holds a user or password; name an environment variable (key_variable)")
        if self.url != ENGINE and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ConfigError(
                f"url {self.url!r} is neither an http address nor {ENGINE!r}{nearest(self.url, [ENGINE])}"
            )
        if self.url == ENGINE and not self.model:
            raise ConfigError(f"url {ENGINE!r} needs the folder or hub name of a model in `model`")
        if self.key_variable and not _VARIABLE.fullmatch(self.key_variable):
            raise ConfigError("key_variable is not the name of an environment variable; give its name, never a key")
        if self.response_format not in _FORMATS:
            raise ConfigError(
                f"response_format {self.response_format!r} is not one of {', '.join(_FORMATS)}"
                f"{nearest(self.response_format, _FORMATS)}"
            )
        for name in ("timeout_s", "deadline_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{name} {getattr(self, name)} is not a number of seconds above 0")
        for name in ("attempts", "concurrency", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} {getattr(self, name)} is below 1")
        for name in ("temperature", "price_in", "price_out"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{name} {getattr(self, name)} is not a number of 0 or above")

    @property
    def in_process(self) -> bool:
        return self.url == ENGINE

    def identity(self) -> dict[str, object]:
        """What of an endpoint can change an answer: limits of time, concurrency and price cannot."""
        return {name: getattr(self, name) for name in ("url", "model", "response_format", "max_tokens", "temperature")}


class HttpChatModel:
    """A ChatModel behind `POST <url>/chat/completions`.

    Retried, with growing pauses and never past the deadline: no connection, a timeout, 408, 409, 425, 429 and 5xx (a
    `Retry-After` is kept to), and an answer that is empty or not of the form asked for, whose fault is named to the
    model. Other statuses are final. Questions are asked `concurrency` at a time in an event loop of their own, so that
    callers need none and may have one.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises ConfigError when the key's variable is not set, MissingDependencyError without httpx."""
        if importlib.util.find_spec("httpx") is None:
            raise MissingDependencyError("a chat endpoint needs the httpx package: pip install 'slea-llm[judges]'")
        if endpoint.key_variable and not os.environ.get(endpoint.key_variable):
            raise ConfigError(f"environment variable {endpoint.key_variable} (key_variable) is not set")
        self.endpoint = endpoint
        self._usage = Usage()
        self._refused_until = 0.0
        self._refusal = ""
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._verify: ssl.SSLContext | bool | None = None

    @property
    def usage(self) -> Usage:
        return self._usage

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer for every question, in their order; each within `deadline_s` of when it was first sent."""
        if not questions or time.monotonic() < self._refused_until:
            self._usage = self._usage.plus(questions=len(questions), unanswered=len(questions))
            return [Answer(reason=self._refusal) for _ in questions]
        return run_apart(self._ask_all(questions))

    async def answer(self, question: Question) -> Answer:
        """The answer to one question; `concurrency` of an event loop are in flight at once, the others wait unsent."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self.endpoint.concurrency))
        # A client of its own: a shared one would have to be closed by whoever ends the event loop.
        async with self._slots[1], self._client() as client:
            answer = await self._answer(client, question)
        self._usage = self._usage.plus(questions=1, unanswered=int(answer.reason is not None))
        return answer

    def _key(self) -> str:
        return os.environ.get(self.endpoint.key_variable, "") if self.endpoint.key_variable else ""

    def _client(self) -> httpx.AsyncClient:
        import httpx

        key = self._key()
        if self._verify is None:  # reading the certificates of this machine takes longer than many an answer
            self._verify = httpx.create_ssl_context() if self.endpoint.url.startswith("https") else False
        return httpx.AsyncClient(
            headers={"Accept-Encoding": ACCEPTED, **({"Authorization": f"Bearer {key}"} if key else {})},
            timeout=None,  # noqa: S113  (asyncio.timeout bounds an attempt as a whole, httpx only its parts)
            limits=httpx.Limits(max_connections=self.endpoint.concurrency),
            trust_env=not _is_loopback(self.endpoint.url),  # a proxy does not reach this machine's own servers
            verify=self._verify,
        )

    async def _ask_all(self, questions: Sequence[Question]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(questions))
        async with self._client() as client:

            async def work() -> None:
                for index, question in waiting:
                    answers[index] = await self._answer(client, question)

            await asyncio.gather(*(work() for _ in range(min(self.endpoint.concurrency, len(questions)))))
        unanswered = sum(answer.reason is not None for answer in answers.values())
        self._usage = self._usage.plus(questions=len(questions), unanswered=unanswered)
        return [answers[index] for index in range(len(questions))]

    async def _answer(self, client: httpx.AsyncClient, question: Question) -> Answer:
        """The answer with every secret blanked in its reason: servers quote what they were sent."""
        key = self._key()
        answer = await self._try(client, question, key)
        if answer.reason is None:
            return answer
        secrets = environment_secrets() | ({key} if key else frozenset())
        return replace(answer, reason=redact_text(answer.reason, secrets))

    async def _try(self, client: httpx.AsyncClient, question: Question, key: str) -> Answer:
        if time.monotonic() < self._refused_until:
            return Answer(reason=self._refusal)
        deadline = time.monotonic() + self.endpoint.deadline_s
        messages = [
            {"role": message.role, "content": whole_characters(message.content)} for message in question.messages
        ]
        mend: list[dict[str, str]] = []
        attempt = 0
        while True:
            attempt += 1
            try:
                text, cut = await self._attempt(client, question, messages + mend, deadline)
                text = text.replace(key, REDACTED) if key else text  # a server may quote what it was sent
                return Answer(value=read_answer(text, question, cut=cut), attempts=attempt)
            except AttemptError as error:
                failure = error
            if failure.answer is not None:
                mend = correction(failure, question)
            if failure.final or attempt == self.endpoint.attempts:
                break
            pause = failure.pause(attempt)
            if time.monotonic() + pause >= deadline:
                return Answer(reason=f"{failure} (no time for another attempt)", attempts=attempt)
            await asyncio.sleep(pause)
            self._usage = self._usage.plus(retries=1)
        if failure.unreachable:
            self._refused_until, self._refusal = time.monotonic() + REFUSED_FOR_S, str(failure)
        return Answer(reason=str(failure), attempts=attempt)

    async def _attempt(
        self,
        client: httpx.AsyncClient,
        question: Question,
        messages: Sequence[Mapping[str, str]],
        deadline: float,
    ) -> tuple[str, bool]:
        """The text of one completion, and whether it was cut at the limit of tokens; raises AttemptError."""
        import httpx

        left = deadline - time.monotonic()
        self._usage = self._usage.plus(requests=1)
        try:
            async with asyncio.timeout(max(min(self.endpoint.timeout_s, left), 0.0)):
                status, retry_after, body = await self._post(client, self._payload(question, messages))
        except TimeoutError:
            limit = "timeout_s" if self.endpoint.timeout_s <= left else "deadline_s"
            raise AttemptError(f"no answer within {getattr(self.endpoint, limit):g} s ({limit})") from None
        except httpx.ConnectError as error:
            raise AttemptError(f"{self.endpoint.url} could not be reached: {error}", unreachable=True) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise AttemptError(f"the connection failed: {type(error).__name__}: {error}") from None
        if status != HTTPStatus.OK:
            final = status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in _RETRIED
            raise AttemptError(f"status {status}{_error_text(body)}", final=final, wait=seconds_to_wait(retry_after))
        text, cut = self._text(body, plain=question.schema is None)
        if cut and question.schema is not None:
            raise AttemptError(f"the answer was cut at {self.endpoint.max_tokens} tokens (max_tokens)", answer=text)
        return text, cut

    async def _post(self, client: httpx.AsyncClient, payload: Mapping[str, Any]) -> tuple[int, str | None, bytes]:
        url = f"{self.endpoint.url.rstrip('/')}/chat/completions"
        async with client.stream("POST", url, json=payload) as response:
            try:
                body = await read_body(response, MAX_BODY)
            except ValueError as error:
                raise AttemptError(f"the response cannot be read: {error}") from None
            if len(body) > MAX_BODY:
                raise AttemptError(f"the response is longer than {MAX_BODY} bytes", final=True)
            return response.status_code, response.headers.get("retry-after"), body

    def _payload(self, question: Question, messages: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        endpoint = self.endpoint
        payload: dict[str, Any] = {
            "messages": list(messages),
            "max_tokens": endpoint.max_tokens,
            "temperature": endpoint.temperature,
        }
        if endpoint.model:
            payload["model"] = endpoint.model
        if question.schema is None:
            return payload
        if endpoint.response_format == "json_schema":
            schema = {"name": question.name, "schema": dict(question.schema), "strict": True}
            payload["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif endpoint.response_format == "json_object":
            payload["response_format"] = {"type": "json_object"}
        return payload

    def _text(self, body: bytes, *, plain: bool) -> tuple[str, bool]:
        """The text of a completion, and whether it was cut; raises AttemptError for a body that is none.

        Its tokens are counted either way. An empty answer is a fault unless it was to be `plain` text.
        """
        try:
            document = json.loads(body)
            self._count_tokens(document.get("usage") or {})
            choice = document["choices"][0]
            text = choice["message"].get("content")
            reason = choice.get("finish_reason")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise AttemptError("the response is no chat completion") from None
        if isinstance(text, list):  # some servers give typed parts
            text = "".join(str(part.get("text") or "") for part in text if isinstance(part, dict))
        if text is None and plain:
            text = ""
        if not isinstance(text, str) or not (text.strip() or plain):
            raise AttemptError("empty answer")
        return text, reason == "length"

    def _count_tokens(self, counts: Mapping[str, Any]) -> None:
        given = [counts.get(name) for name in ("prompt_tokens", "completion_tokens")]
        if not all(isinstance(count, int) and 0 <= count <= MOST_TOKENS for count in given):
            self._usage = self._usage.plus(unmetered=1)
            return
        prompt, completion = (int(count) for count in given if count is not None)
        cost = (prompt * self.endpoint.price_in + completion * self.endpoint.price_out) / 1e6
        self._usage = self._usage.plus(prompt_tokens=prompt, completion_tokens=completion, cost=cost)


def chat_model_of(endpoint: Endpoint, given: ChatModel | None = None) -> ChatModel:
    """Who answers for an endpoint: the model that was given, else its HTTP client.

    Raises UnsupportedError for an endpoint in this process that no model was given for.
    """
    if given is None and endpoint.in_process:
        raise UnsupportedError(
            f"url {ENGINE!r} is a model in this process, which `slea score` and `slea train` load; hand it over as "
            "chat_model, or give the address of an endpoint"
        )
    return HttpChatModel(endpoint) if given is None else given


class AttemptError(Exception):
    """One attempt failed. `answer`: what the model said, when that is the fault. `wait`: seconds the server wants."""

    def __init__(
        self,
        reason: str,
        *,
        final: bool = False,
        unreachable: bool = False,
        answer: str | None = None,
        wait: float | None = None,
    ) -> None:
        super().__init__(reason)
        self.final, self.unreachable, self.answer, self.wait = final, unreachable, answer, wait

    def pause(self, attempt: int) -> float:
        """Seconds before the next attempt: what the server asks for, none after a faulty answer, else growing."""
        if self.wait is not None:
            return self.wait
        if self.answer is not None:
            return 0.0
        return min(FIRST_PAUSE_S * 2.0 ** (attempt - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)  # noqa: S311


def read_answer(text: str, question: Question, *, cut: bool = False) -> Any:
    """The value of an answer's text; raises AttemptError that holds the text and names its fault."""
    try:
        if question.schema is None:
            return question.read({"text": whole_characters(text), "cut": cut})
        return question.read(json_object(text))
    except ValueError as error:
        raise AttemptError(f"malformed answer: {error}", answer=text) from None


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of an answer: alone, after a think block, in a code fence, or the first one in the text.

    Half characters in it (a model that writes `\\ud83d` alone) become U+FFFD. Raises ValueError without an object.
    """
    text = _THOUGHT.sub("", text, count=1)
    fence = _FENCE.search(text)
    candidate = (fence[1] if fence else text).strip()
    start = candidate.find("{")
    if start < 0:
        raise ValueError("it holds no JSON object")
    try:
        value, _ = _DECODER.raw_decode(candidate, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return {whole_characters(key): _whole(item) for key, item in value.items()}


def whole_characters(text: str) -> str:
    """The text with U+FFFD for every half character, which UTF-8 cannot hold."""
    return _HALF.sub("\ufffd", text)


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine from its own event loop; in a thread when this one has a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, work).result()


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return whole_characters(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {whole_characters(key): _whole(item) for key, item in value.items()}
    return value


def correction(failure: AttemptError, question: Question) -> list[dict[str, str]]:
    """The beginning of the faulty answer and a request for a better one, as further messages."""
    return [
        {"role": "assistant", "content": whole_characters((failure.answer or "...")[:SHOWN])},
        {"role": "user", "content": f"That cannot be used: {failure}. {question.again}"},
    ]


def _error_text(body: bytes) -> str:
    """`: what the server says`, shortened; empty when it says nothing."""
    text = body[:2000].decode("utf-8", "replace")
    try:
        document = json.loads(text)
        error = document.get("error", document) if isinstance(document, dict) else document
        message = error.get("message", "") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else text
    except (ValueError, RecursionError):
        pass
    text = " ".join(text.split())[:200]
    return f": {text}" if text else ""


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host.startswith("127.") or host == "::1"
