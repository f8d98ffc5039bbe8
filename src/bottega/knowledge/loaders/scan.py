"""Scan of a folder of images, shared by all commands that read one."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePath
from typing import TypeVar

from bottega.errors import LoadError
from bottega.image import Image, is_image_file, path_text

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
SPLITS = ("train", "val", "test")
# Groups in the order of `SPLITS`: Train, valid, test_set, val2017.
SPLIT_NAME = re.compile(
    r"[\W\d_]*(?:(train|training|训练)|(val|valid|validation|dev|验证)"
    r"|(test|testing|eval|evaluation|hold\W?out|测试))集?"
    r"[\W\d_]*(?:set|split|data|images)?[\W\d_]*",
    re.IGNORECASE,
)
SYSTEM, LINK, FILE = "hidden or system", "broken or repeated link", "special or unreadable file"

AnyPath = TypeVar("AnyPath", bound=PurePath)


@dataclass
class FolderScan:
    """Image files below a folder in order, the names of its direct subfolders, the numbers of other
    files by reason, and the errors of folders that cannot be opened."""

    root: Path
    open_image: Callable[[Path], Image] = Image.open
    folders: list[str] = field(default_factory=list)
    images: list[Path] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    errors: list[LoadError] = field(default_factory=list)

    @property
    def unread_text(self) -> str:
        """Return e.g. `12 .txt, 3 hidden or system`, or an empty string."""
        ordered = sorted(self.unread.items(), key=lambda pair: (-pair[1], pair[0]))
        return ", ".join(f"{count} {reason}" for reason, count in ordered)

    def add(self, path: Path, is_image: Callable[[], bool]) -> None:
        """Add a file to the images, by suffix or else by content, or to the other files."""
        suffix = path.suffix.lower()
        if suffix in SUFFIXES or is_image():
            self.images.append(path)
        else:
            self.unread[path_text(suffix) or "without a suffix"] += 1


def is_system_name(name: str) -> bool:
    """Return whether a file or folder is hidden, or made by a system beside the user's files."""
    return name.startswith(".") or name.casefold() in SYSTEM_NAMES


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders, or links to folders, directly in a folder, in order; none if
    it cannot be opened."""
    found = _entries(folder, FolderScan(folder))
    return [path.name for path in found if not is_system_name(path.name) and path.is_dir()]


def scan_images(root: Path) -> FolderScan:
    """Find the images below a folder, by suffix or else by content. Links are followed; below each
    subfolder of the root, a folder is read once."""
    scan = FolderScan(root)
    pending = [(root, {_identity(root)})]
    while pending:
        folder, seen = pending.pop()
        for path in _entries(folder, scan):
            if is_system_name(path.name):
                scan.unread[SYSTEM] += 1
            elif not path.is_dir():
                _add_file(path, scan)
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


def _add_file(path: Path, scan: FolderScan) -> None:
    if path.is_file():
        scan.add(path, lambda: is_image_file(path))
    else:
        broken = path.is_symlink() or not os.path.lexists(path)  # or deleted since
        scan.unread[LINK if broken else FILE] += 1


def split_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names that are like those of the splits train, val and test."""
    found: dict[str, list[str]] = {}
    for name in names:
        if (split := _split_of(name)) is not None:
            found.setdefault(split, []).append(path_text(name))
    return {split: found[split] for split in SPLITS if split in found}


def _split_of(name: str) -> str | None:
    named = SPLIT_NAME.fullmatch(name)
    return named and SPLITS[(named.lastindex or 1) - 1]


def named_folders(root: PurePath, paths: Iterable[PurePath]) -> list[str]:
    """Return the names of the folders directly below the root that contain any of the paths."""
    depth = len(root.parts)
    below = (path.parts for path in paths if path.parts[:depth] == root.parts)
    return sorted({parts[depth] for parts in below if len(parts) > depth + 1})


def splits_below(root: AnyPath, folders_of: Callable[[AnyPath], list[str]]) -> dict[str, list[str]]:
    """Return the folders directly below the root that are splits, such as train and val; none if
    they are classes. A single kind is one if it is alone and contains folders, or if two of the
    folders contain one of the same name."""
    names = folders_of(root)
    found = split_names(names)
    if not found:
        return {}
    below = Counter(chain.from_iterable(folders_of(root / name) for name in names))
    is_all = sum(map(len, found.values())) == len(names)
    repeats = max(below.values(), default=0) > 1
    return found if len(found) > 1 or repeats or (is_all and below) else {}


def _unwrapped(root: AnyPath, folders_of: Callable[[AnyPath], list[str]]) -> AnyPath:
    """Return the only folder in the root if its folders are splits, else the root."""
    names = folders_of(root)
    is_wrapper = len(names) == 1 and bool(splits_below(root / names[0], folders_of))
    return root / names[0] if is_wrapper and not split_names(names) else root


def class_folder(root: Path, split: str | None, folders_of: Callable[[Path], list[str]]) -> Path:
    """Return the folder of the classes of a split, without a split the root. Raises `LoadError`."""
    root = _unwrapped(root, folders_of)
    if split is None:
        if splits := splits_below(root, folders_of):
            raise splits_error(root, splits)
        return root
    names = folders_of(root)
    return root / (split if split in names else named_split(root, split_names(names), split))


def splits_error(folder: Path, splits: Mapping[str, Sequence[str]]) -> LoadError:
    """Return the error of a folder of splits of which none is chosen."""
    names = list(chain.from_iterable(splits.values()))
    first = folder / names[0]  # in an archive it is no folder that can be named
    return LoadError(
        f"{path_text(folder)} contains the split{'s' * (len(names) > 1)} {' and '.join(names)}, not"
        " classes",
        hint=f"choose the split {' or '.join(names)} (--split)"
        f"{f', or name {path_text(first)}' if first.is_dir() else ''}",
    )


def named_split(folder: Path, splits: Mapping[str, Sequence[str]], split: str) -> str:
    """Return the only name that is like this split's. Raises `LoadError`."""
    names = splits.get(_split_of(split) or "", ())
    if len(names) == 1:
        return names[0]
    existing = " or ".join(chain.from_iterable(splits.values()))
    omit = "omit the split if the folder contains the class folders"
    raise LoadError(
        f"{path_text(folder)} has no folder {split!r}",
        hint=f"choose the split {existing}" if existing else omit,
    )
