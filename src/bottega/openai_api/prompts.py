"""Prompts and sampling parameters as fields of a chat-completions body."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bottega.image import Image
from bottega.types import Message, Sampling

DataUrl = Callable[[Image], str]


def sampling_fields(sampling: Sampling) -> dict[str, object]:
    """Return the sampling parameters as fields of a body, None for those to leave out."""
    return {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "n": sampling.n if sampling.n > 1 else None,
        "seed": sampling.seed,
        "stop": list(sampling.stop) or None,
    }


def messages_json(messages: Sequence[Message], data_url: DataUrl) -> list[dict[str, object]]:
    """Return the messages of a prompt as JSON, images as data URLs. Blocks: encodes images."""
    return [_message_json(message, data_url) for message in messages]


def _message_json(message: Message, data_url: DataUrl) -> dict[str, object]:
    parts = [_part_json(part, data_url) for part in message.parts]
    is_plain = len(parts) == 1 and parts[0]["type"] == "text"
    return {"role": message.role, "content": parts[0]["text"] if is_plain else parts}


def _part_json(part: str | Image, data_url: DataUrl) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": data_url(part)}}
