"""Copies between files and PostgreSQL: complete, resumed after an interruption, and compared."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bottega.errors import BottegaError, SettingError, StoreBusyError, StoreError
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge import copy_store as copy_store_module
from bottega.knowledge.base_copy import Comparison, open_copy
from bottega.knowledge.records import RowMetadata
from bottega.knowledge.tuned_settings import TunedSettings, tuned_settings
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder, image_example, rows_of, text_example
from tests.postgres import PostgresServer

VIEWS = {
    "default": View(SeededEmbedder()),
    "answers": View(SeededEmbedder("other-8"), lambda one: Query(one.answer)),
}
# The fast tests copy to PostgreSQL in half of the cases, and from it in the test of digests.
SLOW = pytest.mark.slow
ROUTES = [("a.db", "b.db"), ("a.db", "pg"), pytest.param("pg", "b.db", marks=SLOW)]
TARGETS = ["b.db", pytest.param("pg", marks=SLOW)]
Locations = Callable[[str], str]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "a.db"
    fill(str(path))
    return path


@pytest.fixture
def locations(tmp_path: Path, postgres: PostgresServer, filled: Path) -> Iterator[Locations]:
    """Return a function from a name to a location: "a.db" is filled, the others are new; names of
    databases begin with "pg"."""
    urls: dict[str, str] = {}
    shutil.copy(filled, tmp_path / "a.db")

    def location(name: str) -> str:
        if not name.startswith("pg"):
            return str(tmp_path / name)
        if name not in urls:
            urls[name] = postgres.create_database()
        return urls[name]

    yield location
    for url in urls.values():
        postgres.drop_database(url)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_store_module, "BATCH_ROWS", 8)


def opened(location: str, namespace: str = "") -> KnowledgeBase:
    return KnowledgeBase.open(location, VIEWS, namespace=namespace)


def fill(location: str) -> None:
    """Store examples of every form in two namespaces, with all that is kept about them."""
    with opened(location) as kb, opened(location, "ward") as ward:
        kb.add([image_example(n) for n in range(6)])
        ward.add([image_example(3), text_example("ward", "no", rationale="why")])
        kb.add(
            [text_example(f"q{n}", f"a{n % 3}", tags={"b": str(n), "a": "é"}) for n in range(20)]
        )
        same = solid_image(7)
        two = Query("two", (same, same, solid_image(8)), ("x", "y"))
        kb.add([Example(two, "x", labels=("x", "y"), source="s"), text_example("none", labels=())])
        kb.delete(kb.ids()[2:5] + kb.ids()[-1:])
        kb.annotate(kb.ids()[8], rationale="because", tags={"more": "1"})
        kb.pin(kb.ids()[:2])
        kb.used(kb.ids()[1:4], saved_usd=0.07)
        ward.used(ward.ids()[:1])
        TunedSettings("seeded-8", 5, "shuffled").store(kb)
        kb.set_note("embedder", "pixels")


def copied(source: str, target: str) -> Comparison:
    with open_copy(source, target) as copy:
        copy.run()
        compared = copy.finish()
    assert compared.equal, compared.differences
    return compared


def metadata(kb: KnowledgeBase) -> dict[int, RowMetadata]:
    """Return age, pin and counters by key."""
    return kb._rows.metadata_by_id(kb._rows.keys(kb.ids()).values())


def assert_equal(source: str, target: str) -> None:
    for namespace in ("", "ward"):
        with opened(source, namespace) as one, opened(target, namespace) as other:
            assert list(one) == list(other)
            assert list(one.changes()) == list(other.changes())
            assert one.views() == other.views() and one.namespaces() == other.namespaces()
            ids = one.ids()
            assert metadata(one) == metadata(other)
            for view in VIEWS:
                assert np.array_equal(one.vectors(ids, view), other.vectors(ids, view))
            assert one.note("embedder") == other.note("embedder") == "pixels"
            assert tuned_settings(one) == tuned_settings(other)
            assert other.verify(deep=True).problems == ()


@pytest.mark.parametrize(("source", "target"), ROUTES)
def test_copy_holds_everything_and_goes_on(locations: Locations, source: str, target: str) -> None:
    source, target = locations(source), locations(target)
    if source.startswith("postgresql"):
        fill(source)
    compared = copied(source, target)
    assert_equal(source, target)
    counts = {part.name: part.count for part in compared.parts}
    assert counts.pop("changes") > 28
    assert counts == {"examples": 26, "images": 6, "vectors": 52, "views": 2, "settings": 2}
    assert compared.uncopied == ()
    with opened(source) as one, opened(target) as other:
        last = list(one.changes())[-1].seq
        for kb in (one, other):
            kb.add([text_example("new")])
        assert [c.id for c in one.changes(last)] == [c.id for c in other.changes(last)]
        keys = [kb._rows.keys(kb.ids()[-1:]) for kb in (one, other)]
        assert keys[0] == keys[1]
        found = [kb.search(Query("q5"), 3, by="default") for kb in (one, other)]
        assert [c.example for c in found[0]] == [c.example for c in found[1]]


def test_digests_are_those_of_the_content(locations: Locations) -> None:
    chain = ["a.db", "pg1", "pg2", "b.db"]
    steps = [copied(locations(one), locations(other)) for one, other in pairwise(chain)]
    assert {step.parts for step in steps} == {steps[0].parts}
    with opened(locations("b.db")) as kb:
        kb.pin(kb.ids()[5:6])
    pinned = copied(locations("b.db"), locations("c.db"))
    assert [one.name for one in pinned.parts if one not in steps[0].parts] == ["examples"]


class Interruption(Exception):
    pass


@pytest.mark.parametrize(("source", "target"), ROUTES)
def test_interrupted_copy_resumes(locations: Locations, source: str, target: str) -> None:
    source, target = locations(source), locations(target)
    if source.startswith("postgresql"):
        copied(locations("a.db"), source)
    steps = written = 0

    def stop(_: int) -> None:
        nonlocal steps
        steps += 1
        raise Interruption

    with pytest.raises(Interruption), open_copy(source, target) as copy:
        copy.run(stop)
    with pytest.raises(StoreError, match=r"unfinished copy of|does not exist"):
        KnowledgeBase.open(target, None, create=False)
    with open_copy(source, target) as copy:
        assert (total := copy.total) == 26
        written = copy.run()
    assert written == total - 8
    with pytest.raises(Interruption), open_copy(source, target) as copy:
        assert copy.run() == 0
        copy.finish(stop)
    copied(source, target)
    assert_equal(source, target)
    assert steps == 2


@pytest.mark.parametrize("target", TARGETS)
def test_changes_between_runs_are_copied(locations: Locations, target: str) -> None:
    source, target = locations("a.db"), locations(target)
    with open_copy(source, target) as copy:
        copy.run()
    with opened(source) as kb:
        kb.delete(kb.ids()[:3])
        kb.annotate(kb.ids()[2], rationale="other")
        kb.add([image_example(77)])
        kb.unpin(kb.ids())
    copied(source, target)
    assert_equal(source, target)


@pytest.mark.parametrize("target", TARGETS)
def test_differences_are_named_and_repaired(locations: Locations, target: str) -> None:
    source, target = locations("a.db"), locations(target)
    with open_copy(source, target) as copy:
        copy.run()
        with opened(source) as kb:
            gone, pinned = kb.ids()[3], kb.ids()[9]
            kb.delete([gone])
            kb.pin([pinned])
            kb.set_note("embedder", "bundled")
            kb.set_note("embedder2", "bundled")
        found = copy.finish()
    assert not found.equal
    by_part = dict(one.split(" differ: ") for one in found.differences)
    assert list(by_part) == ["examples", "images", "vectors", "changes", "settings"]
    assert pinned in by_part["examples"] and "row 9" in by_part["examples"]
    assert by_part["settings"] == "embedder, embedder2"
    with pytest.raises(StoreError):
        KnowledgeBase.open(target, None, create=False)
    copied(source, target)
    with opened(target) as kb:
        assert kb.metadata(pinned).pinned and kb.note("embedder2") == "bundled"


def test_damaged_rows_of_the_target_are_found(locations: Locations) -> None:
    source, target = locations("a.db"), locations("pg")
    with open_copy(source, target) as copy:
        copy.run()
        for statement in (
            "UPDATE kb_images SET data = '' WHERE sha256 = (SELECT min(sha256) FROM kb_images)",
            "DELETE FROM kb_vectors_2 WHERE key = 8",
            "UPDATE kb_examples SET rationale = 'wrong' WHERE key = 9",
            "UPDATE kb_changes SET op = 'delete' WHERE seq = 3",
        ):
            copy._target.read(statement)
        found = copy.finish()
        parts = [one.split()[0] for one in found.differences]
        assert parts == ["examples", "images", "vectors", "changes"]
    copied(source, target)
    assert_equal(source, target)


def test_damaged_source_stops_the_copy(locations: Locations) -> None:
    source = locations("a.db")
    with opened(source) as kb, rows_of(kb).transaction() as connection:
        connection.execute("UPDATE examples SET answer = 'other' WHERE key = 12")
    with (
        pytest.raises(StoreError, match=r"example \w+ of .*a.db is damaged: it has another"),
        open_copy(source, locations("b.db")) as copy,
    ):
        copy.run()
    assert not Path(locations("b.db")).exists()


def test_content_that_is_not_copied_is_named(locations: Locations) -> None:
    with opened(locations("a.db")) as kb:
        number, _ = kb._rows.begin_view("default", "third", 8)
        kb._rows.set_vectors(number, {1: np.ones(8, np.float32)}, logged=False)
        with rows_of(kb).transaction() as connection:
            connection.execute("INSERT INTO images VALUES ('0', 'image/png', 1, 1, x'00')")
    compared = copied(locations("a.db"), locations("pg"))
    assert compared.uncopied == (
        "vectors of an unfinished reindex of the view 'default' with third (1)",
        "images that no example uses (1)",
    )
    assert_equal(locations("a.db"), locations("pg"))


def test_view_that_is_replaced_meanwhile_is_a_difference(locations: Locations) -> None:
    with open_copy(locations("a.db"), locations("b.db")) as copy:
        copy.run()
        with opened(locations("a.db")) as kb:
            kb.reindex("default", SeededEmbedder("third"))
        assert any(one.startswith("views differ: default") for one in copy.finish().differences)
    with open_copy(locations("a.db"), locations("b.db")) as copy:
        assert copy.run() == 26
        assert copy.finish().equal


def refused(source: str, target: str) -> BottegaError:
    with pytest.raises(BottegaError) as caught, open_copy(source, target):
        pass
    assert caught.value.hint and "secret" not in f"{caught.value}{caught.value.hint}"
    return caught.value


def test_copy_that_another_process_reads_is_complete(locations: Locations) -> None:
    source, target = locations("a.db"), locations("b.db")
    part = f"{target}.part"
    with open_copy(source, target) as copy, closing(sqlite3.connect(part)) as other:
        copy._target.rows._writer.execute("PRAGMA busy_timeout = 10")  # type: ignore[attr-defined]
        copy.run()
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM examples").fetchone()
        with pytest.raises(StoreBusyError, match="in use by another process"):
            copy.finish()
    with closing(sqlite3.connect(part)) as other:
        other.execute("SELECT count(*) FROM examples").fetchone()
        copied(source, target)
    assert_equal(source, target)


def test_foreign_file_in_the_way_is_kept(locations: Locations) -> None:
    part = locations("b.db.part")
    with opened(part) as kb:
        kb.add([text_example("other")])
    assert "is in the way" in str(refused(locations("a.db"), locations("b.db")))
    with opened(part) as kb:
        assert len(kb) == 1


def test_targets_that_hold_something_are_refused(locations: Locations) -> None:
    a, b, pg = locations("a.db"), locations("b.db"), locations("pg")
    with opened(b) as kb:
        kb.add([text_example("b")])
    assert "b.db already exists" in str(refused(a, b))
    assert sorted(one.name for one in Path(a).parent.iterdir()) == ["a.db", "b.db"]
    with open_copy(a, pg) as copy:
        copy.run()
    with open_copy(a, locations("c.db")) as copy:
        copy.run()
    for target in (pg, locations("c.db")):
        assert f"unfinished copy of {a}, not of {b}" in str(refused(b, target))
    assert "unfinished copy of" in str(refused(pg, locations("d.db")))
    copied(a, pg)
    assert "contains a knowledge base" in str(refused(a, pg))
    with opened(pg) as kb:
        kb.delete(kb.ids())
    assert "contains a knowledge base" in str(refused(a, pg))


def test_impossible_copies_are_refused(locations: Locations) -> None:
    a, pg = locations("a.db"), locations("pg")
    assert "none.db does not exist" in str(refused(locations("none.db"), pg))
    assert "contains no knowledge base" in str(refused(pg, locations("b.db")))
    with KnowledgeBase.open(locations("empty.db"), SeededEmbedder()):
        pass
    assert "contains no knowledge base" in str(refused(locations("empty.db"), locations("b.db")))
    assert isinstance(refused(a, ":memory:"), SettingError)
    assert isinstance(refused(pg, pg), StoreError)
    copied(a, pg)
    assert isinstance(refused(pg, pg), SettingError)
    with KnowledgeBase.open(locations("long.db"), LongEmbedder("long")) as kb:
        kb.add([text_example("q")])
    assert "got 4001" in str(refused(locations("long.db"), locations("pg2")))


class LongEmbedder(SeededEmbedder):
    def __init__(self, fingerprint: str) -> None:
        super().__init__(fingerprint)
        self.dimension = 4001

    def embed(self, queries: object) -> np.ndarray:
        return np.ones((len(queries), 4001), np.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["b.db", "pg"])
def test_one_copy_to_a_target_at_a_time(locations: Locations, target: str) -> None:
    with open_copy(locations("a.db"), locations(target)):
        assert isinstance(refused(locations("a.db"), locations(target)), StoreBusyError)


def test_finished_copy_is_not_written_again(locations: Locations) -> None:
    with open_copy(locations("a.db"), locations("pg")) as copy:
        copy.run()
        copy._target.publish()
        with pytest.raises(StoreError, match="another process has finished the copy"):
            copy.run()


def test_finished_file_that_was_not_renamed_is_published(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Interruption

    with monkeypatch.context() as patch, pytest.raises(Interruption):
        patch.setattr(Path, "rename", fail)
        copied(locations("a.db"), locations("b.db"))
    copied(locations("a.db"), locations("b.db"))
    assert_equal(locations("a.db"), locations("b.db"))
    assert not list(Path(locations("b.db")).parent.glob("*.part*"))


def test_batches_are_limited_in_bytes(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_store_module, "BATCH_ROWS", 100)
    monkeypatch.setattr(copy_store_module, "BATCH_BYTES", 2 * len(solid_image(1).data))
    for location in (locations("a.db"), locations("pg")):
        steps: list[int] = []
        with open_copy(location, locations("b.db" if location.endswith(".db") else "c.db")) as copy:
            copy.run(steps.append)
            assert sum(steps) == 26 and steps[0] == 2
        if location.endswith(".db"):
            copied(location, locations("pg"))


def test_handles_from_before_a_copy_cannot_write_until_it_is_finished(locations: Locations) -> None:
    with opened(locations("pg")) as early:
        with (
            open_copy(locations("a.db"), locations("pg")),
            pytest.raises(StoreError, match="unfinished copy of"),
        ):
            early.add([text_example("mine")])
        copied(locations("a.db"), locations("pg"))
        assert_equal(locations("a.db"), locations("pg"))


COPY = """
import sys
from bottega.knowledge import copy_store
from bottega.knowledge.base_copy import open_copy
copy_store.BATCH_ROWS = 8
def report(rows):
    print(rows, flush=True)
with open_copy(*sys.argv[1:]) as copy:
    report(0)
    written = copy.run(report)
    assert copy.finish(report).equal
print("written", written, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_killed_copy_resumes(locations: Locations, target: str) -> None:
    """Kill the copy at random moments: while it writes, while it compares, and at its end."""
    rng = random.Random(target)
    source, location = locations("a.db"), locations(target)
    with opened(source) as kb:
        kb.add([image_example(n) for n in range(100, 300)])
        total = sum(kb.namespaces().values())
    batches = 2 * (total // 8)
    for earliest in (0, 1, 2, batches // 4, batches // 2, batches - 2):
        with subprocess.Popen(
            [sys.executable, "-c", COPY, source, location], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for _ in range(earliest + rng.randrange(3)):
                process.stdout.readline()
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read()
        if "written" not in rest:
            with pytest.raises(StoreError, match=r"unfinished copy|does not exist|no knowledge"):
                KnowledgeBase.open(location, None, create=False)
    if "written" not in rest:
        with open_copy(source, location) as copy:
            assert copy.run() < total / 2
            assert copy.finish().equal
    assert_equal(source, location)
