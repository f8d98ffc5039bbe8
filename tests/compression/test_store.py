from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.compression.store import CODES, ENTRIES, Manifest, PassageStore, Precision, content
from bottega.errors import StoreError
from bottega.types import Example, Query
from tests.compression.spoken import told as passage

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
    return PassageStore(folder, Manifest(compressor, PROMPTS, WIDTH, precision))


@pytest.mark.parametrize(("precision", "error"), [("fp16", 2e-3), ("int8", 2e-2)])
def test_what_was_added_comes_back_in_any_order(
    tmp_path: Path, precision: Precision, error: float
) -> None:
    store, told = opened(tmp_path, precision), named("one", "two", "three")

    assert store.add(told, rows) == 3

    asked = [told[2], told[0], told[2]]
    wanted = rows([one for _, one in asked])
    for again in (store, opened(tmp_path, precision)):
        torch.testing.assert_close(again.get(asked), wanted, atol=error, rtol=error)


def test_int8_takes_about_half_the_bytes(tmp_path: Path) -> None:
    half, eighth = opened(tmp_path / "half"), opened(tmp_path / "eighth", "int8")
    for store in (half, eighth):
        store.add(named("one", "two"), rows)

    assert half.bytes_a_passage == 2 * PROMPTS * WIDTH
    assert eighth.bytes_a_passage == PROMPTS * WIDTH + 2 * PROMPTS
    for store, folder in ((half, "half"), (eighth, "eighth")):
        on_disk = sum(p.stat().st_size for p in (tmp_path / folder).glob("*.bin"))
        assert on_disk == 2 * store.bytes_a_passage


def test_what_is_there_is_not_compressed_again(tmp_path: Path) -> None:
    opened(tmp_path).add(named("one", "two"), rows)

    assert opened(tmp_path).add(named("one", "two", "three"), rows) == 1
    assert opened(tmp_path).add(named("one", "two", "three"), rows) == 0


def test_a_changed_passage_is_refused_until_it_is_compressed_anew(tmp_path: Path) -> None:
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
def test_a_demonstration_whose_answer_changed_is_refused(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    store, shown = opened(tmp_path), Example(Query("is it red"), "yes")
    store.add([("id", shown)], rows)

    with pytest.raises(StoreError, match="id has changed"):
        store.get([("id", replace(shown, **changed))])  # type: ignore[arg-type]
    assert store.get([("id", replace(shown, source="elsewhere"))]).shape == (1, PROMPTS, WIDTH)


def test_stores_of_passages_keep_their_marks() -> None:
    """Those that were built before demonstrations could be."""
    assert content(passage("one")) == "fa6d87ceef509283"


def test_a_missing_passage_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="id-one is not compressed"):
        opened(tmp_path).get(named("one"))


def test_a_store_of_another_compressor_or_precision_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).add(named("one"), rows)

    with pytest.raises(StoreError, match="built as"):
        opened(tmp_path, compressor="b")
    with pytest.raises(StoreError, match="built as"):
        opened(tmp_path, precision="int8")
    with pytest.raises(StoreError, match="built as"):
        PassageStore(tmp_path, Manifest("a", PROMPTS, WIDTH + 1))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")

    with pytest.raises(StoreError, match="not a store's"):
        opened(tmp_path)


def test_a_failure_in_the_middle_keeps_what_was_done(tmp_path: Path) -> None:
    calls = 0

    def failing(passages: Sequence[Example]) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("the power is gone")
        return rows(passages)

    told = named(*(f"text {i}" for i in range(150)))
    with pytest.raises(RuntimeError):
        opened(tmp_path).add(told, failing)

    assert len(opened(tmp_path)) == 64
    assert opened(tmp_path).add(told, rows) == 86


@given(cut=st.integers(0, 400), entries=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_file_cut_anywhere_goes_on_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: int, entries: bool
) -> None:
    """Entries are written last: a cut there loses them, a cut before them is damage."""
    folder, told = tmp_path_factory.mktemp("store"), named("one", "two", "three", "four")
    opened(folder).add(told, rows)
    path = folder / (ENTRIES if entries else CODES)
    length = path.stat().st_size
    path.write_bytes(path.read_bytes()[: min(cut, length)])

    if not entries and cut < length:
        with pytest.raises(StoreError, match="too short"):
            opened(folder)
        return
    store = opened(folder)
    kept = len(store)
    assert store.add(told, rows) == 4 - kept
    wanted = rows([query for _, query in told])
    torch.testing.assert_close(store.get(told), wanted, atol=2e-3, rtol=2e-3)
