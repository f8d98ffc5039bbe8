"""Requests with demonstrations: as bodies for tiers, and as prompts for traces and searches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bottega.gateway.ports import TierCapabilities
from bottega.gateway.request.bill import answer_text, expected_tokens
from bottega.image import Image
from bottega.openai_api.fields import DataUrl, messages_json
from bottega.openai_api.request import (
    INSTRUCTION_ROLES,
    Body,
    ChatMessage,
    ChatRequest,
    ImagePart,
    TextPart,
)
from bottega.types import Candidate, Example, Message, Prompt, Query


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
    """Return the request with its demonstrations as a prompt. `images` are those of the request by
    URL."""
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
