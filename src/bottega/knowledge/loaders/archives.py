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
ZIP = ".zip"
MAX_ENTRIES = 500_000
HEADER_BYTES = 1 << 16
UTF_8 = 0x800  # flag of the names of entries
UNPACK = "unpack the archive and name the folder"


class ImageArchive:
    """Archive with paths as if it were a folder. A single folder around the class folders is
    skipped: `root` is the folder of the classes or splits, in the given folder of the archive."""

    def __init__(self, path: Path, archive: zipfile.ZipFile, folder: Path) -> None:
        self._archive = archive
        self._found = FolderScan(path)
        self.members: dict[Path, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            name = PureWindowsPath(_name(info))  # also splits at slashes
            member = path / name.as_posix()
            if info.is_dir():
                continue
            if name.anchor or ".." in name.parts:
                self._report(info, "leads outside of the archive")
            elif any(map(is_system_name, name.parts)):
                self._found.unread[SYSTEM] += 1
            elif name.suffix.lower() == ZIP:
                self._report(info, "is an archive itself", UNPACK)
            else:
                if member in self.members:
                    self._report(info, "occurs twice, and the last one is read")
                self.members[member] = info
        self.root = folder
        names = self.subfolders(folder)
        while len(names) == 1 and not split_names(names) and self.subfolders(self.root / names[0]):
            self.root /= names[0]
            names = self.subfolders(self.root)

    def _report(self, info: zipfile.ZipInfo, problem: str, hint: str = "pack it again") -> None:
        text = f"{path_text(self._found.root)}: the entry {info.filename!r} {problem}"
        self._found.errors.append(LoadError(text, hint=hint))

    def subfolders(self, folder: Path) -> list[str]:
        return named_folders(folder, self.members)

    def read_head(self, path: Path) -> bytes:
        """Return the first `HEADER_BYTES` of a file, none if it cannot be read."""
        try:
            with self._archive.open(self.members[path]) as file:
                return file.read(HEADER_BYTES)
        except BROKEN:
            return b""

    def scan(self, root: Path) -> FolderScan:
        """Find the images below a folder, as `scan_images` does."""
        found = self._found
        scan = FolderScan(
            root, self._open_image, self.subfolders(root), [], found.unread, found.errors
        )
        for path in self.members:
            if path.is_relative_to(root):
                scan.add(path, partial(self._has_image_header, path))
        scan.images.sort(key=path_text)
        return scan

    def _has_image_header(self, path: Path) -> bool:
        return is_image_file(io.BytesIO(self.read_head(path)))

    def _open_image(self, path: Path) -> Image:
        return archived_image(self._archive, self.members[path], path_text(path))


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
    """Return whether the path is an archive, or a folder in one, such as `my.zip/train`."""
    return _archive_of(path) is not None


def _archive_of(path: Path) -> Path | None:
    archives = (one for one in (path, *path.parents) if one.suffix.lower() == ZIP)
    return next((one for one in archives if one.is_file()), None)


@contextmanager
def open_archive(folder: Path) -> Iterator[ImageArchive]:
    """Open an archive, or a folder in it, for reading. Raises `LoadError`."""
    path = _archive_of(folder) or folder
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
        yield ImageArchive(path, archive, folder)


def archived_image(archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> Image:
    """Return the image of an entry, called `name` in errors. Raises `ImageError`."""
    try:
        with archive.open(info) as file:
            # One byte more than allowed: the stated size may be wrong.
            data = file.read(MAX_BYTES + 1)
    except BROKEN as error:
        raise ImageError(f"{name} cannot be unpacked: {error}", hint="pack it again") from error
    return Image.from_bytes(data, source=name)
