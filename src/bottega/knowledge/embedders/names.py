"""Embedders by name, as in command-line options, and the names of stored ones."""

from __future__ import annotations

import re
from typing import Literal

from bottega.bundled.photo_model import PHOTOS, PHOTOS_LITE2
from bottega.errors import SettingError
from bottega.knowledge.embedders.bundled_tower import TokenEmbedder, TowerEmbedder
from bottega.knowledge.embedders.composite import (
    DualEmbedder,
    JoinedEmbedder,
    PhotographDispatchEmbedder,
)
from bottega.knowledge.embedders.minilm import FOLDER, MINILM, minilm_folder
from bottega.knowledge.embedders.photo_embedder import (
    PHOTO_PARTS,
    PHOTOS_BOTH,
    PhotoEmbedder,
    default_photos,
)
from bottega.knowledge.embedders.pixel_embedder import PixelEmbedder
from bottega.knowledge.embedders.sentence import SentenceEmbedder
from bottega.knowledge.records import DEFAULT, StoredView
from bottega.protocols import Embedder

BUNDLED = "bundled"
BY_KIND = "by-kind"  # photos for photographs, bundled for other images, and words
NOTE = "embed"  # key of the note in which a knowledge base stores the name of its embedder
MODES: tuple[Literal["image", "text", "average"], ...] = ("image", "text", "average")
RAW_AVERAGE = "raw-average"  # of vectors that keep their lengths, as in Cache-of-Thought's code
TEXT_EMBEDDERS = ("words", MINILM)
QueryPart = Literal["image", "text"]  # of a query
TEXT_ONLY: frozenset[QueryPart] = frozenset(("text",))
IMAGE_ONLY: frozenset[QueryPart] = frozenset(("image",))
ALL_PARTS = TEXT_ONLY | IMAGE_ONLY
TOWER, TOKENS = r"tower-80 \S+", r"tokens-\d+ \S+"
PIXELS = "pixels"
# First parts of a joined embedder; the second one is `pixels`.
JOINABLE = (*PHOTO_PARTS, BUNDLED)
PHOTOS_AND_PIXELS = f"{PHOTOS}+{PIXELS}"
# Default weight of the pixels; accuracies at 0 to 0.4 differ by < 1 % (benchmarks/log).
WEIGHT = 0.3
JOINED_FINGERPRINT = r"joined (\S+) \((.+)\) \((.+)\)"
# Fingerprints identify the packaged embedders without loading them.
PACKAGED = {
    PIXELS: r"pixels-\d+ hog\d+ rgb\d+ dct\d+",
    BUNDLED: TOWER,
    PHOTOS: rf"{PHOTOS}-1280 \S+",
    PHOTOS_LITE2: rf"{PHOTOS_LITE2}-1280 \S+",
    PHOTOS_BOTH: rf"{PHOTOS_BOTH}-2560 \S+",
    "words": TOKENS,
    MINILM: rf"{FOLDER}@5076c6045d31 text unit",
    "dual": rf"dual \({TOWER}\) \({TOKENS}\)",
    BY_KIND: rf"dual \(by-kind 2 \({PHOTOS}-1280 \S+\) \({TOWER}\)\) \({TOKENS}\)",
}
EARLIER_PHOTOS = "tower-256 "  # in fingerprints of embedders that stored projected features


def packaged_name(fingerprint: str) -> str | None:
    """Return the name of the packaged embedder with this fingerprint, None for other embedders."""
    for name, pattern in PACKAGED.items():
        if re.fullmatch(pattern, fingerprint):
            return name
    if joined := re.fullmatch(JOINED_FINGERPRINT, fingerprint):
        weight, *parts = joined.groups()
        first, second = map(packaged_name, parts)
        if first in JOINABLE and second == PIXELS:
            return f"{first}+{second}:{weight}"
    return None


