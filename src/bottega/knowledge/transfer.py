"""Export and import of a knowledge base as a folder: examples.jsonl and images/.

`load_jsonl` reads such a file too, except for pins, counters and examples without an answer.
"""

from __future__ import annotations

import mimetypes
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from bottega._util.identity import identity
from bottega._util.progress import Step
from bottega.errors import ImageError, LoadError, OnError, StoreError
from bottega.image import Image, path_text
from bottega.knowledge.loaders.folders import open_within
from bottega.knowledge.records import NO_NUMBERS, RowMetadata, find_damage, is_numeric, is_text
from bottega.knowledge.stores import RowStore
from bottega.types import Example, Query

EXAMPLES, IMAGES = "examples.jsonl", "images"
BATCH = 64
RESTORE_HINT = (
    "restore the file from a copy, or delete the example and all that contain its images, and add"
    " it again"
)


def export(rows: RowStore, folder: Path, on_error: OnError, progress: Step) -> int:
    """Write the undamaged examples and return their number.

    examples.jsonl gets its name last, so a folder that contains it is complete.
    """
    _check_name(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StoreError(f"{path_text(folder)} is not empty", hint="give a new folder")
    part, count = folder / f"{EXAMPLES}.part", 0
    try:
        (folder / IMAGES).mkdir(parents=True)
        with part.open("wb") as file:
            for example, metadata in _readable_rows(rows, on_error):
                file.write(orjson.dumps(_line(example, metadata, folder)) + b"\n")
                count += 1
                progress(1)
        part.replace(folder / EXAMPLES)
    except OSError as error:
        raise StoreError(
            f"{path_text(folder)} cannot be written: {error.strerror}",
            hint="check its permissions and the space left",
        ) from error
    return count


def _check_name(folder: Path) -> None:
    try:
        written = os.fsencode(folder)
    except UnicodeEncodeError:
        written = b"\0"
    if b"\0" in written:
        raise StoreError(
            f"the folder name contains a NUL or invalid text, got {str(folder)!a}",
            hint="check the path",
        )


def _readable_rows(rows: RowStore, on_error: OnError) -> Iterator[tuple[Example, RowMetadata]]:
    ids = []
    for id in rows.ids_where():
        if is_text(id):
            ids.append(id)
        else:
            on_error(StoreError(f"the id of an example is damaged, got {id!a}", hint=RESTORE_HINT))
    for start in range(0, len(ids), BATCH):
        keys = rows.keys(ids[start : start + BATCH])
        metadata_by_id = rows.metadata_by_id(keys.values())
        for key, example in sorted(_undamaged(rows, keys, on_error).items()):
            if key not in metadata_by_id:  # deleted by another process
                continue
            if is_numeric(metadata_by_id[key]):
                yield example, metadata_by_id[key]
            else:
                on_error(
                    StoreError(f"example {example.id} is damaged: {NO_NUMBERS}", hint=RESTORE_HINT)
                )


def _undamaged(rows: RowStore, keys: Mapping[str, int], on_error: OnError) -> dict[int, Example]:
    try:
        found = rows.by_keys(keys.values())
    except StoreError as error:
        if len(keys) > 1:  # leave out only the unreadable ones
            alone = [_undamaged(rows, {id: key}, on_error) for id, key in keys.items()]
            return {key: example for each in alone for key, example in each.items()}
        for id in keys:
            on_error(StoreError(f"example {id} cannot be read: {error}", hint=RESTORE_HINT))
        return {}
    wrong = {key: what for key, example in found.items() if (what := find_damage(example))}
    for key, what in wrong.items():
        on_error(StoreError(f"example {found[key].id} is damaged: {what}", hint=RESTORE_HINT))
    return {key: example for key, example in found.items() if key not in wrong}


def _line(example: Example, metadata: RowMetadata, folder: Path) -> dict[str, object]:
    query = example.query
    return {
        "id": example.id,
        "images": [_write_image(image, folder) for image in query.images],
        "image_sources": [image.source for image in query.images],
        "question": query.text,
        "answer": example.answer,
        "labels": example.labels,
        "choices": query.choices,
        "rationale": example.rationale,
        "tags": dict(example.tags),
        "source": example.source,
        "metadata": metadata,
    }


def _write_image(image: Image, folder: Path) -> str:
    name = f"{IMAGES}/{image.sha256}{mimetypes.guess_extension(image.media_type) or '.bin'}"
    path = folder / name
    if not path.exists():
        path.write_bytes(image.data)
    return name


def count_exported(folder: Path) -> int | None:
    """Return the number of lines of an export, None if it cannot be read."""
    path = folder / EXAMPLES
    try:
        if not path.is_file():
            return None
        with path.open("rb") as lines:
            return sum(1 for _ in lines)
    except OSError:
        return None


def read_export(folder: Path, on_error: OnError) -> Iterator[tuple[Example, RowMetadata]]:
    """Yield the examples of an export. A line that cannot be read goes to `on_error` with its
    number."""
    path = folder / EXAMPLES
    _check_name(folder)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe may block forever
            raise LoadError(f"{path_text(path)} is not a regular file", hint="check the path")
        lines = path.open("rb")
    except OSError as error:
        raise LoadError(
            f"{path_text(path)} cannot be read: {error.strerror}",
            hint="give a folder that bottega export wrote",
        ) from error
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                imported = _imported(orjson.loads(line), folder)
            except (ImageError, ValueError, TypeError, KeyError) as error:
                hint = getattr(error, "hint", "") or "export the knowledge base again"
                what = f"{path_text(path)}, line {number}: {error}"
                on_error(LoadError(what, hint=hint))
            else:
                yield imported


def _imported(row: dict[str, Any], folder: Path) -> tuple[Example, RowMetadata]:
    question, answer, labels = row["question"], row["answer"], row["labels"]
    if not (isinstance(question, str) and isinstance(answer, str)):
        raise TypeError("question and answer must be texts")
    images: list[Image] = []
    for name, source in zip(row["images"], row["image_sources"], strict=True):
        image = open_within(folder, name)
        if image.sha256 != Path(name).stem:
            raise ValueError(f"{name} has changed since the export")
        images.append(replace(image, source=source))
    example = Example(
        Query(question, tuple(images), tuple(row["choices"])),
        answer,
        labels=None if labels is None else tuple(labels),
        rationale=row["rationale"],
        tags=dict(row["tags"]),
        source=row["source"],
    )
    if row["id"] != identity(example):
        raise ValueError("the id does not match question, choices, answer and images")
    metadata = RowMetadata(**row["metadata"])
    if not is_numeric(metadata):
        raise TypeError(NO_NUMBERS)
    return example, metadata
