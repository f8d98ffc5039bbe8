from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from bottega._util.identity import ID_LENGTH, identity
from bottega.errors import (
    EmbedderMismatchError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from bottega.knowledge.records import EmbeddedBatch, UsageRecord, with_id
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.sqlite.schema import KNOWLEDGE_BASE
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.knowledge.doubles import DIMENSION, image_example, text_example, vector_of


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "kb.db")


def put(rows: SqliteRows, *examples: Example, fingerprint: str = "f") -> list[str]:
    named = [with_id(example, identity(example)) for example in examples]
    vectors = np.stack([vector_of(example.query) for example in examples])
    rows.put(named, {"default": EmbeddedBatch(fingerprint, vectors)})
    return [str(example.id) for example in named]


def test_every_field_is_restored(path: str) -> None:
    whole = Example(
        Query("Où?", (solid_image(1), solid_image(2)), ("a", "b")),
        "a, b",
        labels=("a", "b"),
        rationale="because",
        tags={"hue": "röd"},
        source="here",
    )
    rows = SqliteRows(path)
    (id,) = put(rows, whole)
    found = rows.get([id])[id]
    rows.close()
    assert found == Example(
        Query("Où?", whole.query.images, ("a", "b"), id=id),
        "a, b",
        labels=("a", "b"),
        rationale="because",
        tags={"hue": "röd"},
        source="here",
        id=id,
    )
    assert [image.data for image in found.query.images] == [
        image.data for image in whole.query.images
    ]
    assert len(id) == ID_LENGTH


def test_images_are_deleted_with_their_last_example(path: str) -> None:
    rows = SqliteRows(path)
    first, second = put(rows, image_example(1, question="Hue?"), image_example(1, question="Size?"))
    assert rows.footprint().images == 1
    rows.delete([first])
    assert rows.footprint().images == 1
    rows.delete([second])
    assert rows.footprint().images == 0
    rows.close()


class Interrupted(SqliteRows):
    """Row store that another process changes right after a read of keys."""

    def __init__(self, path: str, change: Callable[[], object]) -> None:
        super().__init__(path)
        self._change = change

    def keys(self, ids: Collection[str]) -> dict[str, int]:
        found = super().keys(ids)
        self._change()
        return found


def test_example_that_another_process_annotates_is_found(path: str) -> None:
    other = SqliteRows(path)
    (id,) = put(other, image_example(1))
    rows = Interrupted(path, lambda: other.annotate(id, {"rationale": "because"}, {}))
    assert set(rows.get([id])) == {id}
    rows.close()
    other.close()


def test_deleted_example_leaves_nothing_in_the_file(path: str) -> None:
    rows = SqliteRows(path)
    kept, gone = put(rows, image_example(1), image_example(2))
    rows.add_uses({kept: UsageRecord(1, 100.0, 0.0), gone: UsageRecord(1, 100.0, 0.0)})
    rows.delete([gone])
    rows.close()
    connection = sqlite3.connect(path)
    for table in ("examples", "vectors", "example_images", "images", "uses"):
        assert connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (1,), table
    connection.close()


def test_late_uses_do_not_reduce_last_used(path: str) -> None:
    rows = SqliteRows(path)
    (id,) = put(rows, text_example("a"))
    for last in (100.0, 300.0, 200.0):
        rows.add_uses({id: UsageRecord(2, last, 0.5)})
    found = rows.read("SELECT count, last_used, saved_usd FROM uses")
    assert [tuple(row) for row in found] == [(6, 300.0, 1.5)]
    rows.close()


def test_existing_id_is_not_stored_again(path: str) -> None:
    rows = SqliteRows(path)
    (id,) = put(rows, text_example("a"))
    assert put(rows, text_example("a", rationale="later")) == [id]
    assert rows.get([id])[id].rationale is None
    assert rows.footprint().examples == 1
    rows.close()


def test_changes_contain_vectors_and_deletions(path: str) -> None:
    rows = SqliteRows(path)
    ids = put(rows, text_example("a"), text_example("b"))
    start = rows.changes_since(0, 10)
    assert [change.vector is not None for change in start] == [True, True]
    rows.delete(ids[:1])
    (gone,) = rows.changes_since(start[-1].seq, 10)
    assert (gone.key, gone.vector, gone.seq) == (start[0].key, None, rows.last_seq())
    assert len(rows.changes_since(0, 2)) == 2
    rows.close()


def test_key_is_never_reused(path: str) -> None:
    rows = SqliteRows(path)
    (id,) = put(rows, text_example("a"))
    key = rows.keys([id])[id]
    rows.delete([id])
    put(rows, text_example("a"))
    assert rows.keys([id])[id] > key
    rows.close()


def test_batch_of_another_embedder_is_rejected(path: str) -> None:
    rows = SqliteRows(path)
    put(rows, text_example("a"), fingerprint="one")
    with pytest.raises(EmbedderMismatchError, match=r"'one'.*'two'"):
        put(rows, text_example("b"), fingerprint="two")
    assert rows.footprint().examples == 1
    rows.close()


def test_second_writer_causes_a_busy_error(path: str) -> None:
    rows = SqliteRows(path, busy_seconds=0.05)
    (id,) = put(rows, text_example("a"))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusyError) as raised:
        put(rows, text_example("b"))
    assert raised.value.retryable
    assert id in rows.get([id])
    other.execute("COMMIT")
    other.close()
    put(rows, text_example("b"))
    assert rows.footprint().examples == 2
    rows.close()


