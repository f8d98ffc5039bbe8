"""The files under a store of passages. Rows are named by whole lines of entries and by nothing
else: who reads changes nothing, and who builds is alone and writes over what a killed one left."""

from __future__ import annotations

import errno
import hashlib
import json
import os
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

from bottega.errors import StoreBusyError, StoreError, StoreFullError
from bottega.types import Example

MANIFEST, ROWS, ENTRIES, LOCK = "manifest.json", "rows.bin", "entries.jsonl", "lock"
BEGUN = frozenset((LOCK, f"{MANIFEST}.new"))  # all that a store may hold without a manifest
ANEW = "delete the folder, and build anew"


class Entry(NamedTuple):
    """`check` is of the row's bytes and of the rest, so that no row passes for another's."""

    row: int
    id: str
    mark: str
    check: int

    @classmethod
    def of(cls, row: int, id: str, mark: str, data: bytes) -> Entry:
        return cls(
            row, id, mark, zlib.crc32(data, zlib.crc32(json.dumps([row, id, mark]).encode()))
        )

    def holds(self, data: bytes) -> bool:
        return self == Entry.of(self.row, self.id, self.mark, data)


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """What the system refuses, as a `StoreError`."""
    try:
        yield
    except OSError as error:
        reason = f"{folder} cannot be read or written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFullError(
                reason, hint="make room; what is there is kept, and the same command does the rest"
            ) from error
        raise StoreError(reason, hint="check that it is a folder, and your rights in it") from error


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder. Raises `StoreError` if another process, or another store in this one, is
    building there."""
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with storing(folder):
            _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def check_own(folder: Path) -> None:
    """Raises `StoreError` for a folder that is there and holds another program's files."""
    with storing(folder):
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if MANIFEST not in names and names - BEGUN:
        raise StoreError(
            f"{folder} holds files that are not a store's", hint="give an empty folder"
        )


