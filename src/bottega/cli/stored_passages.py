"""Passages on their way into a store, and what they take there. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from bottega.compression import Condenser, Manifest, PassageStore, Shape, Texts, load
from bottega.generation.loaded import LoadedModel
from bottega.types import Example

AT_ONCE = 64


class Building:
    """`take` passages, then `finish`. `told` says how many and how large."""

    def __init__(self, condenser: Condenser, store: PassageStore, shape: Shape, int8: bool) -> None:
        self._condenser, self._store, self._shape, self._int8 = condenser, store, shape, int8
        self._waiting: list[tuple[str, Example]] = []
        self._ids: set[str] = set()
        self._compressed, self._text_bytes = 0, 0
        self._errors: list[float] = []

    @classmethod
    def opened(cls, compressor: Path, model: LoadedModel, folder: Path, *, int8: bool) -> Self:
        """Raises `LoadError` for another model, `StoreError` for a store of another compressor."""
        saved = load(compressor)
        shape = saved.racc.shape
        condenser = Condenser(
            saved.racc, saved.compressing(model.model), Texts(model.encode, model.ends)
        )
        precision = Manifest(
            saved.digest, shape.document_prompts, shape.width, "int8" if int8 else "fp16"
        )
        return cls(condenser, PassageStore(folder, precision), shape, int8)

    @property
    def seen(self) -> int:
        return len(self._ids)

    def alone(self) -> AbstractContextManager[None]:
        """Raises `StoreError` while another command builds the store."""
        return self._store.building()

    def take(self, id: str, passage: Example) -> None:
        self._ids.add(id)
        self._text_bytes += len(f"{passage.query.text}{passage.reply}".encode())
        self._waiting.append((id, passage))
        if len(self._waiting) == AT_ONCE:
            self.finish()

    def finish(self) -> None:
        passages, self._waiting = self._waiting, []
        made: list[tuple[Sequence[Example], Tensor]] = []

        def compress(batch: Sequence[Example]) -> Tensor:
            rows = self._condenser.compressed(batch).cpu()
            made.append((batch, rows))
            return rows

        self._compressed += self._store.add(passages, compress)
        if self._int8:
            for batch, rows in made:
                self._measure(passages, batch, rows)

    @property
    def told(self) -> dict[str, float | None]:
        """`int8_error` is the mean over passages of |int8 - fp16| / |fp16|, of those compressed
        now."""
        numbers = self._shape.document_prompts * self._shape.width
        errors = self._errors
        return {
            "passages": self.seen,
            "compressed": self._compressed,
            "kept": len(self._store),
            "text_bytes": self._text_bytes / self.seen if self.seen else None,
            "fp16_bytes": 2 * numbers,
            "int8_bytes": numbers + 4 * self._shape.document_prompts,
            "int8_error": sum(errors) / len(errors) if errors else None,
        }

    def _measure(
        self, passages: Sequence[tuple[str, Example]], batch: Sequence[Example], rows: Tensor
    ) -> None:
        chosen = {id(one) for one in batch}
        stored = self._store.get([one for one in passages if id(one[1]) in chosen])
        half = rows.half().float().flatten(1)
        self._errors += (
            torch.linalg.vector_norm(stored.flatten(1) - half, dim=1)
            / torch.linalg.vector_norm(half, dim=1)
        ).tolist()
