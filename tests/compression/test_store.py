import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega._util.durable_files import os_errors, write_at
from bottega.compression.passage_store import (
    ENTRIES,
    MANIFEST,
    ROWS,
    PassageStore,
    Precision,
    StoreManifest,
    content_digest,
)
from bottega.errors import StoreError
from bottega.types import Example, Query
from tests.compression.tiny_models import passage

PROMPTS, WIDTH = 3, 8


def named(*texts: str) -> list[tuple[str, Example]]:
    return [(f"id-{text}", passage(text)) for text in texts]


def rows(passages: Sequence[Example]) -> torch.Tensor:
    """Different for every text, and the same again."""
    made = [
        torch.randn(
            PROMPTS, WIDTH, generator=torch.Generator().manual_seed(crc32(one.query.text.encode()))
        )
        for one in passages
    ]
    return torch.stack(made)


def opened(folder: Path, precision: Precision = "fp16", compressor: str = "a") -> PassageStore:
    return PassageStore(folder, StoreManifest(compressor, PROMPTS, WIDTH, precision))


@pytest.mark.parametrize(("precision", "error"), [("fp16", 2e-3), ("int8", 2e-2)])
def test_rows_are_read_in_any_order(tmp_path: Path, precision: Precision, error: float) -> None:
    store, passages = opened(tmp_path, precision), named("one", "two", "three")

    assert store.add(passages, rows) == 3

    query = [passages[2], passages[0], passages[2]]
    wanted = rows([one for _, one in query])
    for again in (store, opened(tmp_path, precision)):
        torch.testing.assert_close(again.get(query), wanted, atol=error, rtol=error)


def test_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    for _ in range(2):
        opened(tmp_path / "made" / "too").add(named("one"), rows)

    assert len(opened(tmp_path / "made" / "too")) == 1


def test_int8_takes_about_half_the_bytes(tmp_path: Path) -> None:
    half, eighth = opened(tmp_path / "half"), opened(tmp_path / "eighth", "int8")
    for store in (half, eighth):
        store.add(named("one", "two"), rows)

    assert half.bytes_per_passage == 2 * PROMPTS * WIDTH
    assert eighth.bytes_per_passage == PROMPTS * WIDTH + 4 * PROMPTS
    for store, folder in ((half, "half"), (eighth, "eighth")):
        on_disk = sum(p.stat().st_size for p in (tmp_path / folder).glob("*.bin"))
        assert on_disk == 2 * store.bytes_per_passage


def test_existing_rows_are_not_compressed_again(tmp_path: Path) -> None:
    opened(tmp_path).add(named("one", "two"), rows)

    assert opened(tmp_path).add(named("one", "two", "three"), rows) == 1
    assert opened(tmp_path).add(named("one", "two", "three"), rows) == 0


def test_changed_passage_is_an_error_until_compressed_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(named("one"), rows)
    changed = [("id-one", passage("another text"))]

    with pytest.raises(StoreError, match="changed") as refused:
        store.get(changed)
    assert "build" in refused.value.hint
    assert store.add(changed, rows) == 1
    torch.testing.assert_close(store.get(changed), rows([changed[0][1]]), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "changed", [{"answer": "no"}, {"answer": ""}, {"rationale": "because"}], ids=str
)
def test_demonstration_with_changed_answer_is_an_error(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    store, shown = opened(tmp_path), Example(Query("is it red"), "yes")
    store.add([("id", shown)], rows)

    with pytest.raises(StoreError, match="id has changed"):
        store.get([("id", replace(shown, **changed))])  # type: ignore[arg-type]
    assert store.get([("id", replace(shown, source="elsewhere"))]).shape == (1, PROMPTS, WIDTH)


def test_digests_of_passages_are_stable() -> None:
    """Those that were built before demonstrations could be."""
    assert content_digest(passage("one")) == "fa6d87ceef509283"


def test_missing_passage_error_names_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="id-one is not compressed") as raised:
        opened(tmp_path).get(named("one"))
    assert "`bottega compress build` again" in raised.value.hint
    [(id, one)] = named("one")
    with pytest.raises(StoreError, match="id-one is not compressed") as raised:
        opened(tmp_path).get([(id, replace(one, answer="red"))])
    assert "`bottega compress build --all` again" in raised.value.hint


def test_other_compressor_or_precision_is_an_error(tmp_path: Path) -> None:
    opened(tmp_path).add(named("one"), rows)

    with pytest.raises(StoreError, match="compressor a, not b"):
        opened(tmp_path, compressor="b")
    with pytest.raises(StoreError, match="precision fp16, not int8"):
        opened(tmp_path, precision="int8")
    with pytest.raises(StoreError, match=f"width {WIDTH}, not {WIDTH + 1}"):
        PassageStore(tmp_path, StoreManifest("a", PROMPTS, WIDTH + 1))


