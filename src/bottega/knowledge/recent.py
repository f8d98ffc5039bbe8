"""Examples that were read lately: the same ones are nearest to many questions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from threading import Lock

from bottega.image import KEEP_DECODED_UP_TO
from bottega.types import Example

MOST_BYTES = 64 << 20
BYTES_BESIDE_IMAGES = 2048
# An image may come to hold its pixels and its bytes in base64, beside its bytes.
BYTES_PER_PIXEL = 3
COPIES_OF_BYTES = 3


class Recent:
    """By key, which never means another example: nothing in here can be out of date."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._examples: dict[int, Example] = {}
        self._lock = Lock()

    def among(self, keys: Collection[int]) -> dict[int, Example]:
        # Without the lock, and without noting who was asked for: this is on every search's way.
        get = self._examples.get
        return {key: example for key in keys if (example := get(key)) is not None}

    def __len__(self) -> int:
        return len(self._examples)

    def keep(self, examples: Mapping[int, Example], most: int) -> None:
        """Beyond `most` they are all forgotten: that many are not there any more."""
        with self._lock:
            if len(self._examples) + len(examples) > most:
                self._examples.clear()
                self._bytes = 0
            for key, example in examples.items():
                if key not in self._examples:
                    self._examples[key] = example
                    self._bytes += _size(example)
            while self._bytes > self._most_bytes:
                oldest = next(iter(self._examples))
                self._bytes -= _size(self._examples.pop(oldest))

    def clear(self) -> None:
        with self._lock:
            self._examples.clear()
            self._bytes = 0


def _size(example: Example) -> int:
    size = BYTES_BESIDE_IMAGES + len(example.answer) + len(example.rationale or "")
    for image in example.query.images:
        pixels = image.width * image.height
        size += COPIES_OF_BYTES * len(image.data)
        size += BYTES_PER_PIXEL * pixels if pixels <= KEEP_DECODED_UP_TO else 0
    return size
