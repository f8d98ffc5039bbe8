"""Search for copies of images in another size or encoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from bottega import pixels
from bottega.image import Image

# Measured on photographs, drawings and frames of videos (docs/evaluation.md): encoders and sizes
# change all of an image a little, other objects in a scene change a part of it much.
MIN_COSINE = 0.95  # of the brightness steps
MAX_DIFFERENCE = 16.0  # root mean square, in levels
MAX_PEAK = (10.0, 2.5)  # in levels, and more per level of the difference
DECODED_SIDE = 64
Signatures = dict[str, np.ndarray]  # see `pixels.signature`, by the hash of the image


def signature_of(image: Image) -> np.ndarray:
    """Return the signature by which copies are found. Raises `ImageError`."""
    return pixels.signature(image.decode(at_least=DECODED_SIDE))


class CopySearch:
    """Search for copies of images, in other bytes, among `signatures`."""

    def __init__(self, signatures: Mapping[str, np.ndarray]) -> None:
        self._signatures, self._hashes = signatures, list(signatures)
        self._steps = np.stack([pixels.brightness_steps(one) for one in signatures.values()])

    def copies(self, sha256: str, signature: np.ndarray) -> Iterator[str]:
        """Yield the hashes of the copies of an image, the nearest first. Almost uniform images have
        none."""
        cosines = self._steps @ pixels.brightness_steps(signature)
        near = np.flatnonzero(cosines >= MIN_COSINE)
        for place in near[np.argsort(-cosines[near])]:
            found = self._hashes[place]
            if found != sha256 and _is_copy(signature, self._signatures[found]):
                yield found


def _is_copy(first: np.ndarray, second: np.ndarray) -> bool:
    differences = np.abs(first.astype(np.float32) - second).max(axis=2)
    mean = float(np.sqrt(np.square(differences).mean()))
    least, factor = MAX_PEAK
    return mean <= MAX_DIFFERENCE and float(differences.max()) <= least + factor * mean
