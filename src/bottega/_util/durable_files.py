"""Files that survive a crash: appends after a known size, atomic replacement, and locks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from bottega.errors import SettingError, StoreError, StoreFullError


@contextmanager
def os_errors(path: Path) -> Iterator[None]:
    """Translate errors of the operating system into `StoreError`."""
    try:
        yield
    except OSError as error:
        reason = f"{path} cannot be read or written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFullError(
                reason, hint="free disk space and try again, or use another folder"
            ) from error
        raise StoreError(reason, hint="check the path and its permissions") from error


def make_out_folder(folder: Path) -> None:
    """Create the folder of an option --out. Raises `SettingError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"{folder} cannot be created: {error.strerror}", hint="set another --out folder"
        ) from error


def write_at(path: Path, data: bytes, *, at: int = 0) -> None:
    """Write `data` from byte `at` to the disk, over the rest of an interrupted write."""
    with os_errors(path.parent), path.open("r+b" if path.exists() else "w+b") as file:
        # Cut first: a crash while writing must not leave old bytes after the new ones.
        file.truncate(at)
        file.seek(at)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def replacement(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` atomically: after a crash it has the old or new content."""
    draft = path.with_name(f"{path.name}.new")
    with os_errors(path.parent):
        with draft.open("wb") as file:
            yield file
            # On disk before the rename: a power cut must not leave an empty file.
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically."""
    with replacement(path) as file:
        file.write(data)


def lock_file(path: Path) -> IO[bytes] | None:
    """Lock a file until it is closed or the process ends; return None if another one holds it.

    Raises `OSError`. Windows has no such lock: there the user must avoid sharing.
    """
    file = path.open("ab")
    try:
        import fcntl

        # Unlike lockf, which locks per process, flock also excludes a second handle of ours.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return file
    except BlockingIOError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file


def is_locked(path: Path) -> bool:
    """Return whether a handle holds the lock of `lock_file`. Always False on Windows.

    A `lock_file` at the same moment fails.
    """
    try:
        import fcntl

        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # without a lock file there is no lock
        return False
    return False
