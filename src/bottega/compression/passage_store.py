"""Store of compressed passages on disk.

A row exists once a complete line of the entries file names it. Readers change nothing. One builder
at a time holds a lock, and overwrites rows and lines that a killed builder left incomplete.
"""

from __future__ import annotations

import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bottega._util.durable_files import lock_file, os_errors, replace_file, write_at
from bottega._util.identity import image_hashes
from bottega.errors import StoreBusyError, StoreError
from bottega.types import Example

MANIFEST, ROWS, ENTRIES, LOCK = "manifest.json", "rows.bin", "entries.jsonl", "lock"
UNFINISHED = frozenset((LOCK, f"{MANIFEST}.new"))  # files of a store without a manifest
REBUILD = "delete the folder and run `bottega compress build` again"
Precision = Literal["fp16", "int8"]
Compress = Callable[[Sequence[Example]], Tensor]
VERSION = 2
BATCH = 64
LARGEST: dict[Precision, float] = {"fp16": 65504.0, "int8": 1e38}


class PassageEntry(NamedTuple):
    """Index entry of one row. `mark` is the digest of the passage. `check` is a CRC of the row's
    bytes and the other fields, which detects swapped rows."""

    row: int
    id: str
    mark: str
    check: int

    @classmethod
    def of(cls, row: int, id: str, mark: str, data: bytes) -> PassageEntry:
        return cls(
            row, id, mark, zlib.crc32(data, zlib.crc32(json.dumps([row, id, mark]).encode()))
        )

    def matches(self, data: bytes) -> bool:
        """Return whether `data` are the bytes of this row."""
        return self == PassageEntry.of(self.row, self.id, self.mark, data)


def read_entries(folder: Path, *, start: int, row: int) -> tuple[list[PassageEntry], int]:
    """Return the entries from byte `start` on, the first being that of `row`, and their end. A last
    line without a newline is ignored: its writer is still busy or was killed."""
    path = folder / ENTRIES
    data = b""
    with os_errors(folder):
        if path.exists():
            with path.open("rb") as file:
                file.seek(max(start - 1, 0))
                data = file.read()
    # The byte before `start` ends the last line that was read, unless the file was replaced.
    if start and data[:1] != b"\n":
        raise damaged(path)
    lines = data[bool(start) : data.rfind(b"\n") + 1]
    entries = []
    for index, line in enumerate(lines.splitlines(), row):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise damaged(path) from error
        match found:
            case [int(number), str(id), str(mark), int(check)] if number == index:
                entries.append(PassageEntry(number, id, mark, check))
            case _:
                raise damaged(path)
    return entries, start + len(lines)


def check_rows(folder: Path, *, count: int, size: int) -> None:
    """Raise `StoreError` if the file is shorter than the rows that entries name."""
    path = folder / ROWS
    with os_errors(folder):
        length = path.stat().st_size if path.exists() else None
    if count and (length is None or length < count * size):
        problem = "missing" if length is None else "too short"
        raise StoreError(f"{path} is {problem}", hint=REBUILD)


def read_rows(folder: Path, entries: Sequence[PassageEntry], size: int) -> bytes:
    """Return the joined bytes of the rows. The file is read, not mapped: if another program
    truncates a mapped file, the process dies."""
    path, rows = folder / ROWS, []
    if not entries:
        return b""
    check_rows(folder, count=1 + max(entry.row for entry in entries), size=size)
    with os_errors(folder), path.open("rb") as file:
        for entry in entries:
            file.seek(entry.row * size)
            rows.append(file.read(size))
    for entry, row in zip(entries, rows, strict=True):
        if not entry.matches(row):
            raise StoreError(f"{path} holds another row for passage {entry.id}", hint=REBUILD)
    return b"".join(rows)


def damaged(path: Path) -> StoreError:
    return StoreError(f"{path} is damaged", hint=REBUILD)


