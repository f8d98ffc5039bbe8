"""Which folder may become a token array's, and which of the files in it are the array's own."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from bottega.errors import StoreError, StoreFullError
from bottega.knowledge.late.files import LOCK
from bottega.knowledge.late.manifest import MANIFEST, is_manifest

HALF, EIGHTH, OFFSETS, IDS, CODES = "half", "eighth", "offsets", "ids", "codes"
DATA = re.compile(rf"({HALF}|{EIGHTH}|{OFFSETS}|{IDS}|{CODES})\.[0-9]+(\.new)?")
OWN = frozenset((LOCK, MANIFEST, f"{MANIFEST}.new"))
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def prepared(folder: str | Path) -> Path:
    """The folder, made if need be. Raises `StoreError` if it holds what no array has written:
    an array empties its folder when it does not fit, and must never do that to another's."""
    if "\0" in str(folder):
        raise StoreError(f"{str(folder)!r} is no path: it holds a NUL", hint="give another folder")
    path = Path(folder)
    with storing(path):
        path.mkdir(parents=True, exist_ok=True)
        if not _is_own(path):
            raise StoreError(
                f"{path} holds files that are not an index's",
                hint="give an empty folder, or one that does not exist yet",
            )
    return path


def temporary() -> Path:
    with storing(Path("a temporary folder")):
        return Path(mkdtemp(prefix="bottega-late-"))


def data_files(folder: Path) -> list[Path]:
    """Those that an array, of whatever generation, has written beside its manifest."""
    return [path for path in folder.iterdir() if DATA.fullmatch(path.name) and path.is_file()]


@contextmanager
def storing(folder: Path) -> Iterator[None]:
    """What the system refuses, as a `StoreError`."""
    try:
        yield
    except OSError as error:
        reason = f"{folder} cannot be read or written: {error.strerror or error}"
        if error.errno in FULL:
            raise StoreFullError(reason, hint="make room, or give another folder") from error
        raise StoreError(reason, hint="check that it is a folder, and your rights in it") from error


def _is_own(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    if MANIFEST in names:
        return is_manifest(folder / MANIFEST)
    # An array makes its lock before all else and may lose its manifest.
    return not names or (LOCK in names and all(n in OWN or DATA.fullmatch(n) for n in names))
