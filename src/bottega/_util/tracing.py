"""Spans of a query's steps and of model calls. Without a tracer in the context, none is recorded.

The steps call `span` and `current_tracer`; a `Tracer`, such as that of `bottega.telemetry`, is part
of the context (`contextvars`), so concurrent queries may have different ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from bottega.types import Completion, Prompt, Reply, Sampling, Usage

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue | None]
NO_ATTRIBUTES: Attributes = {}
NO_HEADERS: Mapping[str, str] = {}
LOCAL = "bottega"  # provider of models that run in this process
_NO_CONTEXT = nullcontext()
_tracer: ContextVar[Tracer | None] = ContextVar("tracer", default=None)


class ModelReply(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def completions(self) -> Sequence[Completion]: ...
    @property
    def usage(self) -> Usage | None: ...


@dataclass
class ModelCall:
    """Call of a model, completed when its reply arrives. `provider` and `operation` are names of
    OpenTelemetry's conventions for generative AI; `fields` are the fields of a chat body, and
    `prompt` is set if they have no messages. `address` and `port` belong to an endpoint.
    `first_seconds` is the time to the first event of a stream."""

    model: str
    provider: str = LOCAL
    operation: str = "chat"
    fields: Mapping[str, object] = field(default_factory=dict)
    prompt: Prompt | None = None
    address: str | None = None
    port: int | None = None
    stream: bool = False
    response_model: str | None = None
    completions: Sequence[Completion] = ()
    usage: Usage | None = None
    first_seconds: float | None = None

    def set_reply(self, reply: ModelReply) -> None:
        """Complete the call with the model, the completions and the usage of its reply."""
        self.response_model, self.completions = reply.model, reply.completions
        self.usage = reply.usage


class Span(Protocol):
    """A running step. Attributes with the value None are left out."""

    def set(self, attributes: Attributes, /) -> None: ...


class RequestSpan(Span, Protocol):
    """Span of a request to the gateway. `fail` marks it as failed, with the name of an error."""

    @property
    def trace_id(self) -> str: ...

    def fail(self, kind: str, /) -> None: ...


class CallSpan(Protocol):
    """Span of a model call. A stream outlives the code that began it, so the span is the parent of
    other spans, including the endpoint's, only inside `active`."""

    def active(self) -> AbstractContextManager[None]: ...

    def end(self, error: BaseException | None = None) -> None: ...


class Tracer(Protocol):
    """Factory of spans. Each span is a child of the one that is active in the context."""

    def span(self, name: str, attributes: Attributes, /) -> AbstractContextManager[Span]: ...

    def request_span(
        self, name: str, attributes: Attributes, headers: Mapping[str, str], /
    ) -> AbstractContextManager[RequestSpan]:
        """Measure a request to this server. The span in its headers, if any, is the parent."""
        ...

    def begin_call(self, call: ModelCall, /) -> CallSpan: ...

    def headers(self) -> Mapping[str, str]:
        """Return the HTTP headers that make the receiver's spans children of the active span."""
        ...


class NoOpSpan:
    """Span of any kind that records nothing, for contexts without a tracer."""

    trace_id = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def set(self, attributes: Attributes, /) -> None:
        pass

    def fail(self, kind: str, /) -> None:
        pass

    def active(self) -> AbstractContextManager[None]:
        return _NO_CONTEXT

    def end(self, error: BaseException | None = None) -> None:
        pass


NO_OP_SPAN = NoOpSpan()


def current_tracer() -> Tracer | None:
    """Return the tracer of the context, None without one."""
    return _tracer.get()


def use_tracer(tracer: Tracer | None) -> AbstractContextManager[None]:
    """Use the tracer inside the block; None keeps that of the context."""
    return _NO_CONTEXT if tracer is None else _use_tracer(tracer)


@contextmanager
def _use_tracer(tracer: Tracer) -> Iterator[None]:
    token = _tracer.set(tracer)
    try:
        yield
    finally:
        _tracer.reset(token)


def span(name: str, attributes: Attributes = NO_ATTRIBUTES) -> AbstractContextManager[Span]:
    """Return a context manager that measures a step."""
    tracer = _tracer.get()
    return NO_OP_SPAN if tracer is None else tracer.span(name, attributes)


def forwarded_headers() -> Mapping[str, str]:
    """Return the headers of the active span for a request to another server, none without a
    tracer."""
    tracer = _tracer.get()
    return NO_HEADERS if tracer is None else tracer.headers()


@contextmanager
def model_call(tracer: Tracer, call: ModelCall) -> Iterator[ModelCall]:
    """Measure a call whose reply arrives inside the block."""
    running = tracer.begin_call(call)
    try:
        with running.active():
            yield call
    except BaseException as error:
        running.end(error)
        raise
    running.end()


async def traced_reply(
    model: str, prompt: Prompt, sampling: Sampling, work: Awaitable[Reply]
) -> Reply:
    """Await the reply of a model in this process, and measure the call."""
    tracer = _tracer.get()
    if tracer is None:
        return await work
    fields = {name: getattr(sampling, name) for name in ("temperature", "max_tokens", "n", "seed")}
    with model_call(tracer, ModelCall(model, fields=fields, prompt=prompt)) as call:
        reply = await work
        call.set_reply(reply)
        return reply
