"""One batch on its way into a knowledge base."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bottega.errors import EmbeddingError, ImageError
from bottega.image import CHECKED_SIDE
from bottega.knowledge.bad import OnBad
from bottega.knowledge.ports import RowStore
from bottega.knowledge.records import identity, with_id
from bottega.protocols import Embedder, Vectors
from bottega.types import Example


def store_batch(
    examples: Sequence[Example], rows: RowStore, embed: Embedder, on_bad: OnBad
) -> tuple[int, int]:
    """How many were new, and how many bad; the rest is stored already."""
    fresh = _unknown(examples, rows)
    decoded = [example for example in fresh if _decodes(example, on_bad)]
    sound, vectors = _embedded(decoded, embed, on_bad)
    new = rows.put(sound, vectors, embed.fingerprint) if sound else 0
    return new, len(fresh) - len(sound)


def _unknown(examples: Sequence[Example], rows: RowStore) -> list[Example]:
    named: dict[str, Example] = {}
    for example in examples:
        named.setdefault(identity(example), example)
    known = rows.keys(named)
    return [with_id(example, id) for id, example in named.items() if id not in known]


def _decodes(example: Example, on_bad: OnBad) -> bool:
    # Also for embedders that read only the text: a demonstration shows the image later.
    try:
        for image in example.query.images:
            image.decode(at_least=CHECKED_SIDE)
    except ImageError as error:
        on_bad(error)
        return False
    return True


def _embedded(
    examples: list[Example], embed: Embedder, on_bad: OnBad
) -> tuple[list[Example], Vectors]:
    """All at once; if that fails one by one, so that only the culprits are left out."""
    try:
        return examples, _vectors(examples, embed)
    except EmbeddingError:
        sound = [example for example in examples if _embeds(example, embed, on_bad)]
        return sound, _vectors(sound, embed)


def _embeds(example: Example, embed: Embedder, on_bad: OnBad) -> bool:
    try:
        _vectors([example], embed)
    except EmbeddingError as error:
        name = example.source or repr(example.query.text)
        on_bad(EmbeddingError(f"{name}: {error}", hint=error.hint))
        return False
    return True


def _vectors(examples: Sequence[Example], embed: Embedder) -> Vectors:
    if not examples:
        return np.empty((0, embed.dimension), np.float32)
    vectors = embed.embed([example.query for example in examples])
    if vectors.shape != (len(examples), embed.dimension):
        raise EmbeddingError(
            f"{embed.fingerprint} returned {vectors.shape} for {len(examples)} examples",
            hint=f"an embedder returns one row of {embed.dimension} numbers for each",
        )
    if not np.isfinite(vectors).all():
        raise EmbeddingError(
            f"{embed.fingerprint} returned numbers that are not finite",
            hint="check its weights; half precision may overflow",
        )
    return vectors