def write(path: Path, data: bytes, *, at: int = 0) -> None:
    """From byte `at`, over whatever an interrupted write left there."""
    with storing(path.parent), path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, data: bytes) -> None:
    """As a whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    write(new, data)
    with storing(path.parent):
        new.replace(path)


def read_entries(folder: Path, *, start: int, row: int) -> tuple[list[Entry], int]:
    """Those that begin at byte `start` with the entry of `row`, and the byte behind them. A line
    without its end is one that is being written, or never was."""
    path = folder / ENTRIES
    data = b""
    with storing(folder):
        if path.exists():
            with path.open("rb") as file:
                file.seek(max(start - 1, 0))
                data = file.read()
    if start and data[:1] != b"\n":
        raise damaged(path)
    lines = data[bool(start) : data.rfind(b"\n") + 1]
    entries = [_entry(line, path) for line in lines.splitlines()]
    if any(entry.row != place for place, entry in enumerate(entries, row)):
        raise damaged(path)
    return entries, start + len(lines)


def check_rows(folder: Path, *, count: int, size: int) -> None:
    """Raises `StoreError` where the file is shorter than the rows that entries name."""
    path = folder / ROWS
    with storing(folder):
        found = path.stat().st_size if path.exists() else None
    if count and (found is None or found < count * size):
        raise StoreError(f"{path} is {'missing' if found is None else 'too short'}", hint=ANEW)


def read_rows(folder: Path, entries: Sequence[Entry], size: int) -> bytes:
    """One behind the other. Read and not mapped: a mapped file that another program cuts kills the
    process."""
    path, rows = folder / ROWS, []
    if not entries:
        return b""
    check_rows(folder, count=1 + max(entry.row for entry in entries), size=size)
    with storing(folder), path.open("rb") as file:
        for entry in entries:
            file.seek(entry.row * size)
            rows.append(file.read(size))
    for entry, row in zip(entries, rows, strict=True):
        if not entry.holds(row):
            raise StoreError(f"{path} holds another row for passage {entry.id}", hint=ANEW)
    return b"".join(rows)


def damaged(path: Path) -> StoreError:
    return StoreError(f"{path} is damaged", hint=ANEW)


def _entry(line: bytes, path: Path) -> Entry:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise damaged(path) from error
    match found:
        case [int(row), str(id), str(mark), int(check)]:
            return Entry(row, id, mark, check)
    raise damaged(path)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: two builders at once are the user's affair
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreBusyError(
            f"passages are being compressed into {folder} already",
            hint="wait until that is done, or name another folder",
        ) from error


Precision = Literal["fp16", "int8"]
Compress = Callable[[Sequence[Example]], Tensor]

VERSION = 2
BATCH = 64
LARGEST: dict[Precision, float] = {"fp16": 65504.0, "int8": 1e38}


@dataclass(frozen=True)
class Manifest:
    """`compressor` is the digest of its weights: prompts of two compressors are not comparable."""

    compressor: str
    prompts: int
    width: int
    precision: Precision = "fp16"
    version: int = VERSION

    @classmethod
    def for_store(cls, folder: str | Path, compressor: str, prompts: int, width: int) -> Manifest:
        """In the precision of the store that is there, if there is one."""
        there = _found(Path(folder).expanduser())
        return cls(compressor, prompts, width, there.precision if there else "fp16")


class PassageStore:
    """One row of (prompts, width) for each passage; int8 has a scale for each prompt.

    Opening and `get` change nothing on disk, and go on while another process builds. An entry is
    written after its row is on disk: what a killed process left behind is written over by the next
    `add`. A passage whose text, pictures or answer changed is compressed anew; its old row stays
    until the store is built again. Raises `StoreError` for a store of another compressor or
    precision, and for one that is damaged.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        self._folder = Path(folder).expanduser()
        self._manifest = manifest
        self._entries: dict[str, Entry] = {}
        self._count, self._end = 0, 0
        self._turn, self._is_building = threading.RLock(), False
        if self._is_begun():
            self._follow()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes_a_passage(self) -> int:
        return self._row.itemsize

    @contextmanager
    def building(self) -> Iterator[None]:
        """For several `add`: raises `StoreError` while another process, or another store of this
        folder, builds."""
        with self._turn:
            if self._is_building:
                yield
                return
            with alone_in(self._folder):
                self._begin()
                self._is_building = True
                try:
                    yield
                finally:
                    self._is_building = False

    def add(
        self,
        passages: Sequence[tuple[str, Example]],
        compress: Compress,
        report: Callable[[int], None] = lambda done: None,
    ) -> int:
        """Ids with their passages. Returns how many were compressed: what is there is skipped.
        Raises `StoreError` for numbers that the precision cannot hold, and as `building`."""
        with self.building():
            self._follow()
            told = [(id, one, content(one)) for id, one in passages]
            missing = [one for one in told if self._mark(one[0]) != one[2]]
            for start in range(0, len(missing), BATCH):
                batch = missing[start : start + BATCH]
                with torch.no_grad():
                    rows = compress([one for _, one, _ in batch])
                self._append([(id, mark) for id, _, mark in batch], rows)
                report(min(start + BATCH, len(missing)))
        return len(missing)

    def get(self, passages: Sequence[tuple[str, Example]]) -> Tensor:
        """(passages, prompts, width) in float32. Raises `StoreError` for one that is missing or has
        changed since it was compressed."""
        entries = [self._entry_of(id, one) for id, one in passages]
        rows = np.frombuffer(read_rows(self._folder, entries, self._row.itemsize), self._row)
        values = rows["codes"].astype(np.float32)
        if self._scaled:
            values *= rows["scales"][..., None]
        return torch.from_numpy(values)

    def _mark(self, id: str) -> str:
        return self._entries[id].mark if id in self._entries else ""

    def _entry_of(self, id: str, passage: Example) -> Entry:
        mark = self._mark(id)
        if mark != content(passage):
            missing = "has changed since it was compressed" if mark else "is not compressed"
            raise StoreError(
                f"passage {id} {missing}",
                hint="run `bottega compress build` again: it compresses what is new",
            )
        return self._entries[id]

    def _append(self, passages: Sequence[tuple[str, str]], rows: Tensor) -> None:
        values = rows.float().cpu().numpy()
        self._check_values([id for id, _ in passages], values)
        coded = self._coded(values)
        entries = [
            Entry.of(row, id, mark, one.tobytes())
            for row, ((id, mark), one) in enumerate(zip(passages, coded, strict=True), self._count)
        ]
        write(self._folder / ROWS, coded.tobytes(), at=self._count * self._row.itemsize)
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        write(self._folder / ENTRIES, lines.encode(), at=self._end)
        self._follow()

    def _check_values(self, ids: Sequence[str], values: NDArray[np.float32]) -> None:
        wanted = (len(ids), self._manifest.prompts, self._manifest.width)
        if values.shape != wanted:
            raise StoreError(
                f"the compressor made {values.shape} of passages that take {wanted}",
                hint="compress with what the manifest says",
            )
        held = (np.abs(values) <= LARGEST[self._manifest.precision]).all((1, 2))  # no NaN is
        if not held.all():
            raise StoreError(
                f"passage {ids[int(held.argmin())]} was compressed to numbers that"
                f" {self._manifest.precision} cannot hold",
                hint="int8 holds large ones; if they are not finite, train the compressor again",
            )

    def _coded(self, values: NDArray[np.float32]) -> NDArray[np.void]:
        coded = np.zeros(len(values), self._row)
        if self._scaled:
            smallest = np.finfo(np.float32).tiny
            scales = np.maximum(np.abs(values).max(-1) / 127, smallest).astype(np.float32)
            coded["scales"], values = scales, np.rint(values / scales[..., None]).clip(-127, 127)
        coded["codes"] = values
        return coded

    def _is_begun(self) -> bool:
        check_own(self._folder)
        there = _found(self._folder)
        if there and there != self._manifest:
            raise StoreError(
                f"{self._folder} was built with {_unlike(there, self._manifest)}",
                hint="name another folder, or ask for what this one was built with",
            )
        return there is not None

    def _begin(self) -> None:
        if not self._is_begun():
            manifest = json.dumps(asdict(self._manifest), sort_keys=True)
            replace(self._folder / MANIFEST, manifest.encode())

    def _follow(self) -> None:
        """Reads the entries that were written since."""
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


