"""Chat jobs: the query of a request, its body and prompt with demonstrations, and its result."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from bottega._util.identity import ID_LENGTH, json_digest
from bottega.gateway.config.overrides import Overrides
from bottega.gateway.ports import RequestRecord, Tenant, TierCapabilities, UpstreamCall
from bottega.gateway.request.bill import Bill, answer_text, expected_tokens
from bottega.gateway.state.response_cache import TRANSPORT_FIELDS
from bottega.image import Image
from bottega.openai_api.request import (
    INSTRUCTION_ROLES,
    Body,
    ChatMessage,
    ChatRequest,
    DataUrl,
    ImagePart,
    TextPart,
    messages_json,
)
from bottega.openai_api.response import ChatCompletion
from bottega.openai_api.streams import to_chunks
from bottega.pipeline import Pipeline
from bottega.types import Candidate, Example, Message, Prompt, Query

# Titles, tags and follow-ups that chat front ends request on their own.
BACKGROUND = r"\A\s*#{1,3} Task:\s"
# Fields that change a reply no more than chance does.
TUNING = {
    *TRANSPORT_FIELDS,
    "frequency_penalty",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "model",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "reasoning_effort",
    "response_format",
    "seed",
    "service_tier",
    "store",
    "temperature",
    "top_logprobs",
    "top_p",
}
MAX_MILD_TEMPERATURE = 1.0  # above it, replies may differ in meaning


@dataclass(slots=True)
class ChatJob:
    """One request. `bypass` is the reason why it gets no demonstrations. Without a `query`, the
    client's body is forwarded unchanged; without a `key`, the reply is not repeated.
    `may_use_master`: whether a request without a query may reach the master."""

    request: ChatRequest
    overrides: Overrides
    bill: Bill
    bypass: str | None
    may_use_master: bool
    query: TenantQuery | None = None
    key: str | None = None

    @property
    def record(self) -> RequestRecord:
        return self.bill.record

    @property
    def escalates(self) -> bool:
        """Whether the pipeline may send this request on to another tier after an answer."""
        return (
            self.query is not None
            and self.query.pipeline.escalate is not None
            and self.overrides.tier is None
            and self.request.body.get("n") in (None, 1)
        )

    @property
    def confidence_fields(self) -> Mapping[str, Body]:
        """Request fields by tier that report the confidence of an answer, if it may escalate."""
        if self.query is None or not self.escalates:
            return {}
        return self.query.tenant.confidence_fields


@dataclass(slots=True)
class TenantQuery:
    """Query of a request and the tenant whose examples it may get, as the variant of the request
    sees it. `images` are all images of the request by URL. `opened` is the tenant that the pool
    returned, which keeps the namespace open."""

    query: Query
    tenant: Tenant
    images: Mapping[str, Image]
    opened: Tenant

    @property
    def pipeline(self) -> Pipeline:
        return self.tenant.pipeline


@dataclass(slots=True)
class ChatResult:
    """Complete reply. `dismissed` are the earlier replies of tiers that were not confident
    enough, `failed` the names of tiers that failed."""

    call: UpstreamCall
    completed: ChatCompletion
    dismissed: tuple[tuple[UpstreamCall, ChatCompletion], ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(slots=True)
class ChatStream:
    """Stream of a reply that has begun; `chunks` includes the first chunk. `started` is the
    `perf_counter` time at which the upstream call started."""

    call: UpstreamCall
    chunks: AsyncGenerator[bytes]
    started: float
    failed: tuple[str, ...] = ()


async def replayed_chunks(payload: bytes) -> AsyncGenerator[bytes]:
    """Yield the chunks of a complete reply, with its usage."""
    for chunk in to_chunks(payload, include_usage=True):
        yield chunk


def to_query(request: ChatRequest, images: Sequence[Image], choices: tuple[str, ...] = ()) -> Query:
    """Return the query of the last user turn, with all images of the conversation."""
    return Query(request.question, tuple(images), choices, context=context_of(request))


def context_of(request: ChatRequest) -> str:
    """Return a digest of everything besides the conversation that the answer depends on; empty if
    there is nothing. Unknown fields count: on some servers they can determine the answer."""
    body = request.body
    instructions, output_format = request.instructions, body.get("response_format")
    control = {
        name: value
        for name in body.keys() - TUNING
        if (value := body[name]) not in (None, [], {}, "", 0)
    }
    if cast(float, body.get("temperature") or 0) > MAX_MILD_TEMPERATURE:
        control["temperature"] = "hot"
    if not instructions and output_format is None and not control:
        return ""
    parts: list[object] = [[_instruction(message) for message in instructions], output_format]
    parts += [control] if control else []
    return json_digest(parts, sort_keys=True)[:ID_LENGTH]


def _instruction(message: ChatMessage) -> object:
    images = [hashlib.sha256(image.url.encode()).hexdigest() for image in message.images]
    return [message.text, *images] if images else message.text


def bypass_reason(request: ChatRequest, background: re.Pattern[str]) -> str | None:
    """Return why a request cannot get demonstrations, None if it can."""
    if request.has_tools:
        return "tools"
    if request.has_audio:
        return "audio"
    last = request.last_user_turn
    if last is None:
        return "no question"
    if request.has_other_parts:
        return "parts"
    if background.search(request.question):
        return "background"
    return None if request.question.strip() or last.images else "empty question"


def fitting(
    shown: Sequence[Candidate], request: ChatRequest, capabilities: TierCapabilities
) -> list[Candidate]:
    """Return the demonstrations that the tier supports together with the request, in their order;
    the least similar ones are left out first."""
    kept = list(shown)
    while kept and not _fits(kept, request, capabilities):
        kept.remove(min(kept, key=lambda candidate: candidate.score))
    return kept


def without_rationales(shown: Sequence[Candidate]) -> list[Candidate]:
    """Return the demonstrations with their answers alone."""
    return [replace(one, example=replace(one.example, rationale=None)) for one in shown]


def augmented(request: ChatRequest, shown: Sequence[Candidate], data_url: DataUrl) -> Body:
    """Return the body with each demonstration as a user turn and an assistant turn after the
    instructions; retrieved text never becomes a system turn. Text and images have the order of the
    client's own. Blocks: encodes images."""
    if not shown:
        return request.body
    messages = request.raw_messages
    turns = [turn for one in shown for turn in _turns(one.example, data_url, request)]
    count = request.instruction_count
    return request.with_messages([*messages[:count], *turns, *messages[count:]])


