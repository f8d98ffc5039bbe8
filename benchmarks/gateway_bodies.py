"""Request bodies of benchmarks/gateway.py: a question of about 300 bytes, and a question about a
photograph of 500 KB as a data URL.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from benchmarks.gateway_load import DIGITS

SLOT = "~" * DIGITS
NOTE = 48
"""Bytes in the image's comment, where a slot changes the bytes but not the pixels."""
LENGTH = 500_000
SYSTEM = {
    "role": "system",
    "content": "You are a helpful assistant. Answer briefly and in English.",
}


@dataclass(frozen=True)
class Body:
    name: str
    content: object
    """Of the user's turn, with slots."""

    def written(
        self, folder: Path, model: str, more: Mapping[str, object]
    ) -> tuple[str, list[int]]:
        """Write a file and return it with the positions of its slots."""
        turns = [SYSTEM, {"role": "user", "content": self.content}]
        body = {"model": model, "messages": turns, "temperature": 0, "max_tokens": 64, **more}
        text = json.dumps(body)
        path = folder / f"{self.name}-{model.replace('/', '-')}.json"
        path.write_text(text)
        return str(path), slots(text)


def slots(text: str) -> list[int]:
    found, at = [], text.find(SLOT)
    while at >= 0:
        found.append(at)
        at = text.find(SLOT, at + DIGITS)
    return found


QUESTION = f"Case {SLOT}: what is on the left side of this picture, and what colour does it have?"


def text_body() -> Body:
    return Body("text", [{"type": "text", "text": QUESTION}])


def image_body() -> Body:
    url = f"data:image/jpeg;base64,{encoded(photograph())}"
    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return Body("image", [{"type": "text", "text": QUESTION}, image])


def photograph(length: int = LENGTH) -> bytes:
    """Return a JPEG of about `size` bytes: noise of matching dimensions."""
    side = 64
    while len(jpeg := noise(side)) < length:
        side = max(side + 8, int(side * (length / len(jpeg)) ** 0.5))
    return jpeg


def noise(side: int) -> bytes:
    pixels = np.random.default_rng(side).integers(0, 256, (side, side, 3), np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def encoded(jpeg: bytes) -> str:
    """Return base64 with a slot inside a leading comment; any digits there are valid base64."""
    note = b"\0" * NOTE
    commented = jpeg[:2] + b"\xff\xfe" + (NOTE + 2).to_bytes(2, "big") + note + jpeg[2:]
    text = base64.b64encode(commented).decode()
    at = 12  # of base 64: nine bytes, of which six are headers
    assert text[at : at + DIGITS] == "A" * DIGITS
    return text[:at] + SLOT + text[at + DIGITS :]
