from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import EmbeddingError, SettingError, StoreBusyError, StoreError
from bottega.knowledge.late_interaction import token_search as search
from bottega.knowledge.late_interaction.maxsim import exact_scores
from bottega.knowledge.late_interaction.token_array import TokenArray
from bottega.knowledge.late_interaction.token_search import SearchEffort, TokenIndex
from bottega.protocols import Vectors
from tests.knowledge.late_interaction.data import DIMENSION, documents, names

MATRICES = documents(200, seed=5)
Step = tuple[str, list[int]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "delete", "compact", "reopen"]),
        st.lists(st.integers(0, 30), max_size=8),
    ),
    max_size=12,
)


def opened(folder: Path | None, fingerprint: str = "test") -> TokenArray:
    return TokenArray(folder, fingerprint, DIMENSION)


def filled(folder: Path | None, count: int = 50) -> TokenArray:
    array = opened(folder)
    array.append(names(count), MATRICES[:count])
    return array


def documents_of(array: TokenArray) -> dict[str, Vectors]:
    return {id: array.document(id) for id in array.ids()}


def check_equal(array: TokenArray, expected: dict[str, Vectors]) -> None:
    assert array.ids() == list(expected)
    for id, rows in documents_of(array).items():
        assert np.array_equal(rows, expected[id].astype(np.float16).astype(np.float32))


@settings(max_examples=40)
@given(steps=STEPS)
def test_any_sequence_equals_a_rebuilt_array(
    tmp_path_factory: pytest.TempPathFactory, steps: Sequence[Step]
) -> None:
    folder = tmp_path_factory.mktemp("array")
    array, expected = opened(folder), dict[str, Vectors]()
    for round, (action, numbers) in enumerate(steps):
        ids = [f"d{number}" for number in dict.fromkeys(numbers)]
        if action == "append":
            rows = [MATRICES[(round * 7 + i) % 200] for i in range(len(ids))]
            array.append(ids, rows)
            for id, matrix in zip(ids, rows, strict=True):
                expected.pop(id, None)
                expected[id] = matrix
        elif action == "delete":
            assert array.delete(ids) == len(expected.keys() & set(ids))
            expected = {id: rows for id, rows in expected.items() if id not in ids}
        elif action == "compact":
            array.compact()
        else:
            array.close()
            array = opened(folder)
        check_equal(array, expected)
    rebuilt = opened(None)
    rebuilt.append(list(expected), list(expected.values()))
    for k in (1, 5) if expected else ():
        found = TokenIndex(array).search(MATRICES[0], k)
        assert found == TokenIndex(rebuilt).search(MATRICES[0], k)
    array.close()


@settings(max_examples=30)
@given(within=st.sets(st.integers(0, 70)), k=st.integers(1, 10), number=st.integers(0, 199))
def test_within_equals_the_filtered_exact_search(within: set[int], k: int, number: int) -> None:
    array = filled(None)
    index = TokenIndex(array, effort=SearchEffort(rescored=64))
    chosen = {f"d{n}" for n in within}
    everything = index.search(MATRICES[number], 50, exact=True)
    expected = [hit for hit in everything if hit[0] in chosen][:k]
    found = index.search(MATRICES[number], k, within=chosen)
    assert [id for id, _ in found] == [id for id, _ in expected]
    assert [score for _, score in found] == pytest.approx([s for _, s in expected], abs=1e-4)


def test_stored_documents_are_read_again(tmp_path: Path) -> None:
    filled(tmp_path).close()
    array = opened(tmp_path)
    assert len(array) == 50
    check_equal(array, dict(zip(names(50), MATRICES, strict=False)))


