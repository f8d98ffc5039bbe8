"""Scan of a folder of images, shared by all commands that read one."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bottega.errors import LoadError
from bottega.image import is_image_file, path_text

# Files with these suffixes are images to be read, so unreadable ones are errors. HEIC is among
# them: Pillow cannot read it, and a phone's photographs must not vanish in a count.
SUFFIXES = frozenset(
    f".{name}"
    for name in (
        *("jpg", "jpeg", "jpe", "jfif", "jif", "mpo", "png", "apng", "webp", "gif", "bmp", "dib"),
        *("tif", "tiff", "ppm", "pgm", "pbm", "pnm", "pfm", "avif", "avifs"),
        *("jp2", "j2k", "j2c", "jpc", "jpf", "jpx", "heic", "heif"),
    )
)
SYSTEM_NAMES = frozenset(
    (
        *("@eadir", "__macosx", "$recycle.bin", "system volume information", "lost+found"),
        *("thumbs.db", "desktop.ini"),
    )
)
SYSTEM, LINK, FILE = "hidden or system", "broken or repeated link", "special or unreadable file"


@dataclass
class FolderScan:
    """Image files below a folder in order, the names of its direct subfolders, the numbers of other
    files by reason, and the errors of folders that cannot be opened."""

    folders: list[str] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    errors: list[LoadError] = field(default_factory=list)

    @property
    def unread_text(self) -> str:
        """Return e.g. `12 .txt, 3 hidden or system`, or an empty string."""
        ordered = sorted(self.unread.items(), key=lambda pair: (-pair[1], pair[0]))
        return ", ".join(f"{count} {reason}" for reason, count in ordered)


def is_system_name(name: str) -> bool:
    """Return whether a file or folder is hidden, or made by a system beside the user's files."""
    return name.startswith(".") or name.casefold() in SYSTEM_NAMES


def subfolders(folder: Path) -> list[Path]:
    """Return the folders, or links to folders, directly in a folder, in order."""
    return sorted(
        path for path in folder.iterdir() if not is_system_name(path.name) and path.is_dir()
    )


def scan_images(root: Path) -> FolderScan:
    """Find the images below a folder, by suffix or else by content. Links are followed; below each
    subfolder of the root, a folder is read once."""
    scan = FolderScan()
    pending = [(root, {_identity(root)})]
    while pending:
        folder, seen = pending.pop()
        for path in _entries(folder, scan):
            if is_system_name(path.name):
                scan.unread[SYSTEM] += 1
            elif not path.is_dir():
                _sort_file(path, scan)
            elif (identity := _identity(path)) is None or identity in seen:
                scan.unread[LINK] += 1
            else:
                below = seen
                if folder == root:
                    scan.folders.append(path.name)
                    below = set(seen)
                below.add(identity)
                pending.append((path, below))
    scan.images.sort(key=path_text)
    return scan


def entries_of(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _entries(folder: Path, scan: FolderScan) -> list[Path]:
    try:
        return entries_of(folder)
    except OSError as error:
        scan.errors.append(
            LoadError(
                f"{path_text(folder)} cannot be opened: {error.strerror}",
                hint="check that it exists and its permissions",
            )
        )
        return []


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the same value for all paths of a folder, None if it has been deleted."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sort_file(path: Path, scan: FolderScan) -> None:
    """Add a file to the images or to the count of its reason."""
    suffix = path.suffix.lower()
    if not path.is_file():
        broken = path.is_symlink() or not os.path.lexists(path)  # or deleted since
        scan.unread[LINK if broken else FILE] += 1
    elif suffix in SUFFIXES or is_image_file(path):
        scan.images.append(path)
    else:
        scan.unread[path_text(suffix) or "without a suffix"] += 1
