"""Marked replies: each contains a digest of its question, its model and a unique
number."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two, three and four bytes in UTF-8, so streams are cut inside a character.
WORDS = ("ochre", "verd", "fresco", "bottega", "garzone", "à côté", "絵の具", "🖌️", "gesso", "ciò")
MARK = re.compile(r"Answer ([0-9a-f]{16}) of (\S+), reply (\d+):")


@dataclass(frozen=True)
class MarkedReply:
    """Reply with a mark."""

    question: str  # a digest
    model: str
    number: int

    @property
    def text(self) -> str:
        seed = hashlib.sha256(f"{self.question}{self.model}{self.number}".encode()).digest()
        words = [WORDS[byte % len(WORDS)] for byte in seed[: 4 + seed[31] % 28]]
        return f"Answer {self.question} of {self.model}, reply {self.number}: {' '.join(words)}."


def parse_reply(text: str) -> MarkedReply | None:
    """Parse a complete reply; None if the text is not one."""
    reply = parse_start(text)
    return reply if reply is not None and reply.text == text else None


def is_start(text: str, question: str) -> bool:
    """Return whether the text may be the start of an answer to this question."""
    reply = parse_start(text)
    if reply is None:
        return f"Answer {question} of ".startswith(text) or text.startswith(
            f"Answer {question} of "
        )
    return reply.question == question and reply.text.startswith(text)


def parse_start(text: str) -> MarkedReply | None:
    match = MARK.match(text)
    return None if match is None else MarkedReply(match[1], match[2], int(match[3]))


def digest(text: str, images: Sequence[bytes] = ()) -> str:
    combined = hashlib.sha256(text.encode())
    for image in images:
        combined.update(hashlib.sha256(image).digest())
    return combined.hexdigest()[:16]


def question_digest(messages: Sequence[Mapping[str, object]]) -> str:
    """Return the digest of the last user turn; earlier turns may be demonstrations."""
    turns = [turn["content"] for turn in messages if turn.get("role") == "user"]
    parts = turns[-1] if turns else ""
    if isinstance(parts, str):
        return digest(parts)
    assert isinstance(parts, list)
    text = "".join(part["text"] for part in parts if part.get("type") == "text")
    images = [part["image_url"] for part in parts if part.get("type") == "image_url"]
    return digest(text, [decoded(image) for image in images])


def decoded(image: object) -> bytes:
    url = image["url"] if isinstance(image, Mapping) else image
    assert isinstance(url, str)
    return base64.b64decode(url.partition(",")[2])
