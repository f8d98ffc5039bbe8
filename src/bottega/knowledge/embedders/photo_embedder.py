"""Embedder of photographs, from published vision towers on ONNX Runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from bottega._util.caching import LRUCache
from bottega.bundled.efficientnet import FEATURES, LITE2, weights_installed
from bottega.bundled.onnx_tower import OnnxTower
from bottega.bundled.photo_model import NETWORKS, PHOTOS, PHOTOS_LITE2, decoder_weights
from bottega.errors import SettingError
from bottega.image import Image
from bottega.knowledge.embedders.pixel_embedder import mean_vectors
from bottega.knowledge.embedders.sentence import loading_model
from bottega.knowledge.records import unit
from bottega.pixels import scale_of
from bottega.protocols import Vectors
from bottega.types import Query

PHOTOS_BOTH = "photos-both"
# The photograph models whose networks compute the parts of a vector.
PHOTO_PARTS = {
    PHOTOS: (PHOTOS,),
    PHOTOS_LITE2: (PHOTOS_LITE2,),
    PHOTOS_BOTH: (PHOTOS, PHOTOS_LITE2),
}
MATCHED = 256  # dimensions of the vectors by which the photograph models compare images
MAX_RECENT = 1024  # images whose vectors are cached
WORKERS = 2  # threads of one call; each decodes an image and computes its vector
PREPROCESSING = "bicubic, central square, 1"  # a new version makes earlier vectors invalid


def default_photos() -> str:
    """Return the name of the best embedder of photographs for the installed weights."""
    return PHOTOS_BOTH if weights_installed(LITE2) else PHOTOS


class PhotoEmbedder:
    """Image embedder from EfficientNet-Lite with ImageNet weights, without torch.

    `photos` is Lite0 and `photos-lite2` Lite2; `photos-both`, the default if the weights of both
    are installed, concatenates their vectors. A vector has the 1,280 features of the network, not
    scaled to length one; in `photos-both`, each part is divided by the typical length of its
    features. The shorter side of an image is scaled to the side of the network's images, and the
    central square is kept. Raises `MissingDependencyError` without the extra `[photos]`, and
    `ModelLoadError` for damaged weights.
    """

    def __init__(self, name: str | None = None) -> None:
        name = name or default_photos()
        if name not in PHOTO_PARTS:
            raise SettingError(
                f"embedder of photographs is unknown, got {name!r}",
                hint=f"use {', '.join(map(repr, PHOTO_PARTS))}",
            )
        self.parts = PHOTO_PARTS[name]
        self._networks = [NETWORKS[part] for part in self.parts]
        with loading_model(name):
            self._towers = [OnnxTower(network) for network in self._networks]
        self._lengths = [one.length if len(self.parts) > 1 else 1.0 for one in self._networks]
        self._recent: LRUCache[str, Vectors] = LRUCache(MAX_RECENT)
        described = f"{PREPROCESSING} {[one.sha256 for one in self._networks]} {self._lengths}"
        digest = hashlib.sha256(described.encode()).hexdigest()[:12]
        self.fingerprint = f"{name}-{self.dimension} {digest}"

    @property
    def dimension(self) -> int:
        return FEATURES * len(self.parts)

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return mean_vectors(queries, self._vectors, self.dimension)

    def image_vectors(self, sha256s: Collection[str]) -> dict[str, Vectors]:
        """Return the cached vectors of recently embedded images, by sha256."""
        found = {sha256: self._recent.get(sha256) for sha256 in sha256s}
        return {sha256: row for sha256, row in found.items() if row is not None}

    def features(self, rows: Vectors, part: str) -> Vectors:
        """Return the features (..., FEATURES) of one network from vectors (..., dimension), as the
        network computes them."""
        index = self.parts.index(part)
        features: Vectors = rows[..., index * FEATURES : (index + 1) * FEATURES]
        return features * np.float32(self._lengths[index])

    def _vectors(self, images: Sequence[Image]) -> Vectors:
        if len(images) == 1:
            return self._recent_vector(images[0])[None]
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="bottega-photos") as pool:
            return np.stack(list(pool.map(self._recent_vector, images)))

    def _recent_vector(self, image: Image) -> Vectors:
        row = self._recent.get(image.sha256)
        if row is None:
            row = self._vector(image)
            self._recent.put(image.sha256, row)
        return row

    def _vector(self, image: Image) -> Vectors:
        decoded: dict[int, Pillow.Image] = {}
        parts = []
        for network, tower, length in zip(self._networks, self._towers, self._lengths, strict=True):
            scale = scale_of((image.width, image.height), network.side)
            if scale not in decoded:
                decoded[scale] = image.decode_for_model(network.side)
            features = tower.features(central_square(decoded[scale], network.side))
            parts.append(features / np.float32(length))
        return np.concatenate(parts)


def central_square(image: Pillow.Image, side: int) -> NDArray[np.uint8]:
    """Return the pixels (side, side, 3) of the central square of an image whose shorter side is
    scaled to `side`."""
    shorter = min(image.size)
    width, height = (side * length // shorter for length in image.size)
    left, top = (width - side) // 2, (height - side) // 2
    scaled = image.resize((width, height), Pillow.Resampling.BICUBIC)
    return np.asarray(scaled.crop((left, top, left + side, top + side)))


def match_vectors(model: str, features: Vectors) -> Vectors:
    """Return the unit vectors (..., MATCHED) by which a photograph model compares images, from the
    features (..., FEATURES) of its network. The model's own projector computes the same."""
    matrix, offset = _projection(model)
    return unit(features @ matrix.T + offset)


@cache
def _projection(model: str) -> tuple[Vectors, Vectors]:
    from safetensors.numpy import load

    weights = load(decoder_weights(model))
    # The other rows are the negatives of these, because gelu(x) - gelu(-x) = x.
    layer = "model.multi_modal_projector.linear_1"
    matrix, offset = (weights[f"{layer}.{part}"][:MATCHED] for part in ("weight", "bias"))
    return matrix.astype(np.float32), offset.astype(np.float32)