def test_full_disk_keeps_stored_examples(path: str) -> None:
    rows = SqliteRows(path)
    (id,) = put(rows, image_example(1))
    pages = rows._writer.execute("PRAGMA page_count").fetchone()[0]
    rows._writer.execute(f"PRAGMA max_page_count = {pages + 2}")
    noise = np.random.default_rng(0).bytes(100_000).hex()
    with pytest.raises(StoreFullError) as raised:
        put(rows, text_example("small"), text_example(noise))
    assert "intact" in raised.value.hint
    assert rows.footprint().examples == 1
    assert rows.get([id])[id].query.images == image_example(1).query.images
    rows._writer.execute("PRAGMA max_page_count = 1000000")
    put(rows, text_example(noise))
    rows.close()


def test_file_that_is_not_a_database_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("shopping list " * 100)
    with pytest.raises(StoreError, match=r"notes\.db is not a knowledge base"):
        SqliteRows(str(path))
    assert path.read_text().startswith("shopping")


def test_database_of_another_program_is_rejected(path: str) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE bookmarks (url TEXT)")
    other.close()
    before = Path(path).read_bytes()
    with pytest.raises(StoreError, match="another program"):
        SqliteRows(path)
    assert Path(path).read_bytes() == before


def test_newer_format_suggests_an_upgrade(path: str) -> None:
    SqliteRows(path).close()
    later = sqlite3.connect(path)
    later.execute(f"PRAGMA user_version = {KNOWLEDGE_BASE.version + 1}")
    later.close()
    with pytest.raises(StoreError, match=f"format {KNOWLEDGE_BASE.version + 1}") as raised:
        SqliteRows(path)
    assert "upgrade" in raised.value.hint


def test_damaged_file_is_a_store_error(path: str) -> None:
    rows = SqliteRows(path)
    put(rows, *(text_example(str(i) * 50) for i in range(200)))
    rows.close()
    data = bytearray(Path(path).read_bytes())
    data[4096:-4096] = b"\xff" * (len(data) - 8192)
    Path(path).write_bytes(data)
    with pytest.raises(StoreError) as raised:
        broken = SqliteRows(path)
        try:
            broken.ids_where()
        finally:
            broken.close()
    assert raised.value.hint


@pytest.mark.parametrize(
    ("column", "value"),
    [("tags", "'{\"a\": '"), ("choices", "'5'"), ("answer", "CAST(x'ff' AS TEXT)")],
)
def test_flipped_bit_in_a_row_is_a_store_error(path: str, column: str, value: str) -> None:
    rows = SqliteRows(path)
    (id,) = put(rows, text_example("a"))
    rows._writer.execute(f"UPDATE examples SET {column} = {value}")
    with pytest.raises(StoreError, match=r"kb\.db is damaged"):
        rows.get([id])
    rows.close()


def test_flipped_bit_in_labels_or_vectors_is_a_store_error(path: str) -> None:
    rows = SqliteRows(path)
    put(rows, text_example("a"))
    rows._writer.execute("UPDATE examples SET labels = '[\"a'")
    rows._writer.execute("UPDATE vectors SET vector = x'00ff'")
    for read in (rows.labels, lambda: rows.changes_since(0, 9)):
        with pytest.raises(StoreError, match=r"kb\.db is damaged"):
            read()
    rows.close()


def test_missing_paths_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        SqliteRows(str(tmp_path / "gone.db"), create=False)
    with pytest.raises(StoreError, match=r"folder .* does not exist"):
        SqliteRows(str(tmp_path / "no" / "kb.db"))
    with pytest.raises(StoreError, match="is a folder"):
        SqliteRows(str(tmp_path))


READ_ONLY = """
import os, sys
from bottega.errors import StoreError
from bottega.knowledge.sqlite.rows import SqliteRows
os.chmod(sys.argv[1], 0o444)
os.chmod(os.path.dirname(sys.argv[1]), int(sys.argv[2], 8))
if os.getuid() == 0:
    os.setuid(65534)
rows = SqliteRows(sys.argv[1])
assert len(rows.ids_where()) == 1
try:
    rows.delete(rows.ids_where())
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("folder_mode", ["555", pytest.param("777", marks=pytest.mark.slow)])
def test_read_only_file_can_be_read(public_folder: Path, folder_mode: str) -> None:
    rows = SqliteRows(str(public_folder / "kb.db"))
    put(rows, text_example("a"))
    rows.close()
    command = [sys.executable, "-c", READ_ONLY, str(public_folder / "kb.db"), folder_mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "is read-only" in done.stdout, done.stderr


def test_closed_store_is_an_error(path: str) -> None:
    rows = SqliteRows(path)
    rows.close()
    rows.close()
    with pytest.raises(StoreError, match="is closed"):
        rows.ids_where()
    with pytest.raises(StoreError, match="is closed"):
        put(rows, text_example("a"))


def test_concurrent_creation_of_a_file(path: str) -> None:
    failures: list[Exception] = []

    def write(number: int) -> None:
        try:
            rows = SqliteRows(path)
            put(rows, text_example(f"{number}"))
            rows.close()
        except Exception as error:
            failures.append(error)

    threads = [Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    rows = SqliteRows(path)
    assert rows.footprint().examples == len(threads)
    assert rows.views()["default"].dimension == DIMENSION
    rows.close()


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.97])
def test_truncated_file_is_a_store_error(path: str, share: float) -> None:
    rows = SqliteRows(path)
    put(rows, *(text_example(str(i) * 50) for i in range(300)))
    rows.close()
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(StoreError) as raised:
        broken = SqliteRows(path)
        try:
            broken.by_keys(broken.keys(broken.ids_where()).values())
            broken.changes_since(0, 10_000)
            broken.vectors_after(0, 10_000, 1)
        finally:
            broken.close()
    assert raised.value.hint
