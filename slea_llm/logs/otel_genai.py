"""Spans of OpenTelemetry's semantic conventions for generative AI: chat spans of one trace make a dialogue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from slea_llm.logs.chat import add_message
from slea_llm.logs.facts import Facts
from slea_llm.logs.fields import has_list, mapping, name_text, optional_list, optional_mapping, sequence, shown
from slea_llm.logs.formats import JsonFormat, LogRecord, RecordError
from slea_llm.logs.transcript import Transcript
from slea_llm.types import Trajectory

INPUT, OUTPUT, SYSTEM = "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions"
VALUE_KEYS = ("stringValue", "boolValue", "intValue", "doubleValue")


class OtelGenAi(JsonFormat):
    """`{spans}`, `{resourceSpans}` or spans alone, as JSON or as JSON lines of whole exports.

    A chat span whose input goes on from what is known adds to the dialogue; any other begins a new one. Spans without
    messages (tools, agents) are counted in the flags: their messages stand in the chat spans.
    """

    name: ClassVar[str] = "otel_genai"

    def recognises(self, value: Any) -> bool:
        if isinstance(value, list):
            return bool(value) and self.is_part(value[0])
        if not isinstance(value, dict):
            return False
        return has_list(value, "resourceSpans") or has_list(value, "spans") or self.is_part(value)

    def is_part(self, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        attributes = value.get("attributes")
        if isinstance(attributes, list):
            return any(name_text(optional_mapping(one).get("key")).startswith("gen_ai.") for one in attributes)
        return isinstance(attributes, dict) and any(key.startswith("gen_ai.") for key in attributes)

    def read(self, record: LogRecord) -> Iterable[Trajectory]:
        traces: dict[str, list[Mapping[str, Any]]] = {}
        for span in _spans(record.value):
            traces.setdefault(name_text(span.get("traceId", span.get("trace_id"))), []).append(span)
        found = [one for name, spans in traces.items() for one in self._dialogues(record, name, spans)]
        if not found:
            raise RecordError(f"none of its spans has {INPUT} or {OUTPUT}")
        return found

    def _dialogues(self, record: LogRecord, trace: str, spans: Sequence[Mapping[str, Any]]) -> Iterator[Trajectory]:
        known: list[Any] = []
        model = ""
        silent = 0
        dialogues: list[tuple[list[Any], str]] = []
        for span in sorted(spans, key=_start):
            attributes = _attributes(span)
            given, answer = (_messages(attributes.get(key), key) for key in (INPUT, OUTPUT))
            if not given and not answer:
                silent += 1
                continue
            system = _messages(attributes.get(SYSTEM), SYSTEM)
            head = [{"role": "system", "parts": system}] if system else []
            if known and [*head, *given][: len(known)] != known:
                dialogues.append((known, model))
                known = []
            model = name_text(attributes.get("gen_ai.request.model")) or model
            known = [*head, *given, *answer]
        if known:
            dialogues.append((known, model))
        for index, (messages, name) in enumerate(dialogues):
            transcript = Transcript(record.flags)
            if silent:
                transcript.flags.append("spans without messages (tools, agents) are not kept")
            for place, message in enumerate(messages):
                _say(transcript, mapping(message, f"messages[{place}]"), f"messages[{place}]")
            number = f"{trace}/{index}" if trace and len(dialogues) > 1 else trace
            yield transcript.trajectory(record, self.name, Facts(id=number, more={"model": name}))


def _spans(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        for index, span in enumerate(value):
            yield mapping(span, f"[{index}]")
    elif "resourceSpans" in value:
        for resource in sequence(value["resourceSpans"], "resourceSpans"):
            scopes = optional_mapping(resource)
            for scope in optional_list(scopes.get("scopeSpans", scopes.get("instrumentationLibrarySpans"))):
                yield from _spans(list(optional_list(optional_mapping(scope).get("spans"))))
    elif "spans" in value:
        yield from _spans(sequence(value["spans"], "spans"))
    else:
        yield value


def _start(span: Mapping[str, Any]) -> tuple[int, str]:
    """Spans in order of their start; those without one stay where they are."""
    start = span.get("startTimeUnixNano", span.get("start_time"))
    text = name_text(start)
    return (len(text), text) if text.isdigit() else (0, text)


def _attributes(span: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a span and of its events, as plain values."""
    found = _plain(span.get("attributes"))
    for event in optional_list(span.get("events")):
        found = {**_plain(optional_mapping(event).get("attributes")), **found}
    return found


def _plain(attributes: Any) -> dict[str, Any]:
    if isinstance(attributes, dict):
        return attributes
    pairs = (optional_mapping(one) for one in optional_list(attributes))
    return {name_text(one.get("key")): _value(one.get("value")) for one in pairs}


def _value(value: Any) -> Any:
    """A value of OTLP: `{stringValue}`, `{arrayValue: {values}}` or `{kvlistValue: {values}}`."""
    one = optional_mapping(value)
    for key in VALUE_KEYS:
        if key in one:
            return one[key]
    if "arrayValue" in one:
        return [_value(item) for item in optional_list(optional_mapping(one["arrayValue"]).get("values"))]
    if "kvlistValue" in one:
        return _plain(optional_mapping(one["kvlistValue"]).get("values"))
    return value


def _messages(value: Any, what: str) -> list[Any]:
    """Messages or parts: a list, or its JSON as a text. Raises RecordError for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=lambda _: None)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{what} is no JSON: {shown(value)}") from error
    return [] if value is None else list(sequence(value, what))


def _say(transcript: Transcript, message: Mapping[str, Any], what: str) -> None:
    """A message, whose parts are content blocks; each response of a tool is a message of its own."""
    content = message.get("parts", message.get("content"))
    role = "user" if message.get("role") == "tool" and isinstance(content, list) else message.get("role")
    add_message(transcript, {**message, "role": role, "content": content}, what)
