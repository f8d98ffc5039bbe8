"""Compression of passages into a store with a model in this process or in workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bottega._util.event_loops import BACKGROUND_LOOP
from bottega._util.executor import Executor, LocalExecutor, batched, computed_ahead
from bottega.cli.components import local_model
from bottega.cli.output import waiting
from bottega.compression import InputBuilder, Manifest, PassageCompressor, PassageStore, load
from bottega.errors import SettingError
from bottega.generation import TransformersGenerator
from bottega.generation.loaded import LoadedModel
from bottega.types import Example

BATCH = 64
AHEAD = 2  # calls per worker: one is computed while the next one is sent


def load_model(generator: TransformersGenerator) -> LoadedModel:
    async def load() -> LoadedModel:
        try:
            await generator.load()
            return generator.loaded
        finally:
            await generator.aclose()  # ends its thread; the model stays usable

    with waiting(f"loading {generator.name}"):
        return asyncio.run(load())


class CompressorActor:
    """Trained compressor with its model. The digest of its weights must be `digest`."""

    def __init__(self, folder: Path, model: LoadedModel, digest: str) -> None:
        saved = load(folder)
        if saved.digest != digest:
            raise SettingError(
                f"the compressor in {folder} differs between this process and a worker",
                hint="copy the folder to all machines of the cluster",
            )
        hyper, inputs = saved.open_hyper(model.model), InputBuilder(model.encode, model.ends)
        saved.check_tokenizers(hyper=inputs)
        self._compressor = PassageCompressor(saved.racc, hyper, inputs)

    async def __call__(self, passages: Sequence[Example], /) -> Tensor:
        return await asyncio.to_thread(self._compress, passages)

    def _compress(self, passages: Sequence[Example]) -> Tensor:
        with torch.no_grad():
            return self._compressor.compress(passages).cpu()

    async def aclose(self) -> None:
        pass


@dataclass(frozen=True)
class CompressorFactory:
    """Factory of a `CompressorActor` from the folder of a compressor and the name of its model."""

    folder: Path
    model: str
    trust_remote_code: bool = False
    digest: str = ""

    def __call__(self) -> CompressorActor:
        generator = local_model(self.model, self.trust_remote_code)
        return CompressorActor(self.folder, load_model(generator), self.digest)


class StoreBuilder:
    """Builder of a store of compressed passages by workers. Raises `LoadError` for another model
    and `StoreError` for a store of another compressor."""

    def __init__(
        self,
        compressor: CompressorFactory,
        folder: Path,
        *,
        int8: bool,
        executor: Executor | None = None,
    ) -> None:
        saved = load(compressor.folder)
        self._config, self._int8 = saved.racc.config, int8
        prompts, width = self._config.document_prompts, self._config.width
        manifest = Manifest(saved.digest, prompts, width, "int8" if int8 else "fp16")
        self.store = PassageStore(folder, manifest)
        factory = replace(compressor, digest=saved.digest)
        # One call at a time: a model computes one batch.
        self._workers = (executor or LocalExecutor()).start(factory, concurrency=1)
        self._ahead = 1 if executor is None else AHEAD * executor.count
        self._ids: set[str] = set()
        self._compressed, self._text_bytes = 0, 0
        self._errors: list[float] = []

    def build(
        self, passages: Iterable[tuple[str, Example]], done: Callable[[int], None] = lambda n: None
    ) -> None:
        """Compress new and changed passages, given with their ids; `done` gets the number of
        processed passages since its last call."""
        batches = batched(passages, BATCH)
        with self.store.building():
            for batch, rows in computed_ahead(batches, self._compress, self._ahead):
                self._add(batch, rows)
                done(len(batch))

    def close(self) -> None:
        """End the workers."""
        BACKGROUND_LOOP.run(self._workers.aclose())

    def _compress(self, batch: Sequence[tuple[str, Example]]) -> Tensor | None:
        missing = self.store.missing(batch)
        return BACKGROUND_LOOP.run(self._workers(missing)) if missing else None

    def _add(
        self, batch: Sequence[tuple[str, Example]], compress: Callable[[], Tensor | None]
    ) -> None:
        self._ids |= {id for id, _ in batch}
        for _, one in batch:
            self._text_bytes += len(f"{one.query.text}{one.reply}".encode())
        missing, rows = self.store.missing(batch), compress()
        if rows is None:
            return
        self._compressed += self.store.add(batch, lambda passages: rows)
        if self._int8:
            identities = {id(one) for one in missing}
            stored = self.store.get([pair for pair in batch if id(pair[1]) in identities])
            half = rows.half().float().flatten(1)
            norm = torch.linalg.vector_norm
            self._errors += (norm(stored.flatten(1) - half, dim=1) / norm(half, dim=1)).tolist()

    def summary(self) -> dict[str, float | None]:
        """Return counts and sizes in bytes per passage. `int8_error` is the mean of |int8 - fp16| /
        |fp16| over the passages compressed now."""
        numbers, count = self._config.document_prompts * self._config.width, len(self._ids)
        return {
            "passages": count,
            "compressed": self._compressed,
            "kept": len(self.store),
            "text_bytes": self._text_bytes / count if count else None,
            "fp16_bytes": 2 * numbers,
            "int8_bytes": numbers + 4 * self._config.document_prompts,
            "int8_error": sum(self._errors) / len(self._errors) if self._errors else None,
        }
