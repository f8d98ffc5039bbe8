"""Zip archives of class folders. Nothing is unpacked to the disk."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PureWindowsPath

from bottega.errors import ImageError, LoadError
from bottega.image import MAX_BYTES, Image, is_image_file, path_text
from bottega.knowledge.loaders.scan import (
    SYSTEM,
    FolderScan,
    is_system_name,
    named_folders,
    split_names,
)

# Errors of damaged, encrypted and unknown kinds of archives.
BROKEN = (
    *(OSError, EOFError, RuntimeError, NotImplementedError, UnicodeDecodeError),
    *(zipfile.BadZipFile, zlib.error),
)
MAX_ENTRIES = 500_000
HEADER_BYTES = 1 << 16
UTF_8 = 0x800  # flag of the names of entries
UNPACK = "unpack the archive and name the folder"


class ImageArchive:
    """Archive with paths as if it were a folder. A single folder around the class folders is
    skipped: `root` is the folder of the classes or splits."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._found = FolderScan(path)
        self._members: dict[Path, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            name = PureWindowsPath(_name(info))  # also splits at slashes
            if info.is_dir():
                continue
            if name.anchor or ".." in name.parts:
                outside = f"the entry {info.filename!r} leads outside of the archive"
                self._found.errors.append(
                    LoadError(f"{path_text(path)}: {outside}", hint="pack the archive again")
                )
            elif any(map(is_system_name, name.parts)):
                self._found.unread[SYSTEM] += 1
            else:
                self._members[path / name.as_posix()] = info
        self.root = path
        names = self.subfolders(path)
        while len(names) == 1 and not split_names(names) and self.subfolders(self.root / names[0]):
            self.root /= names[0]
            names = self.subfolders(self.root)

    def subfolders(self, folder: Path) -> list[str]:
        return named_folders(folder, self._members)

    def scan(self, root: Path) -> FolderScan:
        """Find the images below a folder, as `scan_images` does."""
        found = self._found
        scan = FolderScan(
            root, self._open_image, self.subfolders(root), [], found.unread, found.errors
        )
        for path in self._members:
            if path.is_relative_to(root):
                scan.add(path, partial(self._has_image_header, path))
        scan.images.sort(key=path_text)
        return scan

    def _has_image_header(self, path: Path) -> bool:
        try:
            with self._archive.open(self._members[path]) as file:
                return is_image_file(io.BytesIO(file.read(HEADER_BYTES)))
        except BROKEN:
            return False

    def _open_image(self, path: Path) -> Image:
        return archived_image(self._archive, self._members[path], path_text(path))


def _name(info: zipfile.ZipInfo) -> str:
    """Return the name of an entry. Without the flag for UTF-8 it is mostly UTF-8, too, but zipfile
    reads it as code page 437."""
    if info.flag_bits & UTF_8:
        return info.filename
    try:
        return info.filename.encode("cp437").decode("utf-8")
    except UnicodeError:
        return info.filename


def is_archive(path: Path) -> bool:
    return path.suffix.lower() == ".zip" and not path.is_dir()


@contextmanager
def open_archive(path: Path) -> Iterator[ImageArchive]:
    """Open an archive for reading. Raises `LoadError`."""
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
        yield ImageArchive(path, archive)


def archived_image(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> Image:
    """Return the image of an entry, called `name` in errors. Raises `ImageError`."""
    try:
        with archive.open(info) as file:
            # One byte more than allowed: the stated size may be wrong.
            data = file.read(MAX_BYTES + 1)
    except BROKEN as error:
        raise ImageError(f"{name} cannot be unpacked: {error}", hint="pack it again") from error
    return Image.from_bytes(data, source=name)
