"""Calls of an endpoint as a tracer measures them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from time import perf_counter

from bottega._util.tracing import ModelCall, Tracer
from bottega.errors import GenerationError
from bottega.openai_api.endpoint import CHAT_PATH, COMPLETIONS_PATH, Endpoint
from bottega.openai_api.streams import from_chunks
from bottega.types import Prompt

# Names of OpenTelemetry's conventions for operations, and for the providers of these hosts. Other
# servers of the protocol, such as vLLM, count as `openai`.
OPERATIONS = {CHAT_PATH: "chat", COMPLETIONS_PATH: "text_completion"}
PROVIDERS = {
    "api.anthropic.com": "anthropic",
    "api.cohere.ai": "cohere",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.moonshot.ai": "moonshot_ai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
    "generativelanguage.googleapis.com": "gcp.gemini",
}
AZURE = ".openai.azure.com"


def describe_call(
    model: str,
    endpoint: Endpoint,
    path: str,
    fields: Mapping[str, object],
    *,
    prompt: Prompt | None = None,
    stream: bool = False,
) -> ModelCall:
    """Return the call of a body with these fields. `prompt` is what is added to them."""
    host = endpoint.base.host or ""
    provider = "azure.ai.openai" if host.endswith(AZURE) else PROVIDERS.get(host, "openai")
    return ModelCall(
        model,
        provider,
        OPERATIONS[path],
        fields,
        prompt,
        address=host,
        port=endpoint.base.port,
        stream=stream,
    )


async def measured_stream(
    tracer: Tracer, call: ModelCall, chunks: AsyncGenerator[bytes]
) -> AsyncGenerator[bytes]:
    """Yield the chunks of a streamed reply, and measure the call."""
    span, started, received = tracer.begin_call(call), perf_counter(), list[bytes]()
    try:
        async with aclosing(chunks):
            # Only the first chunk sends a request. The span must not be active at a `yield`, which
            # continues in the code of the consumer.
            with span.active():
                first = await anext(chunks, None)
            if first is not None:
                call.first_seconds = perf_counter() - started
                received.append(first)
                yield first
                async for chunk in chunks:
                    received.append(chunk)
                    yield chunk
    except BaseException as error:
        span.end(error)
        raise
    try:
        completed = from_chunks(received)
    except GenerationError as error:
        span.end(error)
        return
    call.set_reply(completed)
    span.end()