def content(passage: Example) -> str:
    """Of what is compressed: another text, picture or answer under the same id is another
    passage."""
    images = [image.sha256 for image in passage.query.images]
    said = [passage.reply] if passage.answer else []
    return hashlib.sha256(json.dumps([passage.query.text, images, *said]).encode()).hexdigest()[:16]


def _found(folder: Path) -> Manifest | None:
    path = folder / MANIFEST
    with storing(folder):
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
                f"{folder} holds compressed passages of version {version}, and this is {VERSION}",
                hint="build them anew in another folder",
            )
        case {
            "compressor": str(compressor),
            "prompts": int(prompts),
            "width": int(width),
            "precision": "fp16" | "int8" as precision,
            "version": int(),
        } if prompts > 0 < width:
            return Manifest(compressor, prompts, width, precision)
    raise damaged(path)


def _unlike(there: Manifest, wanted: Manifest) -> str:
    """What differs, as a person would say it."""
    told = {
        "compressor": "another compressor ({}, not {})",
        "precision": "{} numbers, not {}",
        "prompts": "{} prompts a passage, not {}",
        "width": "prompts of {} numbers, not {}",
        "version": "version {} of this format, not {}",
    }
    differing = [
        words.format(getattr(there, name), getattr(wanted, name))
        for name, words in told.items()
        if getattr(there, name) != getattr(wanted, name)
    ]
    return " and ".join(differing)
