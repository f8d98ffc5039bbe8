"""Reasoning before answers: the instruction in a request, and the final answer of its reply.

With `cache.reasoning`, all tiers are instructed to reason, as in Cache-of-Thought. The client gets
the final answer alone; the cache stores both.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, cast

import orjson

from bottega.openai_api.request import LIMIT_FIELDS, Body, ChatRequest
from bottega.openai_api.response import ChatCompletion
from bottega.openai_api.streams import count_tokens, from_chunks, to_chunks
from bottega.parsing import find_stated_answers, rationale_before, strip_thinking
from bottega.parsing.answers import WORDS
from bottega.prompting.turns import ASK_REASONING
from bottega.types import Answer, Completion

# A client with a smaller limit wants a brief answer; reasoning would use it up.
MIN_TOKENS = 256
# Fields that need the whole text or several choices, or that end it within the reasoning.
NEEDS_WHOLE = ("logprobs", "response_format", "prediction", "stop")
AROUND = "*_` \t\n"  # Markdown around a marker or its answer

Trim = Callable[[ChatCompletion], tuple[ChatCompletion, str | None]]


def may_reason(request: ChatRequest) -> bool:
    """Return whether a reply may contain reasoning before its answer."""
    body = request.body
    limits = [limit for name in LIMIT_FIELDS if isinstance(limit := body.get(name), int)]
    return (
        body.get("n") in (None, 1)
        and not any(body.get(name) for name in NEEDS_WHOLE)
        and min(limits, default=MIN_TOKENS) >= MIN_TOKENS
    )


def with_instruction(body: Body) -> Body:
    """Return the body with the instruction to reason after the last turn's text."""
    *earlier, last = cast(list[dict[str, Any]], body["messages"])
    content = last["content"]
    if isinstance(content, str):
        instructed: object = f"{content}\n{ASK_REASONING}"
    else:
        instructed = [*content, {"type": "text", "text": ASK_REASONING}]
    return {**body, "messages": [*earlier, {**last, "content": instructed}]}


def final_answer(completion: Completion) -> Answer | None:
    """Return the text after "Answer:", with the text before it as its rationale, without thinking;
    None without such a line, or with several of them and other text between: the client may have
    asked several questions."""
    reply = strip_thinking(completion.text)
    stated = find_stated_answers(reply)
    if not stated or completion.finish_reason != "stop":
        return None
    between = reply[stated[0].end() : stated[-1].start()]
    text = reply[stated[-1].start(1) :].strip(AROUND)
    if not text or WORDS.search(between):
        return None
    return Answer(text, rationale=rationale_before(reply, stated) or "")


def trim_reply(
    completed: ChatCompletion, read: Callable[[Completion], Answer | None] = final_answer
) -> tuple[ChatCompletion, str | None]:
    """Return the reply with its final answer as the whole text, and the rationale; the reply
    unchanged, and None, if it has none. The usage stays that of the whole reply."""
    if len(completed.completions) != 1:
        return completed, None
    [completion] = completed.completions
    answer = read(completion)
    if answer is None or not answer.valid or answer.rationale is None:
        return completed, None
    reply = orjson.loads(completed.payload)
    [choice] = reply["choices"]
    choice["message"]["content"] = answer.text
    brief = Completion(answer.text, completion.finish_reason, completion.logprob)
    payload = orjson.dumps(reply)
    rationale = answer.rationale or None
    return ChatCompletion(payload, completed.model, (brief,), completed.usage), rationale


@dataclass
class ReceivedChunks:
    """Chunks that a tier has sent: they are billed if the client leaves. `first_text` is the moment
    of the first text, on the clock of `perf_counter`."""

    chunks: list[bytes] = field(default_factory=list)
    first_text: float | None = None

    def add(self, chunk: bytes) -> None:
        self.chunks.append(chunk)
        if self.first_text is None and count_tokens([chunk]):
            self.first_text = perf_counter()


async def trim_stream(
    chunks: AsyncGenerator[bytes],
    trim: Trim,
    keep: Callable[[str | None], None],
    received: ReceivedChunks,
) -> AsyncGenerator[bytes]:
    """Yield the chunks of the trimmed reply once the stream has ended; `keep` receives the
    rationale, `received` each chunk as it arrives. Raises `ServerFailedError` for a stream that was
    cut off."""
    try:
        async for chunk in chunks:
            received.add(chunk)
        whole = from_chunks(received.chunks)
    finally:
        await chunks.aclose()
    completed, rationale = trim(whole)
    keep(rationale)
    for chunk in to_chunks(completed.payload, include_usage=False):
        yield chunk
    if completed.usage is not None:
        yield to_chunks(completed.payload, include_usage=True)[-1]