@dataclass(frozen=True)
class StoreManifest:
    """Format of a store. `compressor` is the digest of the compressor: prompts of different
    compressors are not comparable."""

    compressor: str
    prompts: int
    width: int
    precision: Precision = "fp16"
    version: int = VERSION

    @classmethod
    def for_store(
        cls, folder: str | Path, compressor: str, prompts: int, width: int
    ) -> StoreManifest:
        """Return a manifest with the precision of the store in `folder`, else fp16."""
        existing = _read_manifest(Path(folder).expanduser())
        return cls(compressor, prompts, width, existing.precision if existing else "fp16")


class PassageStore:
    """Store with one row (prompts, width) per passage; int8 has one scale per prompt.

    Opening and `get` change nothing on disk and work while another process builds. An entry is
    written after its row is on disk, and the next `add` overwrites incomplete rows of a killed
    process. A passage with changed text, images or answer is compressed again; its old row stays
    until the store is rebuilt. Raises `StoreError` for a store of another compressor or precision,
    and for a damaged one.
    """

    def __init__(self, folder: str | Path, manifest: StoreManifest) -> None:
        self._folder = Path(folder).expanduser()
        self._manifest = manifest
        self._entries: dict[str, PassageEntry] = {}
        self._count, self._end = 0, 0
        self._lock, self._is_building = threading.RLock(), False
        if self._exists():
            self._refresh()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_per_passage(self) -> int:
        return self._row.itemsize

    @contextmanager
    def building(self) -> Iterator[None]:
        """Hold the build lock for several `add`. Raises `StoreBusyError` while another process, or
        another store of this folder, builds."""
        with self._lock:
            if self._is_building:
                yield
                return
            with os_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
                lock = lock_file(self._folder / LOCK)
            if lock is None:
                raise StoreBusyError(
                    f"another process is compressing passages into {self._folder}",
                    hint="wait until it finishes, or name another folder",
                )
            with lock:
                # Only under the lock: another builder may have created the store in between.
                if not self._exists():
                    manifest = json.dumps(asdict(self._manifest), sort_keys=True)
                    replace_file(self._folder / MANIFEST, manifest.encode())
                self._is_building = True
                try:
                    yield
                finally:
                    self._is_building = False

    def add(self, passages: Sequence[tuple[str, Example]], compress: Compress) -> int:
        """Compress (id, passage) pairs that are new or changed; return their number. Raises
        `StoreError` for numbers that the precision cannot hold, and like `building`."""
        with self.building():
            self._refresh()
            missing = self._missing(passages)
            for start in range(0, len(missing), BATCH):
                batch = missing[start : start + BATCH]
                with torch.no_grad():
                    rows = compress([one for _, one, _ in batch])
                self._append([(id, mark) for id, _, mark in batch], rows)
        return len(missing)

    def missing(self, passages: Sequence[tuple[str, Example]]) -> list[Example]:
        """Return the passages that `add` compresses: new and changed ones. Other threads may call
        it during `building`."""
        return [one for _, one, _ in self._missing(passages)]

    def _missing(self, passages: Sequence[tuple[str, Example]]) -> list[tuple[str, Example, str]]:
        marked = [(id, one, content_digest(one)) for id, one in passages]
        return [one for one in marked if self._mark(one[0]) != one[2]]

    def get(self, passages: Sequence[tuple[str, Example]]) -> Tensor:
        """Return float32 prompts (passages, prompts, width). Raises `StoreError` for a passage that
        is missing or has changed since its compression."""
        for id, passage in passages:
            if (mark := self._mark(id)) != content_digest(passage):
                problem = "has changed since it was compressed" if mark else "is not compressed"
                option = " --all" if passage.answer else ""
                raise StoreError(
                    f"passage {id} {problem}",
                    hint=f"run `bottega compress build{option}` again to compress new passages",
                )
        entries = [self._entries[id] for id, _ in passages]
        rows = np.frombuffer(read_rows(self._folder, entries, self._row.itemsize), self._row)
        values = rows["codes"].astype(np.float32)
        if self._scaled:
            values *= rows["scales"][..., None]
        return torch.from_numpy(values)

    def _mark(self, id: str) -> str:
        return self._entries[id].mark if id in self._entries else ""

    def _append(self, passages: Sequence[tuple[str, str]], rows: Tensor) -> None:
        values = rows.float().cpu().numpy()
        self._check_values([id for id, _ in passages], values)
        coded = np.zeros(len(values), self._row)
        if self._scaled:
            # A prompt of zeros has a scale above 0: dividing by it gives 0, not nan.
            smallest = np.finfo(np.float32).tiny
            scales = np.maximum(np.abs(values).max(-1) / 127, smallest).astype(np.float32)
            coded["scales"], values = scales, np.rint(values / scales[..., None]).clip(-127, 127)
        coded["codes"] = values
        entries = [
            PassageEntry.of(row, id, mark, one.tobytes())
            for row, ((id, mark), one) in enumerate(zip(passages, coded, strict=True), self._count)
        ]
        # Rows first: a row exists once its entry does. `at` overwrites rows without an entry.
        write_at(self._folder / ROWS, coded.tobytes(), at=self._count * self._row.itemsize)
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        write_at(self._folder / ENTRIES, lines.encode(), at=self._end)
        self._refresh()

    def _check_values(self, ids: Sequence[str], values: NDArray[np.float32]) -> None:
        wanted = (len(ids), self._manifest.prompts, self._manifest.width)
        if values.shape != wanted:
            raise StoreError(
                f"compressed passages must have shape {wanted}, got {values.shape}",
                hint="use the compressor that the manifest names",
            )
        # Comparisons with nan are false, so nan is rejected too.
        fits = (np.abs(values) <= LARGEST[self._manifest.precision]).all((1, 2))
        if not fits.all():
            raise StoreError(
                f"passage {ids[int(fits.argmin())]} was compressed to numbers that"
                f" {self._manifest.precision} cannot hold",
                hint="use int8; if the numbers are not finite, train the compressor again",
            )

    def _exists(self) -> bool:
        """Return whether the folder has a manifest. Raises `StoreError` for another one, and for a
        folder with other files."""
        folder, wanted = self._folder, asdict(self._manifest)
        with os_errors(folder):
            names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        if MANIFEST not in names and names - UNFINISHED:
            raise StoreError(
                f"{folder} holds other files",
                hint="name an empty folder, or one that `bottega compress build` wrote",
            )
        existing = _read_manifest(folder)
        if existing and existing != self._manifest:
            pairs = asdict(existing).items()
            differing = [f"{n} {old}, not {wanted[n]}" for n, old in pairs if old != wanted[n]]
            raise StoreError(
                f"{folder} was built with {' and '.join(differing)}",
                hint="name another folder, or use the compressor and the precision of this one",
            )
        return existing is not None

    def _refresh(self) -> None:
        """Read entries that were written since the last call."""
        new, end = read_entries(self._folder, start=self._end, row=self._count)
        check_rows(self._folder, count=self._count + len(new), size=self._row.itemsize)
        self._entries |= {entry.id: entry for entry in new}
        self._count, self._end = self._count + len(new), end

    @property
    def _scaled(self) -> bool:
        return self._manifest.precision == "int8"

    @property
    def _row(self) -> np.dtype[np.void]:
        prompts, width = self._manifest.prompts, self._manifest.width
        if self._scaled:
            return np.dtype([("scales", "<f4", (prompts,)), ("codes", "i1", (prompts, width))])
        return np.dtype([("codes", "<f2", (prompts, width))])


def content_digest(passage: Example) -> str:
    """Return a digest of all that is compressed: text, images and answer."""
    images = image_hashes(passage.query)
    reply = [passage.reply] if passage.answer else []
    text = json.dumps([passage.query.text, images, *reply])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_manifest(folder: Path) -> StoreManifest | None:
    path = folder / MANIFEST
    with os_errors(folder):
        text = path.read_bytes() if path.exists() else None
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path) from error
    match found:
        case {"version": int(version)} if version != VERSION:
            raise StoreError(
                f"{folder} must have format version {VERSION}, got {version}",
                hint="build the store again in another folder",
            )
        case {
            "compressor": str(compressor),
            "prompts": int(prompts),
            "width": int(width),
            "precision": "fp16" | "int8" as precision,
            "version": int(),
        } if prompts > 0 < width:
            return StoreManifest(compressor, prompts, width, precision)
    raise damaged(path)