def test_foreign_folder_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("text")

    with pytest.raises(StoreError, match="holds other files"):
        opened(tmp_path)


def test_interrupted_build_keeps_finished_rows(tmp_path: Path) -> None:
    calls = 0

    def failing(passages: Sequence[Example]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the power is gone")
        return rows(passages)

    passages = named(*(f"text {i}" for i in range(150)))
    with pytest.raises(RuntimeError):
        opened(tmp_path).add(passages, failing)

    assert len(opened(tmp_path)) == 64
    assert opened(tmp_path).add(passages, rows) == 86


@given(cut=st.integers(0, 400), entries=st.booleans())
@settings(max_examples=40, deadline=None)
def test_truncated_file_resumes_or_is_an_error(
    tmp_path_factory: pytest.TempPathFactory, cut: int, entries: bool
) -> None:
    """Entries are written last: a cut there loses them, a cut before them is damage."""
    folder, passages = (
        tmp_path_factory.mktemp("store"),
        named("one", "two", "three", "four"),
    )
    opened(folder).add(passages, rows)
    path = folder / (ENTRIES if entries else ROWS)
    length = path.stat().st_size
    path.write_bytes(path.read_bytes()[: min(cut, length)])

    if not entries and cut < length:
        with pytest.raises(StoreError, match="too short"):
            opened(folder)
        return
    store = opened(folder)
    kept = len(store)
    assert store.add(passages, rows) == 4 - kept
    wanted = rows([query for _, query in passages])
    torch.testing.assert_close(store.get(passages), wanted, atol=2e-3, rtol=2e-3)


def check_rows(store: PassageStore, passages: list[tuple[str, Example]]) -> None:
    wanted = rows([one for _, one in passages])
    torch.testing.assert_close(store.get(passages), wanted, atol=2e-3, rtol=2e-3)


def test_second_concurrent_builder_is_an_error_and_sequential_builders_keep_rows(
    tmp_path: Path,
) -> None:
    one, other, passages = opened(tmp_path), opened(tmp_path), named(*"abcdef")

    def meanwhile(batch: Sequence[Example]) -> torch.Tensor:
        with pytest.raises(StoreError, match="another process") as refused:
            other.add(passages[3:], rows)
        assert "wait" in refused.value.hint
        return rows(batch)

    one.add(passages[:3], meanwhile)
    other.add(passages[3:5], rows)
    one.add(passages[5:], rows)

    check_rows(one, passages)
    check_rows(opened(tmp_path), passages)


def test_readers_change_nothing_and_work_during_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passages = named(*"abcdef")
    builder = opened(tmp_path)
    builder.add(passages[:3], rows)
    reader = opened(tmp_path)

    def write(path: Path, data: bytes, *, at: int = 0) -> None:
        write_at(path, data, at=at)
        before = {one: one.read_bytes() for one in tmp_path.iterdir()}
        for one in (reader, opened(tmp_path)):
            check_rows(one, passages[:3])
        assert {one: one.read_bytes() for one in tmp_path.iterdir()} == before

    monkeypatch.setattr("bottega.compression.passage_store.write_at", write)
    builder.add(passages[3:], rows)

    check_rows(builder, passages)
    check_rows(opened(tmp_path), passages)


def test_reading_does_not_create_folder(tmp_path: Path) -> None:
    assert len(opened(tmp_path / "nowhere")) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [ROWS, ENTRIES])
