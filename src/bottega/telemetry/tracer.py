"""Spans and metrics of OpenTelemetry for the pipeline's steps and for model calls, with the
attributes of its conventions for generative AI."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Self

import orjson
from opentelemetry import context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bottega._util.tracing import LOCAL, Attributes, AttributeValue, ModelCall
from bottega.errors import EndpointError
from bottega.types import Completion, Message

NAME = "bottega"
SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
# Histogram bounds that the conventions recommend.
TOKEN_BOUNDS = tuple(4.0**power for power in range(14))
SECOND_BOUNDS = tuple(0.01 * 2.0**power for power in range(14))
# Fields of a chat body that are numbers, and their attributes.
NUMBER_ATTRIBUTES = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}
INTEGERS = range(-(2**63), 2**63)  # of OTLP; clients may send larger ones, such as a seed
MAX_CONTENT = 65_536  # characters; thousands of spans may wait in memory for a collector
ERROR_TYPE = "error.type"
STATUS_CODE = "http.response.status_code"
TOKEN_TYPE = "gen_ai.token.type"


class StepSpan:
    """Span of a step or of a request, active inside its `with` block. A class, because the context
    managers of OpenTelemetry are generators and take several times as long."""

    def __init__(self, span: trace.Span) -> None:
        self.span = span

    def __enter__(self) -> Self:
        self._token = context.attach(trace.set_span_in_context(self.span))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        context.detach(self._token)
        if error is not None:
            self.record_error(error)
        self.span.end()

    def set(self, attributes: Attributes, /) -> None:
        if self.span.is_recording():
            self.span.set_attributes(without_none(attributes))

    @property
    def trace_id(self) -> str:
        return trace.format_trace_id(self.span.get_span_context().trace_id)

    def fail(self, kind: str, /) -> None:
        self.set({ERROR_TYPE: kind})
        self.span.set_status(Status(StatusCode.ERROR))

    def record_error(self, error: BaseException) -> None:
        """Record an exception. A cancellation, as after a client disconnects, is not a failure."""
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.set({"bottega.cancelled": True})
            return
        # The message may quote a client, so the span does not contain it.
        self.set({STATUS_CODE: error.status if isinstance(error, EndpointError) else None})
        self.fail(type(error).__name__)


class ModelCallSpan(StepSpan):
    """Span of a model call, and its contribution to the metrics."""

    def __init__(
        self, span: trace.Span, call: ModelCall, instruments: Instruments, capture_content: bool
    ) -> None:
        super().__init__(span)
        self._call, self._instruments = call, instruments
        self._capture_content = capture_content
        self._started = perf_counter()

    @contextmanager
    def active(self) -> Iterator[None]:
        token = context.attach(trace.set_span_in_context(self.span))
        try:
            yield
        finally:
            context.detach(token)

    def end(self, error: BaseException | None = None) -> None:
        call = self._call
        if self.span.is_recording():
            self.set(response_attributes(call))
            if self._capture_content:
                self.set(content_attributes(call))
            if error is not None:
                self.record_error(error)
        self.span.end()
        self._instruments.record(call, perf_counter() - self._started, error)


class Instruments:
    """Metrics of model calls."""

    def __init__(self, provider: MeterProvider | None) -> None:
        meter = metrics.get_meter(NAME, meter_provider=provider, schema_url=SCHEMA)
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens used",
            explicit_bucket_boundaries_advisory=TOKEN_BOUNDS,
        )
        self._seconds = meter.create_histogram(
            "gen_ai.client.operation.duration",
            "s",
            "Duration of model calls",
            explicit_bucket_boundaries_advisory=SECOND_BOUNDS,
        )

    def record(self, call: ModelCall, seconds: float, error: BaseException | None) -> None:
        attributes = base_attributes(call)
        if (usage := call.usage) is not None:
            for kind, count in ("input", usage.prompt_tokens), ("output", usage.completion_tokens):
                self._tokens.record(count, {**attributes, TOKEN_TYPE: kind})
        if error is not None:
            attributes[ERROR_TYPE] = type(error).__name__
        self._seconds.record(seconds, attributes)


class OpenTelemetryTracer:
    """Tracer that uses these OpenTelemetry providers, by default the global ones.

    Trace context in the headers of requests has the W3C format (`traceparent`, `tracestate`), or
    the formats that the environment variable OTEL_PROPAGATORS names.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        *,
        capture_content: bool = False,
    ) -> None:
        self._tracer = trace.get_tracer(NAME, tracer_provider=tracer_provider, schema_url=SCHEMA)
        self._instruments = Instruments(meter_provider)
        self._capture_content = capture_content
        self._propagator: TextMapPropagator = TraceContextTextMapPropagator()
        if os.environ.get("OTEL_PROPAGATORS"):
            self._propagator = propagate.get_global_textmap()

    def span(self, name: str, attributes: Attributes, /) -> StepSpan:
        return self._start(name, SpanKind.INTERNAL, attributes)

    def request_span(
        self, name: str, attributes: Attributes, headers: Mapping[str, str], /
    ) -> StepSpan:
        return self._start(name, SpanKind.SERVER, attributes, self._propagator.extract(headers))

    def begin_call(self, call: ModelCall, /) -> ModelCallSpan:
        attributes = base_attributes(call) | dict(request_attributes(call))
        kind = SpanKind.INTERNAL if call.provider == LOCAL else SpanKind.CLIENT
        name = f"{call.operation} {call.model}"
        span = self._tracer.start_span(name, kind=kind, attributes=attributes)
        return ModelCallSpan(span, call, self._instruments, self._capture_content)

    def headers(self) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        self._propagator.inject(headers)
        return headers

    def _start(
        self, name: str, kind: SpanKind, attributes: Attributes, parent: Context | None = None
    ) -> StepSpan:
        return StepSpan(self._tracer.start_span(name, parent, kind, without_none(attributes)))


