"""What a compressor and a store of compressed passages are known by, without torch."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bottega.errors import LoadError, SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.controls import SwappedRetriever
from bottega.evaluation.labels import by_id
from bottega.generation import TransformersGenerator
from bottega.knowledge import TokenEmbedder, TowerEmbedder, TowerTokenEmbedder
from bottega.pipeline import Pipeline
from bottega.protocols import Generator, MultiVectorEmbedder, Retriever, Vectors
from bottega.recipes.racc import (
    COMPRESSOR,
    STORE,
    bundled_compressor_for,
    check_compressor_files,
    compression_searcher,
)
from bottega.types import Candidate, Query


def identities(compressor: Path | None, store: Path | None) -> dict[str, object]:
    """Of what is given: another one may lie at the same path. A compressor's settings name the
    weights of both models, and it refuses others, so that its digest tells them, too."""
    told: dict[str, object] = {}
    try:
        if compressor is not None:
            told["compressor_digest"] = _digest(compressor.expanduser())
        if store is not None:
            manifest = store.expanduser() / STORE
            told["store_manifest"] = manifest.read_text("utf-8", errors="replace")
    except OSError as error:
        raise LoadError(
            f"{error.filename} cannot be read: {error.strerror}", hint="check its permissions"
        ) from error
    return told


def _digest(folder: Path) -> str:
    told = hashlib.sha256()
    for name in COMPRESSOR:
        with (folder / name).open("rb") as file:
            told.update(hashlib.file_digest(file, "sha256").digest())
    return told.hexdigest()[:16]


CONCAT, RACC, ORACLE, FLAT, SWAPPED = "concat", "racc", "racc-oracle", "racc-flat", "racc-swapped"
COMPRESSED = (RACC, ORACLE, FLAT, SWAPPED)
CERTAIN = 1000.0  # a score beyond all others, whatever their scale


def compressed(
    name: str,
    pipeline: Pipeline,
    data: Benchmark,
    generator: Generator,
    folder: Path | None,
    hyper: TransformersGenerator | None = None,
    store: Path | None = None,
) -> Pipeline:
    """The pipeline with one of `COMPRESSED` in place of showing passages. `folder` is the
    compressor's, the bundled one if not given; `hyper` is what compresses, if it is not what
    answers; `store` holds passages that were compressed before. Raises `SettingError`."""
    retrieve = pipeline.retrieve
    assert retrieve is not None
    search = compression_searcher(
        folder or bundled_compressor_for(generator),
        generator,
        hyper=hyper,
        store=store,
        prompt=pipeline.prompt,
        parse=pipeline.parse,
        sampling=pipeline.sampling,
    )
    return replace(pipeline, retrieve=_controlled(name, retrieve, data), search=search)


def check_compressing(
    names: Sequence[str],
    hyper: object | None = None,
    store: Path | None = None,
    compressor: Path | None = None,
) -> None:
    """Raises `SettingError` for what none of the methods would use, `LoadError` and `StoreError`
    for folders that hold no compressor and no store."""
    parts = (("a hyper model", hyper), ("a store", store), ("a compressor", compressor))
    given = [told for told, one in parts if one is not None]
    if given and not set(COMPRESSED).intersection(names):
        raise SettingError(
            f"no method that is asked compresses, so there is nothing for {given[0]} to do",
            hint=f"leave it out, or ask {', '.join(COMPRESSED)}",
        )
    check_compressor_files(compressor, store)


def _controlled(name: str, retrieve: Retriever, data: Benchmark) -> Retriever:
    """`racc-oracle` is told which passage is right, `racc-flat` nothing about any, and
    `racc-swapped` reads what was found for another item."""
    if name == ORACLE:
        right = {id: item.tags["passage"] for id, item in by_id(data.items).items()}
        return RescoredRetriever(
            retrieve,
            lambda query, one: CERTAIN * (str(one.example.query.id) == right[str(query.id)]),
        )
    if name == FLAT:
        return RescoredRetriever(retrieve, lambda query, one: 0.0)
    return SwappedRetriever(retrieve, data) if name == SWAPPED else retrieve


class RescoredRetriever:
    """The same candidates with other scores."""

    def __init__(self, retrieve: Retriever, score: Callable[[Query, Candidate], float]) -> None:
        self._retrieve, self._score = retrieve, score

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await self._retrieve(query, k)
        return [replace(one, score=self._score(query, one)) for one in found]


class LateInteractionScorer:
    """The candidates of a retriever that does not compare, scored by late interaction."""

    def __init__(self, retrieve: Retriever, tokens: MultiVectorEmbedder | None = None) -> None:
        self._retrieve = retrieve
        self._tokens = tokens or bundled_token_embedder()

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await self._retrieve(query, k)
        return await asyncio.to_thread(self._scored, query, found)

    def _scored(self, query: Query, found: Sequence[Candidate]) -> list[Candidate]:
        asked = self._tokens.embed_queries([query])[0]
        told = self._tokens.embed_documents([one.example.query for one in found])
        return [
            replace(one, score=late_interaction_score(asked, rows))
            for one, rows in zip(found, told, strict=True)
        ]


def bundled_token_embedder() -> MultiVectorEmbedder:
    return TowerTokenEmbedder(TowerEmbedder.bundled(threads=1), TokenEmbedder.bundled())


def late_interaction_score(asked: Vectors, told: Vectors) -> float:
    """Of the tokens of a question and a passage, (tokens, dimension) each."""
    return float((asked @ told.T).max(axis=1).sum())