def prompted(request: ChatRequest, prompt: Prompt, data_url: DataUrl) -> Body:
    """Return the body with a pipeline's prompt in place of the last turn. The client's instructions
    precede the prompt; earlier turns directly precede the prompt's own question. Blocks: encodes
    images."""
    messages = request.raw_messages
    own = messages_json(prompt.messages, data_url)
    # The prompter may end with an assistant turn, so the question is not always the last turn.
    last = max((n for n, one in enumerate(own) if one["role"] == "user"), default=0)
    earlier = messages[request.instruction_count : -1]
    joined = [*messages[: request.instruction_count], *own[:last], *earlier, *own[last:]]
    return request.with_messages(joined)


def _turns(example: Example, data_url: DataUrl, request: ChatRequest) -> list[Body]:
    query, detail = example.query, request.image_detail
    more = {} if detail is None else {"detail": detail}
    images: list[Body] = [
        {"type": "image_url", "image_url": {"url": data_url(image), **more}}
        for image in query.images
    ]
    texts: list[Body] = [{"type": "text", "text": query.text}] if query.text else []
    parts = [*texts, *images] if request.text_first else [*images, *texts]
    content: object = parts if images else query.text
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": answer_text(example)},
    ]


def _fits(shown: Sequence[Candidate], request: ChatRequest, capabilities: TierCapabilities) -> bool:
    images = sum(len(candidate.example.query.images) for candidate in shown)
    if capabilities.images is not None and len(request.images) + images > capabilities.images:
        return False
    reply = request.total_tokens - request.prompt_tokens
    expected = expected_tokens(request, shown) + reply
    return capabilities.context is None or expected <= capabilities.context


def request_prompt(
    request: ChatRequest, images: Mapping[str, Image], shown: Sequence[Candidate]
) -> Prompt:
    """Return the request with its demonstrations as a prompt. `images` maps URLs to the images of
    the request."""
    count = request.instruction_count
    messages = [_message(message, images) for message in request.messages]
    return Prompt((*messages[:count], *_demonstrations(request, shown), *messages[count:]))


def question_prompt(
    request: ChatRequest, images: Mapping[str, Image], query: Query, shown: Sequence[Candidate]
) -> Prompt:
    """Return a prompt for another question with the instructions of the request."""
    instructions = [_message(message, images) for message in request.instructions]
    return Prompt((*instructions, *_demonstrations(request, shown), _question(request, query)))


def _demonstrations(request: ChatRequest, shown: Sequence[Candidate]) -> Iterable[Message]:
    for example in (one.example for one in shown):
        yield _question(request, example.query)
        yield Message("assistant", (answer_text(example),))


def _question(request: ChatRequest, query: Query) -> Message:
    images, text = query.images, query.text
    return Message("user", (text, *images) if request.text_first else (*images, text))


def _message(message: ChatMessage, images: Mapping[str, Image]) -> Message:
    parts: list[str | Image] = []
    for part in message.parts or ():
        if isinstance(part, TextPart):
            parts.append(part.text)
        elif isinstance(part, ImagePart):
            parts.append(images[part.url])
    if message.role in INSTRUCTION_ROLES:
        return Message("system", tuple(parts))
    return Message("assistant" if message.role == "assistant" else "user", tuple(parts))
