"""Folder of a token array: checks, checksummed files, manifest and lock."""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bottega.errors import EmbeddingError, StoreError, StoreFullError
from bottega.protocols import Vectors

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


def check_count(made: Iterable[Vectors], count: int) -> list[Vectors]:
    """Return the matrices as a list. Raises `EmbeddingError` unless there are `count`."""
    found = list(made)
    if len(found) != count:
        raise EmbeddingError(
            f"the embedder must return {count} matrices, got {len(found)}",
            hint="return one matrix per query, an empty one without tokens",
        )
    return found


CHUNK = 1 << 22
LOCK = "lock"


def append(path: Path, content: bytes, *, at: int, crc: int) -> int:
    """Write from byte `at`, over the rest of an interrupted append, and return the new checksum."""
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.truncate(at)
        file.seek(at)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return zlib.crc32(content, crc)


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


def lock(folder: Path) -> int | None:
    """Return a file descriptor that locks the folder until it is closed, or None if another process
    holds it."""
    with suppress(ModuleNotFoundError):  # without fcntl, the user must avoid sharing
        import fcntl

        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)


VERSION = 1
MANIFEST = "manifest.json"
# Start of every manifest, kept even if it is damaged or truncated later.
MANIFEST_PREFIX = b'{"content": {"crcs": '


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
    content = read_manifest(folder)
    if content is None or content.get("version") != VERSION:
        return None
    held = Manifest(**content)
    if (held.fingerprint, held.dimension) != (fingerprint, dimension):
        return None
    whole = all(
        checksum(folder / f"{name}.{held.generation}", size) == held.crcs[name]
        for name, size in held.sizes.items()
    )
    return held if whole else None


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Replace the manifest atomically."""
    body = json.dumps(content, sort_keys=True)
    text = json.dumps({"crc": zlib.crc32(body.encode()), "content": content}, sort_keys=True)
    draft = folder / f"{MANIFEST}.new"
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the content of the manifest, or None if it is missing or damaged."""
    try:
        held = json.loads((folder / MANIFEST).read_text())
        content, crc = held["content"], held["crc"]
        body = json.dumps(content, sort_keys=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return content if isinstance(content, dict) and zlib.crc32(body.encode()) == crc else None


def is_manifest(path: Path) -> bool:
    """Return whether Bottega wrote this file, even if damaged; another program may use the same
    name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MANIFEST_PREFIX)) == MANIFEST_PREFIX


HALF, EIGHTH, OFFSETS, IDS, CODES = "half", "eighth", "offsets", "ids", "codes"
DATA = re.compile(rf"({HALF}|{EIGHTH}|{OFFSETS}|{IDS}|{CODES})\.[0-9]+(\.new)?")
OWN_NAMES = frozenset((LOCK, MANIFEST, f"{MANIFEST}.new"))
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def prepare_folder(folder: str | Path) -> Path:
    """Create the folder if needed.

    Raises `StoreError` if it contains other files: an array empties a folder that does not match,
    and must not delete files of others.
    """
    if "\0" in str(folder):
        raise StoreError(
            f"the path contains a NUL, got {str(folder)!r}", hint="give another folder"
        )
    path = Path(folder)
    with translated_errors(path):
        path.mkdir(parents=True, exist_ok=True)
        if not _is_own(path):
            raise StoreError(
                f"{path} contains files that do not belong to an index",
                hint="give an empty or a new folder",
            )
    return path


def temporary_folder() -> Path:
    """Create a temporary folder."""
    with translated_errors(Path("a temporary folder")):
        return Path(mkdtemp(prefix="bottega-late-"))


def data_files(folder: Path) -> list[Path]:
    """Return the files that arrays of any generation have written beside the manifest."""
    return [path for path in folder.iterdir() if DATA.fullmatch(path.name) and path.is_file()]


@contextmanager
def translated_errors(folder: Path) -> Iterator[None]:
    """Convert operating-system errors to `StoreError`."""
    try:
        yield
    except OSError as error:
        reason = f"{folder} cannot be read or written: {error.strerror or error}"
        if error.errno in DISK_FULL:
            raise StoreFullError(reason, hint="free disk space, or give another folder") from error
        raise StoreError(reason, hint="check that it is a folder, and its permissions") from error


def _is_own(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    if MANIFEST in names:
        return is_manifest(folder / MANIFEST)
    # An array creates its lock first and may lose its manifest.
    return not names or (LOCK in names and all(n in OWN_NAMES or DATA.fullmatch(n) for n in names))
