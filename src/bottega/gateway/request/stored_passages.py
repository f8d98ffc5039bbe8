"""Compressed passages (RACC) of a local tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bottega.pipeline import run_sync
from bottega.protocols import Generator
from bottega.recipes.racc import CompressorLoader, bundled_compressor_for, compressor_loader
from bottega.types import Candidate, Compression, Prefix, Query

FETCH = 50  # retrieved candidates, of which some may not be in the store


def open_passages(store: Path, compressor: Path | None, base: Generator) -> StoredPassages:
    """Open a store of compressed passages and load the model. Raises `LoadError` for a compressor
    of another model, and `StoreError` for a store of another compressor."""
    folder = compressor or bundled_compressor_for(base)
    loader = compressor_loader(folder, base, store=store)
    run_sync(loader.open())
    return StoredPassages(loader)


@dataclass(frozen=True)
class StoredPassages:
    """Passages in a store, for the tier of their model."""

    loader: CompressorLoader
    fetch: int = FETCH

    async def read(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> tuple[list[Candidate], Prefix, Compression] | None:
        found = await self.loader.stored_prefix(query, candidates, k)
        return found and (*found, self.loader.compression(found[1]))