def joined_parts(spec: str) -> tuple[str, float] | None:
    """Return the first embedder and the weight of the pixels in a name such as `photos+pixels:0.3`,
    None for other names. Raises `SettingError` for a weight that is not between 0 and 1."""
    name, colon, text = spec.partition(":")
    first, _, second = name.partition("+")
    if first not in JOINABLE or second != PIXELS:
        return None
    try:
        weight = float(text) if colon else WEIGHT
        if not 0 < weight < 1:
            raise ValueError
    except ValueError as error:
        raise SettingError(
            f"the weight of the pixels must be between 0 and 1, got {text!r}",
            hint=f"use e.g. {name}:{WEIGHT}",
        ) from error
    return first, weight


def photo_tower(spec: str) -> str | None:
    """Return the photograph embedder whose vectors an embedder contains, None if there is none."""
    joined = joined_parts(spec)
    name = joined[0] if joined else spec
    return name if name in PHOTO_PARTS else None


def earlier_photos(fingerprint: str) -> str | None:
    """Return the name of the embedder that replaces an embedder of photographs of an earlier
    version, None for other fingerprints."""
    if "by-kind (" in fingerprint:
        return BY_KIND
    return default_photos() if EARLIER_PHOTOS in fingerprint else None


def note_of(view: StoredView) -> str:
    """Return the key of the note that names the view's embedder."""
    # A new embedder changes the view's number, so an old note never applies to it.
    return NOTE if view.name == DEFAULT else f"{NOTE}.{view.number}"


def parts_read(spec: str) -> frozenset[QueryPart]:
    """Return the parts of a query that this embedder compares."""
    if spec in TEXT_EMBEDDERS or spec.endswith(":text"):
        return TEXT_ONLY
    return ALL_PARTS if spec in ("dual", BY_KIND) or average_parts(spec)[1] else IMAGE_ONLY


def reads_text_only(spec: str) -> bool:
    """Return whether this embedder ignores images."""
    return parts_read(spec) == TEXT_ONLY


def average_parts(spec: str) -> tuple[str, bool]:
    """Return the model of a name that averages image and text, and True; else the name and
    False."""
    for mode in (":average", f":{RAW_AVERAGE}"):
        if spec.endswith(mode):
            return spec.removesuffix(mode), True
    return spec, False


def open_embedder(spec: str) -> Embedder:
    """Return the embedder of a name: `photos`, `photos-lite2`, `photos-both`, `bundled`, `pixels`,
    `photos+pixels:WEIGHT`, `words`, `minilm`, `dual`, `by-kind`, or a sentence-transformers id
    or folder followed by `:image` (default), `:text`, `:average` or `:raw-average`. Blocks while it
    loads."""
    if joined := joined_parts(spec):
        first, weight = joined
        return JoinedEmbedder(open_embedder(first), PixelEmbedder(), weight)
    if spec == PIXELS:
        return PixelEmbedder()
    if spec == "words":
        return TokenEmbedder.bundled()
    if spec == MINILM:
        return SentenceEmbedder(minilm_folder(), mode="text")
    if spec == "dual":
        return DualEmbedder(open_embedder(BUNDLED), open_embedder("words"))
    if spec == BUNDLED:
        return TowerEmbedder.bundled(threads=1)
    if spec in PHOTO_PARTS:
        return PhotoEmbedder(spec)
    if spec == BY_KIND:
        images = PhotographDispatchEmbedder(open_embedder(PHOTOS), open_embedder(BUNDLED))
        return DualEmbedder(images, open_embedder("words"))
    if spec.endswith(f":{RAW_AVERAGE}"):
        model = spec.removesuffix(f":{RAW_AVERAGE}")
        return SentenceEmbedder(model, mode="average", average="raw", normalize=False)
    for mode in MODES:
        if spec.endswith(f":{mode}"):
            return SentenceEmbedder(spec.removesuffix(f":{mode}"), mode=mode)
    return SentenceEmbedder(spec, mode="image")
