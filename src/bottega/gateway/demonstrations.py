"""Demonstrations in a chat body: turns before the client's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bottega.gateway.ports import TierCapabilities
from bottega.openai_api.fields import DataUrl, messages_json
from bottega.openai_api.request import (
    IMAGE_TOKENS,
    MAX_IMAGE_TOKENS,
    Body,
    ChatRequest,
    non_ascii_bytes,
)
from bottega.openai_api.streams import CHARACTERS_PER_TOKEN
from bottega.types import Candidate, Example, Prompt


def fitting(
    shown: Sequence[Candidate], request: ChatRequest, capabilities: TierCapabilities
) -> list[Candidate]:
    """Return the demonstrations that the tier supports together with the request, in their order;
    the least similar ones are left out first."""
    kept = list(shown)
    while kept and not _fits(kept, request, capabilities):
        kept.remove(min(kept, key=lambda candidate: candidate.score))
    return kept


def augmented(request: ChatRequest, shown: Sequence[Candidate], data_url: DataUrl) -> Body:
    """Return the body with each demonstration as a user turn and an assistant turn after the
    instructions; retrieved text never becomes a system turn. Text and images have the order of the
    client's own. Blocks: encodes images."""
    if not shown:
        return request.body
    messages = request.raw_messages
    turns = [turn for one in shown for turn in _turns(one.example, data_url, request)]
    joined = [
        *messages[: request.instruction_count],
        *turns,
        *messages[request.instruction_count :],
    ]
    return request.with_messages(joined)


def prompted(request: ChatRequest, prompt: Prompt, data_url: DataUrl) -> Body:
    """Return the body with a pipeline's prompt in place of the last turn. The client's instructions
    precede the prompt; earlier turns directly precede the prompt's own question. Blocks: encodes
    images."""
    messages = request.raw_messages
    own = messages_json(prompt.messages, data_url)
    last = max((n for n, one in enumerate(own) if one["role"] == "user"), default=0)
    earlier = messages[request.instruction_count : -1]
    joined = [*messages[: request.instruction_count], *own[:last], *earlier, *own[last:]]
    return request.with_messages(joined)


def _turns(example: Example, data_url: DataUrl, request: ChatRequest) -> list[Body]:
    query, detail = example.query, _detail(request)
    parts_ = [_image_part(data_url(image), detail) for image in query.images]
    texts: list[Body] = [{"type": "text", "text": query.text}] if query.text else []
    parts = [*texts, *parts_] if request.text_first else [*parts_, *texts]
    content: object = parts if parts_ else query.text
    return [
        {"role": "user", "content": content},
        {"role": "assistant", "content": answer_text(example)},
    ]


def answer_text(example: Example) -> str:
    """Return the answer after its rationale, as the master gave it."""
    return f"{example.rationale}\nAnswer: {example.answer}" if example.rationale else example.answer


def _image_part(url: str, detail: str | None) -> Body:
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


def _detail(request: ChatRequest) -> str | None:
    """Return the detail of the request's last image, used for the examples, too."""
    return request.images[-1].detail if request.images else None


def expected_tokens(request: ChatRequest, shown: Sequence[Candidate]) -> int:
    """Estimate the prompt tokens of the request with its demonstrations."""
    examples = [candidate.example for candidate in shown]
    texts = sum(len(example.query.text) + len(answer_text(example)) for example in examples)
    images = sum(len(example.query.images) for example in examples)
    seen = images * IMAGE_TOKENS.get(_detail(request) or "", MAX_IMAGE_TOKENS)
    return request.prompt_tokens + math.ceil(texts / CHARACTERS_PER_TOKEN) + seen


def expected_non_ascii_bytes(request: ChatRequest, shown: Sequence[Candidate]) -> int:
    """Return the UTF-8 bytes outside ASCII of the request and its demonstrations."""
    texts = (text for one in shown for text in (one.example.query.text, answer_text(one.example)))
    return request.non_ascii_bytes + sum(map(non_ascii_bytes, texts))


def _fits(shown: Sequence[Candidate], request: ChatRequest, capabilities: TierCapabilities) -> bool:
    images = sum(len(candidate.example.query.images) for candidate in shown)
    if capabilities.images is not None and len(request.images) + images > capabilities.images:
        return False
    return capabilities.context is None or expected_tokens(request, shown) <= capabilities.context
