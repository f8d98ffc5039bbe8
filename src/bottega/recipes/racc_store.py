"""Compression of passages into a store with a model in this process or in workers. Needs torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bottega._util.event_loops import BACKGROUND_LOOP, run_closing
from bottega._util.executor import Executor, LocalExecutor, batched, computed_ahead
from bottega.compression import (
    CompressorConfig,
    InputBuilder,
    PassageCompressor,
    PassageStore,
    SavedCompressor,
    StoreManifest,
    load,
)
from bottega.errors import SettingError
from bottega.generation import TransformersGenerator
from bottega.generation.loaded import LoadedModel
from bottega.types import Example

Waiting = Callable[[str], AbstractContextManager[object]]

BATCH = 64
AHEAD = 2  # calls per worker: one is computed while the next one is sent


def load_model(generator: TransformersGenerator, waiting: Waiting = nullcontext) -> LoadedModel:
    """Load a model and return it; `waiting` surrounds the loading."""

    async def load() -> LoadedModel:
        await generator.load()
        return generator.loaded

    with waiting(f"loading {generator.name}"):
        return run_closing(load(), generator)  # ends its thread; the model stays usable


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
    """Factory of a `CompressorActor` from the folder of a compressor and the function that opens
    its model; worker processes need functions that can be pickled."""

    folder: Path
    open_model: Callable[[], TransformersGenerator]
    waiting: Waiting = nullcontext
    digest: str = ""

    def __call__(self) -> CompressorActor:
        model = load_model(self.open_model(), self.waiting)
        return CompressorActor(self.folder, model, self.digest)


@dataclass(frozen=True)
class PassageSizes:
    """Mean bytes of a passage: its text with its reply, its encoded images, and its prompts as
    fp16 and as int8, which has a float32 scale per prompt."""

    text: float
    images: float
    fp16: int
    int8: int

    @classmethod
    def of(cls, text: float, images: float, config: CompressorConfig) -> PassageSizes:
        numbers = config.document_prompts * config.width
        return cls(float(text), float(images), 2 * numbers, numbers + 4 * config.document_prompts)

    def __str__(self) -> str:
        whole = self.text + self.images
        return (
            f"{self.text:.0f} bytes of text and {self.images:.0f} of images; compressed {self.fp16}"
            f" as fp16 ({self.fp16 / whole:.1%}), {self.int8} as int8 ({self.int8 / whole:.1%})"
        )


def source_bytes(passage: Example) -> tuple[int, int]:
    """Return the bytes of a passage's text, with its reply, and of its encoded images."""
    text = f"{passage.query.text}{passage.reply}".encode()
    return len(text), sum(len(image.data) for image in passage.query.images)


def open_store(saved: SavedCompressor, folder: Path, *, int8: bool) -> PassageStore:
    """Return the store of a compressor in a folder. Raises `StoreError` for a store of another
    compressor or precision."""
    prompts, width = saved.racc.config.document_prompts, saved.racc.config.width
    manifest = StoreManifest(saved.digest, prompts, width, "int8" if int8 else "fp16")
    return PassageStore(folder, manifest)


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
        self.store = open_store(saved, folder, int8=int8)
        factory = replace(compressor, digest=saved.digest)
        # One call at a time: a model computes one batch.
        self._workers = (executor or LocalExecutor()).start(factory, concurrency=1)
        self._ahead = 1 if executor is None else AHEAD * executor.count
        self._ids: set[str] = set()
        self._compressed, self._bytes = 0, np.zeros(2)  # text and images
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
        self._bytes += np.sum([source_bytes(one) for _, one in batch], axis=0)
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

    @property
    def sizes(self) -> PassageSizes:
        """Mean sizes of the passages given so far."""
        text, images = self._bytes / max(1, len(self._ids))
        return PassageSizes.of(text, images, self._config)

    def summary(self) -> dict[str, float | None]:
        """Return counts and sizes in bytes per passage. `int8_error` is the mean of |int8 - fp16| /
        |fp16| over the passages compressed now."""
        count, sizes = len(self._ids), self.sizes
        return {
            "passages": count,
            "compressed": self._compressed,
            "kept": len(self.store),
            "text_bytes": sizes.text if count else None,
            "image_bytes": sizes.images if count else None,
            "fp16_bytes": sizes.fp16,
            "int8_bytes": sizes.int8,
            "int8_error": sum(self._errors) / len(self._errors) if self._errors else None,
        }
