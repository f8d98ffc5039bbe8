"""Replies from which it can be told whose they are: each is made of the question that it answers,
of the model and of a number that no other reply has."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two, three and four bytes in UTF-8, so that streams are cut inside a character.
WORDS = ("ochre", "verd", "fresco", "bottega", "garzone", "à côté", "絵の具", "🖌️", "gesso", "ciò")
SPOKEN = re.compile(r"Answer ([0-9a-f]{16}) of (\S+), reply (\d+):")


@dataclass(frozen=True)
class Spoken:
    question: str
    """Its digest."""
    model: str
    number: int

    @property
    def text(self) -> str:
        seed = hashlib.sha256(f"{self.question}{self.model}{self.number}".encode()).digest()
        words = [WORDS[byte % len(WORDS)] for byte in seed[: 4 + seed[31] % 28]]
        return f"Answer {self.question} of {self.model}, reply {self.number}: {' '.join(words)}."


def heard(text: str) -> Spoken | None:
    """Whose reply this is, if it is a whole one."""
    spoken = opening(text)
    return spoken if spoken is not None and spoken.text == text else None


def is_beginning(text: str, question: str) -> bool:
    """Whether it may be the beginning of an answer to this question."""
    spoken = opening(text)
    if spoken is None:
        return f"Answer {question} of ".startswith(text) or text.startswith(
            f"Answer {question} of "
        )
    return spoken.question == question and spoken.text.startswith(text)


def opening(text: str) -> Spoken | None:
    match = SPOKEN.match(text)
    return None if match is None else Spoken(match[1], match[2], int(match[3]))


def digest(text: str, images: Sequence[bytes] = ()) -> str:
    whole = hashlib.sha256(text.encode())
    for image in images:
        whole.update(hashlib.sha256(image).digest())
    return whole.hexdigest()[:16]


def asked(messages: Sequence[Mapping[str, object]]) -> str:
    """The digest of the last user turn: what stands before it may be demonstrations."""
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
