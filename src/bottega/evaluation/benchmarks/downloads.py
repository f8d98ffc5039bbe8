"""Published tables: files, rows and fields."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase

import orjson

from bottega.errors import LoadError, OnError
from bottega.image import Image, path_text
from bottega.knowledge.loaders.archives import BROKEN, archived_image
from bottega.knowledge.loaders.folders import open_within
from bottega.knowledge.loaders.jsonl import Row, field_text, field_texts, parse_rows
from bottega.knowledge.loaders.tables import image_of_cell, library_errors, undecoded
from bottega.types import Example

UNUSABLE = "the file is damaged or belongs to another benchmark"
# Parses a row with its name; None if the row is not part of the benchmark.
Make = Callable[[Row, str], Example | None]
HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(?:/(?P<config>[\w.-]+))?")
COLUMNAR = (".parquet", ".arrow")
SUFFIXES = (*COLUMNAR, ".jsonl", ".json")
BATCH = 64


class Downloads:
    """Folder of downloads, whose zip archives (also in subfolders) are read as if unpacked.

    `layout` is the hint for missing files.
    """

    def __init__(self, root: Path, layout: str) -> None:
        self._root = root
        self._layout = layout

    def find(self, *names: str) -> str | None:
        """Return the first existing file or folder."""
        return next((name for name in names if self._has(name)), None)

    def required(self, *names: str) -> str:
        """Return the first existing file or folder. Raises `LoadError`."""
        found = self.find(*names)
        if found is None:
            shown = path_text(self._root)
            problem = f"has no {names[0]}" if self._root.is_dir() else "is not a folder"
            raise LoadError(f"{shown} {problem}", hint=self._layout)
        return found

    def rows(self, *names: str, key: str | None = None) -> list[tuple[str, Row]]:
        """Return named objects of the first existing JSON file, from the list under `key` if
        given."""
        name = self.required(*names)
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
        return archived_image(*member, path_text(self._root / name))

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
        """Map the paths of unpacked files to archive members."""
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
    """Return the number of a COCO photograph as in its file name."""
    id = required(row, "image_id")
    if not id.isdecimal():
        raise LoadError(f"image_id must be a number, got {id}", hint=UNUSABLE)
    return id.zfill(12)


def text(row: Row, name: str) -> str:
    """Return the field's stripped text; empty if missing."""
    return (field_text(row, name, UNUSABLE) or "").strip()


def required(row: Row, name: str) -> str:
    value = text(row, name)
    if not value:
        raise LoadError(f"{name} is missing", hint=UNUSABLE)
    return value


def texts(row: Row, name: str) -> tuple[str, ...]:
    return tuple(map(str.strip, field_texts(row, name, UNUSABLE) or ()))


def option(choices: tuple[str, ...], index: object) -> str:
    """Return the choice at the index. Raises `LoadError`."""
    if isinstance(index, int) and 0 <= index < len(choices):
        return choices[index]
    raise LoadError(f"the answer is not one of the {len(choices)} choices", hint=UNUSABLE)


def by_letter(choices: tuple[str, ...], letter: str) -> str:
    return option(choices, ascii_uppercase.find(letter) if len(letter) == 1 else None)


def image(value: object, location: str, source: str) -> Image:
    """Return an image from encoded bytes, or from a path inside the folder."""
    folder = Path(location)
    return image_of_cell(value, folder if folder.is_dir() else None, source, hint=UNUSABLE)


def read_examples(
    location: str,
    split: str,
    make: Make,
    *,
    on_error: OnError | None,
    allow_multiple: bool = False,
) -> list[Example]:
    """Parse all rows of a split as `parse_rows` does."""
    rows = read_rows(location, split, allow_multiple=allow_multiple)
    return list(parse_rows(rows, make, on_error))


def read_rows(
    location: str, split: str, *, allow_multiple: bool = False
) -> Iterator[tuple[str, Row]]:
    """Return the named rows of a split. A location is a folder, ID or ID/CONFIG.

    If there are several tables (subfolders, configs), select one, or set `allow_multiple` to join
    them. A file belongs to a split by its name or, if columnar, its folder: `data/test.jsonl`,
    `Art/test-00000-of-00001.parquet`, `test/data-00000-of-00001.arrow`.
    """
    folder, hub = Path(location), HUB_ID.fullmatch(location)
    if folder.is_dir():
        yield from _local(folder, split, allow_multiple)
    elif hub is not None:
        yield from _hub(hub["id"], hub["config"], split, allow_multiple)
    else:
        raise LoadError(
            f"{path_text(location)} is neither a folder nor a Hugging Face id",
            hint="check the path; an id is written as OWNER/NAME or OWNER/NAME/CONFIG",
        )


def _local(folder: Path, split: str, allow_multiple: bool) -> Iterator[tuple[str, Row]]:
    files = sorted(path for path in folder.rglob("*") if _holds(path, split))
    if not files:
        raise LoadError(
            f"{path_text(folder)} has no table of the split {split!r}",
            hint=f"add e.g. {split}.jsonl or data/{split}-00000-of-00001.parquet",
        )
    tables = sorted({path_text(file.parent.relative_to(folder)) for file in files})
    if not allow_multiple and len(tables) > 1:
        raise _ambiguous(path_text(folder), tables)
    for file in files:
        name = path_text(file)
        with library_errors(name):
            for number, row in enumerate(_rows(file, name)):
                yield f"{name}, row {number}", row


def _holds(file: Path, split: str) -> bool:
    if file.suffix not in SUFFIXES:
        return False
    named = file.stem == split or file.stem.startswith(f"{split}-")
    return named or (file.suffix in COLUMNAR and file.parent.name == split)


def _ambiguous(location: str, tables: list[str]) -> LoadError:
    return LoadError(
        f"{location} holds several tables: {', '.join(tables)}",
        hint=f"select one, e.g. {location}/{tables[0]}",
    )


def _rows(file: Path, name: str) -> Iterator[Row]:
    if file.suffix in COLUMNAR:
        yield from _columnar(file)
        return
    data = file.read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    is_list = data.startswith(b"[")
    lines = (line for line in data.split(b"\n") if line.strip())
    for row in orjson.loads(data) if is_list else map(orjson.loads, lines):
        if not isinstance(row, dict):
            raise LoadError(f"{name} does not hold objects", hint=UNUSABLE)
        yield row


def _columnar(file: Path) -> Iterator[Row]:
    import pyarrow as arrow
    from pyarrow import parquet

    if file.suffix == ".parquet":
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(BATCH):
                yield from batch.to_pylist()
    else:
        with arrow.memory_map(str(file)) as mapped, arrow.ipc.open_stream(mapped) as stream:
            for batch in stream:
                yield from batch.to_pylist()


def _hub(
    name: str, config: str | None, split: str, allow_multiple: bool
) -> Iterator[tuple[str, Row]]:
    with library_errors(name):
        import datasets

        configs = [config] if config else datasets.get_dataset_config_names(name)
        if not allow_multiple and len(configs) > 1:
            raise _ambiguous(name, configs)
        for one in configs:
            stream = datasets.load_dataset(name, one, split=split, streaming=True)
            for number, row in enumerate(undecoded(stream)):
                yield f"{name}/{one}, {split}, row {number}", row
