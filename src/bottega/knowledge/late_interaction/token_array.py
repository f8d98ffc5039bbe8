"""Token matrices of many documents as one flat array on disk. All of it can be derived again."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from bottega._util.durable_files import lock_file, os_errors, replace_file, write_at
from bottega.errors import EmbeddingError, StoreBusyError, StoreError
from bottega.knowledge.late_interaction.maxsim import Positions, TokenRows
from bottega.knowledge.late_interaction.quantization import Bytes, fitting_scale, quantize
from bottega.protocols import Vectors

VERSION = 1
CHUNK = 1 << 22
LOCK, MANIFEST = "lock", "manifest.json"
# Start of every manifest, kept even if it is damaged or truncated later.
MANIFEST_PREFIX = b'{"content": {"crcs": '
HALF, EIGHTH, OFFSETS, IDS, CODES = "half", "eighth", "offsets", "ids", "codes"
DATA = re.compile(rf"({HALF}|{EIGHTH}|{OFFSETS}|{IDS}|{CODES})\.[0-9]+(\.new)?")
# Largest value of float16, in which tokens are stored.
LARGEST = float(np.finfo(np.float16).max)


def check_tokens(of: str, rows: Vectors, dimension: int) -> None:
    """Raise `EmbeddingError` unless `rows` is (tokens, dimension) and fits float16."""
    if rows.ndim != 2 or rows.shape[1] != dimension:
        raise EmbeddingError(
            f"the tokens of {of} must have the shape (tokens, {dimension}), got {rows.shape}",
            hint="use the embedder of the index",
        )
    if not np.isfinite(rows).all():
        raise EmbeddingError(
            f"the tokens of {of} contain NaN or infinite numbers", hint="check the embedder"
        )
    if len(rows) and float(np.abs(rows).max()) > LARGEST:
        raise EmbeddingError(
            f"the tokens of {of} exceed {LARGEST:.0f}",
            hint="scale the tokens, for example to unit length",
        )


def checksum(path: Path, size: int) -> int | None:
    """Return the CRC-32 of the first `size` bytes, or None if the file is shorter."""
    if not path.is_file() or path.stat().st_size < size:
        return None
    crc = 0
    with path.open("rb") as file:
        while size > 0:
            chunk = file.read(min(CHUNK, size))
            crc = zlib.crc32(chunk, crc)
            size -= len(chunk)
    return crc


def map_array(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a read-only memory map, or an empty array for an empty file, which cannot be
    mapped."""
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, mode="r", shape=shape)


@dataclass
class Manifest:
    """Valid sizes and checksums of the files. Bytes beyond the sizes belong to an interrupted
    append."""

    fingerprint: str
    dimension: int
    version: int = VERSION
    generation: int = 0
    scale: float = 0.0  # of the int8 copy
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file
    crcs: dict[str, int] = field(default_factory=dict)
    deleted: list[int] = field(default_factory=list)  # positions


