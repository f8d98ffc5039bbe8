"""Published tables: parquet, Arrow (`save_to_disk`), JSON and JSONL in a folder, or a data set on
the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from bottega.errors import BottegaError, ImageError, LoadError, MissingDependencyError
from bottega.evaluation.benchmarks.fields import UNUSABLE, Row
from bottega.evaluation.benchmarks.source import OnBad
from bottega.image import path_text
from bottega.knowledge.bad import or_raise
from bottega.types import Example

# Of a row and what it is called. None if the row is no part of the benchmark.
Make = Callable[[Row, str], Example | None]

HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*/[\w.-]+)(?:/(?P<config>[\w.-]+))?")
COLUMNAR = (".parquet", ".arrow")
SUFFIXES = (*COLUMNAR, ".jsonl", ".json")
BATCH = 64


def read_examples(
    place: str,
    split: str,
    make: Make,
    *,
    on_bad: OnBad | None,
    several: bool = False,
) -> list[Example]:
    """What `make` makes of each row, but for None. Rows of which it raises `LoadError` or
    `ImageError` go to `on_bad`."""
    report = or_raise(on_bad)
    made: list[Example] = []
    for source, row in read_rows(place, split, several=several):
        try:
            example = make(row, source)
        except (LoadError, ImageError) as error:
            report(LoadError(f"{source}: {error}", hint=error.hint))
        else:
            made += [] if example is None else [example]
    return made


def read_rows(place: str, split: str, *, several: bool = False) -> Iterator[tuple[str, Row]]:
    """The rows of a split, each after what it is called. A place is a folder, ID or ID/CONFIG;
    of tables side by side (subfolders, configs) one must be named unless `several` may be joined.

    A folder's files belong to the split that their name or, if they are columnar, their folder
    says: `data/test.jsonl`, `Art/test-00000-of-00001.parquet`, `test/data-00000-of-00001.arrow`.
    """
    folder, hub = Path(place), HUB_ID.fullmatch(place)
    if folder.is_dir():
        yield from _local(folder, split, several)
    elif hub is not None:
        yield from _hub(hub["id"], hub["config"], split, several)
    else:
        raise LoadError(
            f"{path_text(place)} is neither a folder nor a Hugging Face id",
            hint="check the path; an id is written as OWNER/NAME or OWNER/NAME/CONFIG",
        )


def _local(folder: Path, split: str, several: bool) -> Iterator[tuple[str, Row]]:
    files = sorted(path for path in folder.rglob("*") if _holds(path, split))
    if not files:
        raise LoadError(
            f"{path_text(folder)} has no table of the split {split!r}",
            hint=f"expected is {split}.jsonl, data/{split}-00000-of-00001.parquet or the like",
        )
    tables = sorted({path_text(file.parent.relative_to(folder)) for file in files})
    if not several and len(tables) > 1:
        raise _ambiguous(path_text(folder), tables)
    for file in files:
        name = path_text(file)
        with _failing_as_load_errors(name):
            for number, row in enumerate(_rows(file, name)):
                yield f"{name}, row {number}", row


def _holds(file: Path, split: str) -> bool:
    if file.suffix not in SUFFIXES:
        return False
    named = file.stem == split or file.stem.startswith(f"{split}-")
    return named or (file.suffix in COLUMNAR and file.parent.name == split)


def _ambiguous(place: str, tables: list[str]) -> LoadError:
    return LoadError(
        f"{place} holds several tables: {', '.join(tables)}",
        hint=f"name one, as in {place}/{tables[0]}",
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


def _hub(name: str, config: str | None, split: str, several: bool) -> Iterator[tuple[str, Row]]:
    with _failing_as_load_errors(name):
        import datasets

        configs = [config] if config else datasets.get_dataset_config_names(name)
        if not several and len(configs) > 1:
            raise _ambiguous(name, configs)
        for one in configs:
            stream = datasets.load_dataset(name, one, split=split, streaming=True)
            for number, row in enumerate(_undecoded(stream)):
                yield f"{name}/{one}, {split}, row {number}", row


def _undecoded(stream: Any) -> Any:
    """Images as their bytes: decoding and encoding again would change a picture's hash."""
    import datasets

    for column, feature in (stream.features or {}).items():
        if isinstance(feature, datasets.Image):
            stream = stream.cast_column(column, datasets.Image(decode=False))
    return stream


@contextmanager
def _failing_as_load_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "datasets", "eval") from error
    except BottegaError:
        raise
    except Exception as error:  # pyarrow, datasets, the hub's client: each has its own tree
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(
            f"{name} cannot be read: {reason}",
            hint="check the name, the network and the split, or give a folder with the files",
        ) from error
