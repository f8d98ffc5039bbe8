"""Passages: the Google Search corpus of OK-VQA, WIT, and lines of JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from bottega.errors import LoadError, OnError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.downloads import Downloads, required
from bottega.evaluation.benchmarks.okvqa import first_split
from bottega.image import path_text
from bottega.knowledge.loaders.delimited import csv_rows
from bottega.knowledge.loaders.jsonl import Row, load_passage_lines, parse_rows
from bottega.types import Example, Query

# Ids of the training corpus are below; the whole corpus has 168,306.
GS_TRAIN = 112_724
GS_IDS = ("kid", "id", "passage_id")
FILES = (".csv", ".tsv", ".gz")
LINES = ".jsonl"
IMAGES = "images"  # folder beside a WIT file, unpacked or in a zip archive
SHOWN = 80
WIT_TEXTS = {
    "page_title": "title",
    "section_title": "section title",
    "hierarchical_section_title": "hierarchical section title",
    "caption_reference_description": "caption reference description",
    "caption_attribution_description": "caption attribution description",
    "caption_alt_text_description": "caption alt text description",
    "context_page_description": "content",
}
FORMS = (
    "use okvqa_full_corpus.csv (kid, text), its tab-separated form (id, text), a WIT file"
    " (.tsv or .tsv.gz, its images in images/), columns passage_id and passage_content, or lines"
    " of JSON (.jsonl) with text and an optional image"
)

# Returns the passage of a row, None to skip it. Raises `LoadError` and `ImageError`.
Reader = Callable[[Sequence[str]], Query | None]


def with_passages(
    benchmark: Benchmark, path: str | Path, *, alone: bool = False, on_error: OnError | None = None
) -> Benchmark:
    """Add the passages of `path` to the knowledge base, or replace it if `alone` (as for RACC)."""
    passages = tuple(load_passages(path, on_error=on_error))
    if not passages:
        raise LoadError(f"{path_text(path)} holds no passages", hint=FORMS)
    return replace(benchmark, knowledge=passages if alone else (*benchmark.knowledge, *passages))


def load_passages(
    path: str | Path, *, train: bool = False, on_error: OnError | None = None
) -> Iterator[Example]:
    """Yield passages: examples without an answer, with the query ids `GS_17` and `WIT_17`.

    The path is a file, a folder of tables or a Hugging Face id. `train` keeps the training part of
    the Google Search corpus. English rows of WIT are read, numbered in order, with the text of
    RA-VQA; if a folder `images` is beside the file, only those with an image in it. Lines of
    JSON may have images, too. Unreadable rows go to `on_error`.
    """
    if Path(path).suffix == LINES:
        return load_passage_lines(path, on_error=on_error)
    if Path(path).suffix in FILES:
        return _from_file(Path(path), train, on_error)
    return _from_table(str(path), train, on_error)


def _from_table(location: str, train: bool, on_error: OnError | None) -> Iterator[Example]:
    def make(row: Row, _: str) -> Example:
        query = Query(required(row, "passage_content"), id=required(row, "passage_id"))
        return Example(query, "", source=location)

    splits = ("train_passages", "train") if train else ("test_passages", "train")
    yield from parse_rows(first_split(location, *splits), make, on_error)


def _from_file(path: Path, train: bool, on_error: OnError | None) -> Iterator[Example]:
    shown = path_text(path)
    rows = csv_rows(path, FORMS, "\t,")
    _, header = next(rows, ("", []))
    if isinstance(header, LoadError):
        raise header
    read = _reader(header, path, train)

    def make(row: Sequence[str], _: str) -> Example | None:
        # One source for all rows: line numbers would need more memory than some passages.
        query = read(row)
        return None if query is None else Example(query, "", source=shown)

    yield from parse_rows(rows, make, on_error)


def _reader(header: Sequence[str], path: Path, train: bool) -> Reader:
    columns = {name.strip(): location for location, name in enumerate(header)}
    if columns.keys() >= WIT_TEXTS.keys() | {"language"}:
        downloads = Downloads(path.parent, FORMS)
        has_images = "image_url" in columns and downloads.find(IMAGES)
        return _Wit(columns, downloads if has_images else None)
    id = next((columns[name] for name in GS_IDS if name in columns), None)
    if id is None or len(columns) < 2:
        begins = ", ".join(columns)[:SHOWN] or "nothing"
        raise LoadError(f"{path_text(path)} has unknown columns, got {begins}", hint=FORMS)
    return _GoogleSearch(len(columns), id, train)


class _GoogleSearch:
    """Reader of the Google Search corpus; the text is the first column besides the id."""

    def __init__(self, width: int, id: int, train: bool) -> None:
        self._width = width
        self._id = id
        self._text = 0 if id else 1
        self._train = train

    def __call__(self, row: Sequence[str]) -> Query | None:
        if len(row) != self._width:
            raise LoadError(f"the row needs {self._width} columns, got {len(row)}", hint=FORMS)
        id, text = row[self._id].removeprefix("GS_"), row[self._text].strip()
        if not text:
            raise LoadError("the row has no text", hint="remove the row")
        if not id.isdecimal():
            raise LoadError(
                f"the id must be a number, got {id[:SHOWN]!r}",
                hint='number the rows, or write lines of JSON: {"text": "...", "id": "..."}',
            )
        if self._train and int(id) >= GS_TRAIN:
            return None
        return Query(text, id=f"GS_{id}")


class _Wit:
    """Reader of the English rows of WIT; with `downloads`, only those with a downloaded image."""

    def __init__(self, columns: dict[str, int], downloads: Downloads | None) -> None:
        self._language, self._url = columns["language"], columns.get("image_url", 0)
        self._downloads = downloads
        self._texts = {name: columns[column] for column, name in WIT_TEXTS.items()}
        self._width = len(columns)
        self._read = 0

    def __call__(self, row: Sequence[str]) -> Query | None:
        if len(row) != self._width:
            raise LoadError(f"the row needs {self._width} columns, got {len(row)}", hint=FORMS)
        if row[self._language] != "en":
            return None
        parts = [f"{name}: {row[at]}" for name, at in self._texts.items() if row[at].strip()]
        if not parts:
            raise LoadError("all text columns are empty", hint=FORMS)
        self._read += 1
        query = Query(" ".join(parts), id=f"WIT_{self._read - 1}")
        if self._downloads is None:
            return query
        image = self._downloads.find(*image_names(row[self._url]))
        return replace(query, images=(self._downloads.image(image),)) if image else None


def image_names(url: str) -> list[str]:
    """Return the possible paths of a downloaded image. Its name is the MD5 of the URL and `.jpg`,
    as in RA-VQA's code, or the last part of the URL, with its escapes decoded or not."""
    digest = hashlib.md5(url.encode(), usedforsecurity=False).hexdigest()
    name = url.partition("?")[0].rpartition("/")[2]
    return [f"{IMAGES}/{one}" for one in (f"{digest}.jpg", name, unquote(name)) if one]