def valid_manifest(folder: Path, fingerprint: str, dimension: int) -> Manifest | None:
    """Return the manifest if it matches this embedder and the files match their checksums."""
    try:
        signed = json.loads((folder / MANIFEST).read_text())
        content, crc = signed["content"], signed["crc"]
        body = json.dumps(content, sort_keys=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # The checksum comes first: damaged content may lack fields, or have more.
    if zlib.crc32(body.encode()) != crc or content.get("version") != VERSION:
        return None
    manifest = Manifest(**content)
    if (manifest.fingerprint, manifest.dimension) != (fingerprint, dimension):
        return None
    intact = all(
        checksum(folder / f"{name}.{manifest.generation}", size) == manifest.crcs[name]
        for name, size in manifest.sizes.items()
    )
    return manifest if intact else None


def prepare_folder(folder: str | Path) -> Path:
    """Create the folder if needed.

    Raises `StoreError` if it contains other files: an array empties a folder that does not match,
    and must not delete files of others.
    """
    if "\0" in str(folder):
        raise StoreError(
            f"the path must not contain a NUL, got {str(folder)!r}", hint="use another folder"
        )
    path = Path(folder)
    with os_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        if not _is_own(path):
            raise StoreError(
                f"{path} contains files that do not belong to an index",
                hint="use an empty or a new folder",
            )
    return path


def _is_own(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    if MANIFEST in names:  # other programs have files of this name, too
        with (folder / MANIFEST).open("rb") as file:
            return file.read(len(MANIFEST_PREFIX)) == MANIFEST_PREFIX
    # An array creates its lock first and may lose its manifest.
    rest = names - {LOCK, f"{MANIFEST}.new"}
    return not names or (LOCK in names and all(map(DATA.fullmatch, rest)))


class TokenArray:
    """Documents as flat (tokens, dimension) rows in float16 and int8, memory-mapped, and offsets.

    A folder belongs to one embedder and one process at a time (`StoreBusyError`). If its content
    does not match its checksums and `fingerprint`, it is emptied and filled again; nothing is lost,
    because the array is derived. A folder with other files is rejected (`StoreError`). Without a
    folder a temporary one is used.

    Documents have an id and a position; positions stay until `compact`.
    """

    def __init__(self, folder: str | Path | None, fingerprint: str, dimension: int) -> None:
        if folder is None:
            with os_errors(Path("a temporary folder")):
                self._folder = Path(mkdtemp(prefix="bottega-late-"))
        else:
            self._folder = prepare_folder(folder)
        with os_errors(self._folder):
            lock = lock_file(self._folder / LOCK)
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
            with os_errors(self._folder):
                self._manifest = (
                    valid_manifest(self._folder, fingerprint, dimension) or self._manifest
                )
                self._read()
                self._remove_leftovers()
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
        return np.sort(np.array([self._positions[id] for id in chosen], np.int64))

    def document(self, id: str) -> Vectors:
        """Return (tokens, dimension) float32, as stored in float16."""
        index = self._positions[id]
        start, end = self.offsets[index : index + 2]
        rows: Vectors = self.float16_rows[start:end].astype(np.float32)
        return rows

    def append(self, ids: Sequence[str], documents: Sequence[Vectors]) -> None:
        """Add all documents or none. A document replaces one with the same id."""
        self.check_open()
        latest = dict(zip(ids, documents, strict=True))
        if not latest:
            return
        for id, rows in latest.items():
            check_tokens(repr(id), rows, self.dimension)
            if len(rows) == 0:
                raise EmbeddingError(
                    f"{id!r} has no tokens", hint="skip it, or return a row of zeros"
                )
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
        # Only after the new manifest is on disk: until then the old files are the array.
        with os_errors(self._folder):
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
            write_at(self._path(name), content, at=at)
            crcs[name] = zlib.crc32(content, crcs.get(name, 0))
            sizes[name] = at + len(content)
        replaced = self.positions(ids).tolist()
        deleted = sorted({*self._manifest.deleted, *replaced})
        self._commit(scale=scale, sizes=sizes, crcs=crcs, deleted=deleted)

    def _commit(self, **changes: Any) -> None:
        """Write the manifest, which commits an append or a deletion in one step.

        Files are written first: after a crash in between, the old manifest ignores the new bytes.
        """
        content = asdict(self._manifest) | changes
        before = self._manifest
        try:
            with os_errors(self._folder):
                body = json.dumps(content, sort_keys=True)
                signed = {"crc": zlib.crc32(body.encode()), "content": content}
                replace_file(self._folder / MANIFEST, json.dumps(signed, sort_keys=True).encode())
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
        float16_rows = map_array(self._path(HALF), np.float16, shape)
        int8_rows = map_array(self._path(EIGHTH), np.uint8, shape)
        ends = map_array(self._path(OFFSETS), np.int64, (count,))
        ids: list[str] = []
        if count:
            with self._path(IDS).open("rb") as file:
                text = file.read(sizes[IDS]).decode()
            ids = [json.loads(line) for line in text.splitlines()]
        # No failure is possible below, so the state stays consistent.
        self.float16_rows: TokenRows = float16_rows
        self.int8_rows: Bytes = int8_rows
        self.offsets: Positions = np.concatenate([np.zeros(1, np.int64), ends])
        deleted = set(self._manifest.deleted)
        self._ids = ids
        self._positions = {id: index for index, id in enumerate(ids) if index not in deleted}

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.{self._manifest.generation}"

    def _remove_leftovers(self) -> None:
        """Delete files of other generations and of interrupted appends."""
        sizes = self._manifest.sizes
        kept = {self._path(name) for name in (HALF, EIGHTH, OFFSETS, IDS, CODES) if sizes}
        for path in self._folder.iterdir():
            if DATA.fullmatch(path.name) and path.is_file() and path not in kept:
                path.unlink()


def _release(lock: IO[bytes], temporary_folder: Path | None) -> None:
    lock.close()
    if temporary_folder is not None:
        shutil.rmtree(temporary_folder, ignore_errors=True)
