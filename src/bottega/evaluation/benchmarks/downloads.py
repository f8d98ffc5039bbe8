"""Published files as they were downloaded: unpacked, or still in their zip archives."""

from __future__ import annotations

import zipfile
import zlib
from functools import cached_property
from pathlib import Path

import orjson

from bottega.errors import ImageError, LoadError
from bottega.evaluation.benchmarks.fields import UNUSABLE, Row, needed
from bottega.image import MAX_BYTES, Image, path_text
from bottega.knowledge.loading.labelled import open_within

BROKEN = (
    *(OSError, EOFError, RuntimeError, NotImplementedError, UnicodeDecodeError),
    *(zipfile.BadZipFile, zlib.error),
)


class Downloads:
    """A folder, in which a zip archive (its own or a subfolder's) counts as unpacked beside it.

    `layout` is what a user is told who has not got it all.
    """

    def __init__(self, root: Path, layout: str) -> None:
        self._root = root
        self._layout = layout

    def find(self, *names: str) -> str | None:
        """The first of the files or folders that is there."""
        return next((name for name in names if self._has(name)), None)

    def needed(self, *names: str) -> str:
        """The same, or `LoadError`."""
        found = self.find(*names)
        if found is None:
            shown = path_text(self._root)
            what = f"has no {names[0]}" if self._root.is_dir() else "is not a folder"
            raise LoadError(f"{shown} {what}", hint=self._layout)
        return found

    def rows(self, *names: str, key: str | None = None) -> list[tuple[str, Row]]:
        """What each is called, and the objects of the list in the first of the JSON files that is
        there, under the `key` if one is given."""
        name = self.needed(*names)
        found = self._json(name)
        if key is not None:
            found = found.get(key) if isinstance(found, dict) else None
        shown = path_text(self._root / name)
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            where = f"{shown}, {key}" if key else shown
            raise LoadError(f"{where}: not a list of objects", hint=UNUSABLE)
        return [(f"{shown}, row {number}", row) for number, row in enumerate(found)]

    def image(self, name: str) -> Image:
        member = self._members.get(name)
        if member is None:
            return open_within(self._root, name)
        shown = path_text(self._root / name)
        archive, info = member
        if info.file_size > MAX_BYTES:
            raise ImageError(f"{shown} is larger than {MAX_BYTES >> 20} MB", hint=UNUSABLE)
        try:
            return Image.from_bytes(archive.read(info), source=shown)
        except BROKEN as error:
            raise ImageError(f"{shown} cannot be unpacked: {error}", hint=UNUSABLE) from error

    def _has(self, name: str) -> bool:
        try:
            unpacked = (self._root / name).exists()
        except (OSError, ValueError):  # too long, or a null byte
            unpacked = False
        return unpacked or name in self._members or name in self._folders

    def _json(self, name: str) -> object:
        shown = path_text(self._root / name)
        try:
            return orjson.loads(self._bytes(name))
        except orjson.JSONDecodeError as error:
            raise LoadError(f"{shown} is not valid JSON: {error.msg}", hint=UNUSABLE) from error
        except BROKEN as error:
            raise LoadError(f"{shown} cannot be read: {error}", hint=UNUSABLE) from error

    def _bytes(self, name: str) -> bytes:
        if (self._root / name).is_file():
            return (self._root / name).read_bytes().removeprefix(b"\xef\xbb\xbf")
        archive, info = self._members[name]
        return archive.read(info)

    @cached_property
    def _members(self) -> dict[str, tuple[zipfile.ZipFile, zipfile.ZipInfo]]:
        """By the path that unpacking would give them."""
        found: dict[str, tuple[zipfile.ZipFile, zipfile.ZipInfo]] = {}
        for path in sorted((*self._root.glob("*.zip"), *self._root.glob("*/*.zip"))):
            try:
                archive = zipfile.ZipFile(path)
            except BROKEN as error:
                shown = path_text(path)
                raise LoadError(f"{shown} cannot be read: {error}", hint=UNUSABLE) from error
            beside = path.parent.relative_to(self._root)
            for info in archive.infolist():
                if not info.is_dir():
                    found.setdefault((beside / info.filename).as_posix(), (archive, info))
        return found

    @cached_property
    def _folders(self) -> set[str]:
        return {parent.as_posix() for name in self._members for parent in Path(name).parents}


def coco_number(row: Row) -> str:
    """The number of a COCO photograph, as it stands in its file name."""
    id = needed(row, "image_id")
    if not id.isdecimal():
        raise LoadError(f"the image_id {id} is no number", hint=UNUSABLE)
    return id.zfill(12)
