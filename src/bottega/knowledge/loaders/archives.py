"""Loader of zip archives with class folders. Nothing is unpacked to the disk."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PureWindowsPath

from bottega.errors import ImageError, LoadError, OnRowError
from bottega.image import MAX_BYTES, Image, is_image_file, path_text
from bottega.knowledge.loaders.folders import (
    ignore_error,
    labelled_images,
    labelled_paths,
    named_split,
    split_names,
    splits_error,
)
from bottega.knowledge.loaders.scan import SUFFIXES, SYSTEM, FolderScan, is_system_name
from bottega.types import IMAGE_QUESTION, Example

# Errors of damaged, encrypted and unknown kinds of archives.
BROKEN = (
    *(OSError, EOFError, RuntimeError, NotImplementedError, UnicodeDecodeError),
    *(zipfile.BadZipFile, zlib.error),
)
MAX_ENTRIES = 500_000
HEADER_BYTES = 1 << 16
UNPACK = "unpack the archive and add the folder"

# Paths as if the archive were a folder.
Members = dict[Path, zipfile.ZipInfo]


def load_image_archive(
    path: str | Path,
    *,
    question: str = IMAGE_QUESTION,
    split: str | None = None,
    on_error: OnRowError | None = None,
) -> Iterator[Example]:
    """Yield the images of the class folders of a zip archive, as `load_image_folder` does. A single
    folder around the class folders is skipped."""
    with _opened(Path(path)) as archive:
        root, scan, members = _scanned(archive, Path(path), split)
        read = partial(_image, archive, members)
        yield from labelled_images(root, scan, read, question, on_error)


def count_archive(path: str | Path, split: str | None = None) -> int:
    """Return the number of images that `load_image_archive` reads. Raises `LoadError`."""
    with _opened(Path(path)) as archive:
        root, scan, _ = _scanned(archive, Path(path), split)
        return len(labelled_paths(root, scan, ignore_error))


def archive_splits(path: str | Path) -> dict[str, list[str]]:
    """Return the names of the folders that are splits; none if they are classes. Raises
    `LoadError`."""
    with _opened(Path(path)) as archive:
        return _class_root(Path(path), _members(archive, Path(path), FolderScan()))[1]


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        archive = zipfile.ZipFile(path)
    except BROKEN as error:
        raise LoadError(
            f"{path_text(path)} is not a readable zip archive: {error}", hint="pack it again"
        ) from error
    with archive:
        if (count := len(archive.infolist())) > MAX_ENTRIES:
            raise LoadError(
                f"{path_text(path)} has {count:,} entries, more than {MAX_ENTRIES:,}", hint=UNPACK
            )
        yield archive


def _scanned(
    archive: zipfile.ZipFile, path: Path, split: str | None
) -> tuple[Path, FolderScan, Members]:
    """Return the folder of the classes, its scan, and the members by path."""
    scan = FolderScan()
    members = _members(archive, path, scan)
    root, splits = _class_root(path, members)
    if split is not None:
        names = _names_below(root, members)
        root /= split if split in names else named_split(root, split_names(names), split)
    elif splits:
        raise splits_error(root, splits)
    below = {each: info for each, info in members.items() if each.is_relative_to(root)}
    scan.folders = _names_below(root, below)
    for each, info in below.items():
        suffix = each.suffix.lower()
        if suffix in SUFFIXES or _has_image_header(archive, info):
            scan.images.append(each)
        else:
            scan.unread[path_text(suffix) or "without a suffix"] += 1
    scan.images.sort(key=path_text)
    return root, scan, below


def _members(archive: zipfile.ZipFile, path: Path, scan: FolderScan) -> Members:
    """Return the entries of the user; the others are added to the scan's errors and counts."""
    members = Members()
    for info in archive.infolist():
        name = PureWindowsPath(info.filename)  # also splits at slashes
        if info.is_dir():
            continue
        if name.anchor or ".." in name.parts:
            outside = f"{path_text(path)}: the entry {info.filename!r} leads outside of the archive"
            scan.errors.append(LoadError(outside, hint="pack the archive again"))
        elif any(map(is_system_name, name.parts)):
            scan.unread[SYSTEM] += 1
        else:
            members[path / name.as_posix()] = info
    return members


def _class_root(path: Path, members: Mapping[Path, object]) -> tuple[Path, dict[str, list[str]]]:
    """Return the folder of the classes, or of the splits and their names."""
    root = path
    splits = split_names(names := _names_below(root, members))
    while len(names) == 1 and not splits and _names_below(root / names[0], members):
        root = root / names[0]
        splits = split_names(names := _names_below(root, members))
    has_classes = any(_names_below(root / name, members) for name in names)
    are_splits = len(splits) > 1 or (splits and len(*splits.values()) == len(names) and has_classes)
    return root, splits if are_splits else {}


def _names_below(root: Path, members: Mapping[Path, object]) -> list[str]:
    """Return the names of the folders directly below a path of the archive."""
    depth = len(root.parts)
    return sorted(
        {
            each.parts[depth]
            for each in members
            if len(each.parts) > depth + 1 and each.is_relative_to(root)
        }
    )


def _has_image_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(info) as file:
            return is_image_file(io.BytesIO(file.read(HEADER_BYTES)))
    except BROKEN:
        return False


def _image(archive: zipfile.ZipFile, members: Members, path: Path) -> Image:
    name = path_text(path)
    try:
        with archive.open(members[path]) as file:
            # One byte more than allowed: the stated size may be wrong.
            data = file.read(MAX_BYTES + 1)
    except BROKEN as error:
        raise ImageError(f"{name} cannot be unpacked: {error}", hint="pack it again") from error
    return Image.from_bytes(data, source=name)