def test_full_disk_keeps_stored_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    passages, store = named(*"abcdef"), opened(tmp_path)
    store.add(passages[:2], rows)

    def full(path: Path, data: bytes, *, at: int = 0) -> None:
        if path.name == name:
            write_at(path, data[: len(data) * 2 // 3], at=at)
            with os_errors(path.parent):
                raise OSError(28, "No space left on index")
        write_at(path, data, at=at)

    with monkeypatch.context() as patch:
        patch.setattr("bottega.compression.passage_store.write_at", full)
        with pytest.raises(StoreError, match="No space") as refused:
            store.add(passages[2:5], rows)
    assert "disk space" in refused.value.hint

    for one in (store, opened(tmp_path)):
        check_rows(one, passages[:2])
    store.add(passages[5:], rows)
    store.add(passages, rows)
    check_rows(store, passages)
    check_rows(opened(tmp_path), passages)


def test_os_error_becomes_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    for folder in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(StoreError, match="cannot be read"):
            opened(folder).add(named("one"), rows)


def test_missing_rows_are_an_error(tmp_path: Path) -> None:
    passages, store = named("one", "two"), opened(tmp_path)
    store.add(passages, rows)
    (tmp_path / ROWS).unlink()

    for act in (lambda: store.get(passages), lambda: opened(tmp_path)):
        with pytest.raises(StoreError, match="missing") as refused:
            act()
        assert "again" in refused.value.hint


@pytest.mark.parametrize(
    "line", [b"{{{", b"5", b"null", b'["a","b","c"]', b"\0\0", b"\xff", b"", b"[" * 100_000]
)
def test_damaged_entries_are_an_error(tmp_path: Path, line: bytes) -> None:
    opened(tmp_path).add(named("one", "two"), rows)
    path = tmp_path / ENTRIES
    path.write_bytes(line + b"\n" + path.read_bytes())

    with pytest.raises(StoreError, match="damaged") as refused:
        opened(tmp_path)
    assert "again" in refused.value.hint


def test_entries_that_end_before_the_last_read_one_are_an_error(tmp_path: Path) -> None:
    """The folder holds another build. Appending to it would leave a gap."""
    store, path = opened(tmp_path), tmp_path / ENTRIES
    store.add(named("one", "two"), rows)
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])

    with pytest.raises(StoreError, match="damaged"):
        store.add(named("three"), rows)


def test_swapped_rows_are_detected(tmp_path: Path) -> None:
    passages = named("one", "two", "three")
    opened(tmp_path).add(passages, rows)
    path = tmp_path / ENTRIES
    lines = path.read_bytes().splitlines(keepends=True)

    path.write_bytes(b"".join(lines[1:]))
    with pytest.raises(StoreError, match="damaged"):
        opened(tmp_path)

    renumbered = [json.dumps([row, *json.loads(lines[2 - row])[1:]]) + "\n" for row in range(3)]
    path.write_text("".join(renumbered))
    with pytest.raises(StoreError, match="another row") as refused:
        opened(tmp_path).get(passages[:1])
    assert "again" in refused.value.hint

    path.write_bytes(b"".join(lines))
    with (tmp_path / ROWS).open("r+b") as file:
        file.write(os.urandom(8))
    with pytest.raises(StoreError, match="another row"):
        opened(tmp_path).get(passages[:1])
    check_rows(opened(tmp_path), passages[1:])


GOOD = {"compressor": "a", "prompts": 3, "width": 8, "precision": "fp16", "version": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "damaged"),
        ("[1]", "damaged"),
        ("\0", "damaged"),
        (json.dumps(GOOD | {"precision": "fp32"}), "damaged"),
        (json.dumps(GOOD | {"prompts": "3"}), "damaged"),
        (json.dumps(GOOD | {"width": 0}), "damaged"),
        (json.dumps(GOOD | {"version": 1}), "version 2, got 1"),
    ],
)
def test_foreign_manifest_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / MANIFEST).write_text(text)

    for act in (
        lambda: opened(tmp_path),
        lambda: StoreManifest.for_store(tmp_path, "a", PROMPTS, WIDTH),
    ):
        with pytest.raises(StoreError, match=said) as refused:
            act()
        assert "again" in refused.value.hint


@pytest.mark.parametrize(
    ("precision", "number"),
    [("fp16", 65600.0), ("fp16", float("nan")), ("int8", float("inf")), ("int8", float("nan"))],
)
def test_unrepresentable_numbers_are_an_error(
    tmp_path: Path, precision: Precision, number: float
) -> None:
    store, passages = opened(tmp_path, precision), named("one", "two")

    def one_too_large(passages: Sequence[Example]) -> torch.Tensor:
        made = rows(passages)
        made[1, 2, 3] = number
        return made

    with pytest.raises(StoreError, match="id-two was compressed to numbers"):
        store.add(passages, one_too_large)
    assert len(store) == len(opened(tmp_path, precision)) == 0
    assert not (tmp_path / ROWS).exists()


def test_int8_stores_numbers_beyond_fp16(tmp_path: Path) -> None:
    store, passages = opened(tmp_path, "int8"), named("one")

    store.add(passages, lambda passages: rows(passages) * 9e6)

    wanted = rows([passages[0][1]]) * 9e6
    torch.testing.assert_close(store.get(passages), wanted, atol=2e5, rtol=0)


def test_rows_of_another_shape_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="must have shape"):
        opened(tmp_path).add(named("one", "two"), lambda passages: rows(passages)[:1])