@pytest.mark.parametrize("file", ["half.0", "eighth.0", "offsets.0", "ids.0", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_array_is_emptied_not_trusted(tmp_path: Path, file: str, damage: str) -> None:
    filled(tmp_path).close()
    path = tmp_path / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[: len(content) // 2])
    array = opened(tmp_path)
    assert len(array) == 0
    array.append(names(3), MATRICES[:3])
    array.close()
    assert opened(tmp_path).ids() == names(3)


def test_array_of_another_embedder_is_emptied(tmp_path: Path) -> None:
    filled(tmp_path).close()
    array = opened(tmp_path, "another")
    assert len(array) == 0
    assert not list(tmp_path.glob("half.*"))


def test_interrupted_append_is_ignored(tmp_path: Path) -> None:
    filled(tmp_path, 10).close()
    for file in ("half.0", "ids.0"):
        with (tmp_path / file).open("ab") as half_written:
            half_written.write(b'"rest')
    array = opened(tmp_path)
    assert array.ids() == names(10)
    array.append(["more"], [MATRICES[20]])
    array.close()
    check_equal(
        opened(tmp_path),
        dict(zip([*names(10), "more"], [*MATRICES[:10], MATRICES[20]], strict=True)),
    )


def test_one_process_at_a_time(tmp_path: Path) -> None:
    array = opened(tmp_path)
    with pytest.raises(StoreBusyError) as raised:
        opened(tmp_path)
    assert raised.value.hint
    array.close()
    opened(tmp_path).close()


def test_closed_array_is_not_written(tmp_path: Path) -> None:
    index = TokenIndex(filled(tmp_path, 3))
    index.close()
    for use in (
        lambda: index.append(["more"], MATRICES[:1]),
        lambda: index.delete(names(1)),
        lambda: index.search(MATRICES[0], 1),
    ):
        with pytest.raises(StoreError, match="closed"):
            use()
    assert opened(tmp_path).ids() == names(3)


def test_invalid_tokens_are_rejected_and_not_stored() -> None:
    array = filled(None, 3)
    for wrong in (
        np.ones((2, 7)),
        np.ones((0, DIMENSION)),
        np.full((1, DIMENSION), np.nan),
        np.full((1, DIMENSION), 1e5),
    ):
        with pytest.raises(EmbeddingError):
            array.append(["good", "bad"], [MATRICES[0], wrong.astype(np.float32)])
    assert array.ids() == names(3)
    with pytest.raises(EmbeddingError, match="no tokens") as raised:
        array.append(["bad"], [np.ones((0, DIMENSION), np.float32)])
    assert "zeros" in raised.value.hint


def test_many_deletions_compact_the_array(tmp_path: Path) -> None:
    array = filled(tmp_path)
    index = TokenIndex(array)
    before = (tmp_path / "half.0").stat().st_size
    assert index.delete(names(30)) == 30
    assert array.generation == 1
    assert (tmp_path / "half.1").stat().st_size < before
    assert not (tmp_path / "half.0").exists()
    assert index.ids() == names(20, start=30)


def test_empty_array_finds_nothing() -> None:
    index = TokenIndex(opened(None))
    assert index.search(MATRICES[0], 3) == []
    with pytest.raises(SettingError):
        index.search(MATRICES[0], 0)


def test_codes_follow_the_array_and_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "MIN_CODED_DOCUMENTS", 60)
    effort = SearchEffort(shortlist=0.5, rescored=20, small=20)
    index = TokenIndex(filled(tmp_path), effort=effort)
    index.search(MATRICES[0], 5)
    assert not (tmp_path / "codes.0").exists()
    index.append(names(100, start=50), MATRICES[50:150])
    check_recall(index)
    stored = (tmp_path / "codes.0").stat().st_mtime_ns
    index.close()
    again = TokenIndex(opened(tmp_path), effort=effort)
    check_recall(again)
    assert (tmp_path / "codes.0").stat().st_mtime_ns == stored
    again.append(names(50, start=150), MATRICES[150:])
    check_recall(again)
    again.close()
    (tmp_path / "codes.0").write_bytes(b"nothing")
    check_recall(TokenIndex(opened(tmp_path), effort=effort))


def check_recall(index: TokenIndex) -> None:
    found = [
        len(dict(index.search(query, 5)).keys() & dict(index.search(query, 5, exact=True)).keys())
        for query in MATRICES[:20]
    ]
    assert sum(found) / (5 * 20) >= 0.95


def test_exact_search_returns_reference_scores() -> None:
    array = filled(None)
    [(id, score)] = TokenIndex(array).search(MATRICES[7], 1, exact=True)
    assert id == "d7"
    rows = array.document(id)
    assert score == pytest.approx(
        float(exact_scores(MATRICES[7], rows, np.array([0, len(rows)]))[0]), abs=1e-5
    )
