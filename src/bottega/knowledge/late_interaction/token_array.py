"""Token matrices of many documents as one flat array on disk. All of it can be derived again."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np

from bottega.errors import EmbeddingError, StoreBusyError, StoreError
from bottega.knowledge.late_interaction import folder as array_folder
from bottega.knowledge.late_interaction.folder import (
    CODES,
    EIGHTH,
    HALF,
    IDS,
    OFFSETS,
    Manifest,
    check_tokens,
    data_files,
    prepare_folder,
    temporary_folder,
    translated_errors,
    valid_manifest,
    write_manifest,
)
from bottega.knowledge.late_interaction.maxsim import Positions, Rows
from bottega.knowledge.late_interaction.quantization import Bytes, fitting_scale, quantize
from bottega.protocols import Vectors


class TokenArray:
    """Documents as flat (tokens, dimension) rows in float16 and int8, memory-mapped, and offsets.

    A folder belongs to one embedder and one process at a time (`StoreBusyError`). If its content
    does not match its checksums and `fingerprint`, it is emptied and filled again; nothing is lost,
    because the array is derived. A folder with other files is rejected (`StoreError`). Without a
    folder a temporary one is used.

    Documents have an id and a position; positions stay until `compact`.
    """

    def __init__(self, folder: str | Path | None, fingerprint: str, dimension: int) -> None:
        self._folder = temporary_folder() if folder is None else prepare_folder(folder)
        with translated_errors(self._folder):
            lock = array_folder.lock(self._folder)
        if lock is None:
            raise StoreBusyError(
                f"{self._folder} is in use by another process",
                hint="wait for it, or give each process its own folder",
            )
        # Also runs if the caller never closes the array.
        self._release = finalize(self, _release, lock, self._folder if folder is None else None)
        self._manifest = Manifest(fingerprint, dimension)
        self._ids: list[str] = []
        self._positions: dict[str, int] = {}
        try:
            with translated_errors(self._folder):
                self._open()
        except BaseException:
            self._release()
            raise

    @property
    def codes_path(self) -> Path:
        """Path for codes derived from the tokens of this generation."""
        return self._path(CODES)

    @property
    def fingerprint(self) -> str:
        return self._manifest.fingerprint

    @property
    def dimension(self) -> int:
        return self._manifest.dimension

    @property
    def generation(self) -> int:
        """Number that rises with each `compact`; positions are valid within one generation."""
        return self._manifest.generation

    @property
    def scale(self) -> float:
        return self._manifest.scale

    def __len__(self) -> int:
        return len(self._positions)

    def ids(self) -> list[str]:
        return list(self._positions)

    def ids_by_position(self) -> Sequence[str]:
        """Return ids by position, including deleted documents. The list is replaced on a change,
        never modified."""
        return self._ids

    def positions(self, ids: Collection[str] | None = None) -> Positions:
        """Return the positions of these ids, or of all documents, ascending. Unknown ids are
        ignored."""
        chosen = self._positions if ids is None else self._positions.keys() & set(ids)
        found = [self._positions[id] for id in chosen]
        return np.sort(np.array(found, np.int64))

    def document(self, id: str) -> Vectors:
        """Return (tokens, dimension) float32, as stored in float16."""
        place = self._positions[id]
        rows: Vectors = self.float16_rows[self.offsets[place] : self.offsets[place + 1]].astype(
            np.float32
        )
        return rows

    def append(self, ids: Sequence[str], documents: Sequence[Vectors]) -> None:
        """Add all documents or none. A document replaces one with the same id."""
        self.check_open()
        latest = dict(zip(ids, documents, strict=True))
        if not latest:
            return
        for id, rows in latest.items():
            self._check(id, rows)
        self._write(
            list(latest),
            np.concatenate(list(latest.values())).astype(np.float32, copy=False),
            [len(rows) for rows in latest.values()],
        )

    def delete(self, ids: Collection[str]) -> int:
        """Delete documents and return their number. Their rows stay on disk until `compact`."""
        self.check_open()
        deleted = self.positions(ids)
        if len(deleted):
            self._commit(deleted=sorted({*self._manifest.deleted, *deleted.tolist()}))
        return len(deleted)

    def compact(self) -> None:
        """Rewrite the remaining documents as a new generation, with a new int8 scale. Positions
        change."""
        self.check_open()
        kept = [(id, self.document(id)) for id in self._positions]
        before, ids, positions = self._manifest, self._ids, self._positions
        self._manifest = Manifest(
            before.fingerprint, before.dimension, generation=before.generation + 1
        )
        self._ids, self._positions = [], {}
        try:
            if kept:
                self.append([id for id, _ in kept], [rows for _, rows in kept])
            else:
                self._commit()
        except BaseException:  # a full disk must not lose documents
            self._manifest, self._ids, self._positions = before, ids, positions
            raise
        with translated_errors(self._folder):
            self._remove_leftovers()

    @property
    def wasted_share(self) -> float:
        """Share of documents on disk that are deleted."""
        return len(self._manifest.deleted) / max(len(self._ids), 1)

    def close(self) -> None:
        """Unlock the folder and delete a temporary one. The array cannot be used again."""
        self._release()

    def check_open(self) -> None:
        """Raise `StoreError` if closed: writing without the lock could overwrite another process's
        array."""
        if not self._release.alive:
            raise StoreError("the index is closed", hint="open a new index on the same folder")

    def _open(self) -> None:
        self._manifest = (
            valid_manifest(self._folder, self.fingerprint, self.dimension) or self._manifest
        )
        self._read()
        self._remove_leftovers()

    def _check(self, id: str, rows: Vectors) -> None:
        check_tokens(repr(id), rows, self.dimension)
        if len(rows) == 0:
            raise EmbeddingError(f"{id!r} has no tokens", hint="skip it, or return a row of zeros")

    def _write(self, ids: list[str], rows: Vectors, lengths: list[int]) -> None:
        scale = self._manifest.scale or fitting_scale(rows)
        starts = len(self.float16_rows) if self._ids else 0
        parts = {
            HALF: rows.astype(np.float16).tobytes(),
            EIGHTH: quantize(rows, scale).tobytes(),
            OFFSETS: (np.cumsum(lengths, dtype=np.int64) + starts).tobytes(),
            IDS: "".join(json.dumps(id) + "\n" for id in ids).encode(),
        }
        sizes, crcs = dict(self._manifest.sizes), dict(self._manifest.crcs)
        for name, content in parts.items():
            at = sizes.get(name, 0)
            path = self._path(name)
            with translated_errors(self._folder):
                crcs[name] = array_folder.append(path, content, at=at, crc=crcs.get(name, 0))
            sizes[name] = at + len(content)
        replaced = self.positions(ids).tolist()
        deleted = sorted({*self._manifest.deleted, *replaced})
        self._commit(scale=scale, sizes=sizes, crcs=crcs, deleted=deleted)

    def _commit(self, **changes: Any) -> None:
        """Write the manifest, which is the single step that commits an append or a deletion."""
        content = asdict(self._manifest) | changes
        before = self._manifest
        try:
            with translated_errors(self._folder):
                write_manifest(self._folder, content)
                self._manifest = Manifest(**content)
                self._read()
        except BaseException:
            self._manifest = before
            raise

    def _read(self) -> None:
        sizes, dimension = self._manifest.sizes, self.dimension
        count = sizes.get(OFFSETS, 0) // 8
        tokens = sizes.get(HALF, 0) // (2 * dimension)
        shape = (tokens, dimension)
        float16_rows = array_folder.map_array(self._path(HALF), np.float16, shape)
        int8_rows = array_folder.map_array(self._path(EIGHTH), np.uint8, shape)
        ends = array_folder.map_array(self._path(OFFSETS), np.int64, (count,))
        ids = list(self._read_ids()) if count else []
        # No failure is possible below, so the state stays consistent.
        self.float16_rows: Rows = float16_rows
        self.int8_rows: Bytes = int8_rows
        self.offsets: Positions = np.concatenate([np.zeros(1, np.int64), ends])
        deleted = set(self._manifest.deleted)
        self._ids = ids
        self._positions = {id: place for place, id in enumerate(ids) if place not in deleted}

    def _read_ids(self) -> Iterator[str]:
        with self._path(IDS).open("rb") as file:
            text = file.read(self._manifest.sizes[IDS]).decode()
        return (json.loads(line) for line in text.splitlines())

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.{self._manifest.generation}"

    def _remove_leftovers(self) -> None:
        """Delete files of other generations and of interrupted appends."""
        sizes = self._manifest.sizes
        kept = {self._path(name) for name in (HALF, EIGHTH, OFFSETS, IDS, CODES) if sizes}
        for path in data_files(self._folder):
            if path not in kept:
                path.unlink()


def _release(lock: int, temporary_folder: Path | None) -> None:
    os.close(lock)
    if temporary_folder is not None:
        shutil.rmtree(temporary_folder, ignore_errors=True)
