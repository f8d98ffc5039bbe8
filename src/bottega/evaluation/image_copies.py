"""Search for copies of images in another size or encoding, by signatures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from bottega import pixels
from bottega.image import Image

# Measured on photographs, drawings and frames of videos (docs/evaluation.md): another encoder or
# size changes all of an image a little, another object in a scene changes a part of it a lot.
MIN_COSINE = 0.95  # of the brightness steps
MAX_DIFFERENCE = 16.0  # root mean square, in levels
# Largest difference of a pixel: levels, plus levels per level of the root mean square.
MAX_PEAK = (10.0, 2.5)
DECODED_SIDE = 64
Signatures = dict[str, np.ndarray]  # see `pixels.signature`, by the hash of the image


def signature_of(image: Image) -> np.ndarray:
    """Return the signature by which copies are found (`pixels.signature`). Raises `ImageError` for
    a damaged image."""
    return pixels.signature(image.decode(at_least=DECODED_SIDE))


class CopySearch:
    """Search for copies of images, in other bytes, among `signatures`."""

    def __init__(self, signatures: Mapping[str, np.ndarray]) -> None:
        self._signatures, self._hashes = signatures, list(signatures)
        self._steps = np.stack([pixels.brightness_steps(one) for one in signatures.values()])

    def copies(self, sha256: str, signature: np.ndarray) -> Iterator[str]:
        """Yield the hashes of the copies of an image without its own, nearest first. Almost uniform
        images have none."""
        cosines = self._steps @ pixels.brightness_steps(signature)
        near = np.flatnonzero(cosines >= MIN_COSINE)
        for index in near[np.argsort(-cosines[near])]:
            found = self._hashes[index]
            if found != sha256 and _is_copy(signature, self._signatures[found]):
                yield found


def _is_copy(first: np.ndarray, second: np.ndarray) -> bool:
    differences = np.abs(first.astype(np.float32) - second).max(axis=2)
    rms = float(np.sqrt(np.square(differences).mean()))
    least, factor = MAX_PEAK
    return rms <= MAX_DIFFERENCE and float(differences.max()) <= least + factor * rms