def without_none(attributes: Attributes) -> dict[str, AttributeValue]:
    """Return the attributes whose value is not None."""
    return {name: value for name, value in attributes.items() if value is not None}


def base_attributes(call: ModelCall) -> dict[str, AttributeValue]:
    """Return the attributes that spans and metrics of a call share. The configuration bounds the
    number of their values, which metrics require."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": call.provider,
        "gen_ai.request.model": call.model,
    }
    if call.address is not None:
        attributes["server.address"] = call.address
        if call.port is not None:
            attributes["server.port"] = call.port
    return attributes


def request_attributes(call: ModelCall) -> Iterator[tuple[str, AttributeValue]]:
    """Yield the attributes of a call's request: sampling parameters, choices and streaming."""
    for name, attribute in NUMBER_ATTRIBUTES.items():
        value = call.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if isinstance(value, float) or value in INTEGERS:
            yield attribute, value
    if isinstance(count := call.fields.get("n"), int) and count > 1:
        yield "gen_ai.request.choice.count", count
    if call.stream:
        yield "gen_ai.request.stream", True


def response_attributes(call: ModelCall) -> Attributes:
    """Return the attributes of a call's reply: model, finish reasons, tokens, and the seconds to
    the first chunk of a stream."""
    attributes: dict[str, AttributeValue | None] = {
        "gen_ai.response.model": call.response_model,
        "gen_ai.response.finish_reasons": [one.finish_reason for one in call.completions] or None,
        "gen_ai.response.time_to_first_chunk": call.first_seconds,
    }
    if (usage := call.usage) is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens or None
    return attributes


def content_attributes(call: ModelCall) -> Attributes:
    """Return the texts of the prompt and of the reply as JSON, of each up to `MAX_CONTENT`
    characters. Images appear as parts without content."""
    given = call.prompt.messages if call.prompt is not None else call.fields.get("messages")
    messages = given if isinstance(given, Sequence) else ()
    prompt, reply = _Content(), _Content()
    # The last messages first: they have the question.
    inputs = [prompt.message(message) for message in reversed(messages)][::-1]
    outputs = [reply.completion(one) for one in call.completions]
    return {
        "gen_ai.input.messages": orjson.dumps(inputs).decode(),
        "gen_ai.output.messages": orjson.dumps(outputs).decode(),
    }


@dataclass
class _Content:
    """Texts of one span, which have `left` characters until they are cut."""

    left: int = MAX_CONTENT

    def message(self, message: Message | Mapping[str, object]) -> dict[str, object]:
        if isinstance(message, Message):
            parts = [
                self.text(one) if isinstance(one, str) else {"type": "image"}
                for one in message.parts
            ]
            return {"role": message.role, "parts": parts}
        content = message.get("content")
        given = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        return {"role": message.get("role"), "parts": [self._part(one) for one in given]}

    def completion(self, completion: Completion) -> dict[str, object]:
        parts, finish = [self.text(completion.text)], completion.finish_reason
        return {"role": "assistant", "parts": parts, "finish_reason": finish}

    def text(self, text: str) -> dict[str, object]:
        shown = text[: self.left]
        self.left -= len(shown)
        return {"type": "text", "content": shown}

    def _part(self, part: Mapping[str, object]) -> dict[str, object]:
        if part.get("type") == "text":
            return self.text(str(part.get("text", "")))
        return {"type": str(part.get("type")).removesuffix("_url")}
