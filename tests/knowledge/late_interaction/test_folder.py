"""Folders with other files, and folders that cannot be used."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega._util.durable_files import os_errors
from bottega.errors import StoreError, StoreFullError
from bottega.knowledge.late_interaction import token_array
from bottega.knowledge.late_interaction.token_array import TokenArray
from bottega.knowledge.late_interaction.token_search import TokenIndex
from tests.knowledge.late_interaction.data import DIMENSION, documents, names

MATRICES = documents(40, seed=6)
FOREIGN = ("ids.csv", "codes.py", "half.png", "offsets.txt", "eighth.7", "readme")


def opened(folder: Path | str) -> TokenArray:
    return TokenArray(folder, "test", DIMENSION)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("foreign", [FOREIGN, ("half.0",), ("lock", "readme"), ("manifest.json",)])
def test_folder_with_other_files_is_rejected_and_kept(
    tmp_path: Path, foreign: tuple[str, ...]
) -> None:
    for name in foreign:
        (tmp_path / name).write_text('{"name": "mine"}')
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="do not belong to an index") as raised:
        opened(tmp_path)
    assert "an empty or a new folder" in raised.value.hint
    assert contents(tmp_path) == before


def test_other_files_in_an_array_folder_stay(tmp_path: Path) -> None:
    array = opened(tmp_path)
    array.append(names(20), MATRICES[:20])
    array.close()
    for name in FOREIGN[:4]:
        (tmp_path / name).write_text("mine")
    (tmp_path / "half.9").mkdir()
    other = TokenArray(tmp_path, "another", DIMENSION)
    other.append(names(5), MATRICES[:5])
    other.delete(names(3))
    other.compact()
    other.close()
    assert {(tmp_path / name).read_text() for name in FOREIGN[:4]} == {"mine"}
    assert (tmp_path / "half.9").is_dir()


def test_directory_in_place_of_a_file_is_a_store_error(tmp_path: Path) -> None:
    array = opened(tmp_path)
    (tmp_path / "half.0").mkdir()
    with pytest.raises(StoreError) as raised:
        array.append(names(3), MATRICES[:3])
    assert raised.value.hint
    assert len(array) == 0
    array.close()


def test_invalid_folder_path_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below", f"{tmp_path}/a\0b"):
        with pytest.raises(StoreError) as raised:
            opened(wrong)
        assert raised.value.hint
    assert (tmp_path / "file").read_text() == "mine"


def test_removed_folder_is_an_error_and_keeps_the_state(tmp_path: Path) -> None:
    folder = tmp_path / "array"
    array = opened(folder)
    array.append(names(3), MATRICES[:3])
    shutil.rmtree(folder)
    uses: list[Callable[[], object]] = [
        lambda: array.append(["more"], MATRICES[3:4]),
        lambda: array.delete(names(1)),
        array.compact,
    ]
    for use in uses:
        with pytest.raises(StoreError) as raised:
            use()
        assert raised.value.hint
        assert array.ids() == names(3)
    assert len(TokenIndex(array).search(MATRICES[0], 3)) == 3
    array.close()


def _nothing_fits(*_: object, **__: object) -> int:
    with os_errors(Path("array")):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failing", ["write_at", "replace_file", "map_array"])
def test_full_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    array = opened(tmp_path)
    array.append(names(9), MATRICES[:9])
    array.delete(names(2))
    uses: list[Callable[[], object]] = [
        lambda: array.append(["more"], MATRICES[9:10]),
        array.compact,
    ]
    with monkeypatch.context() as full:
        full.setattr(token_array, failing, _nothing_fits)
        for use in uses:
            with pytest.raises(StoreFullError, match="No space"):
                use()
            assert array.ids() == names(7, start=2)
    array.append(["more"], MATRICES[9:10])
    array.compact()
    array.close()
    assert opened(tmp_path).ids() == [*names(7, start=2), "more"]


def test_full_disk_does_not_stop_deleting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    array = opened(tmp_path)
    array.append(names(9), MATRICES[:9])
    index = TokenIndex(array)
    monkeypatch.setattr(token_array, "write_at", _nothing_fits)
    assert index.delete(names(5)) == 5
    assert "No space" in caplog.text
    assert {id for id, _ in index.search(MATRICES[0], 9)} == set(names(4, start=5))
    index.close()


def test_missing_space_for_a_temporary_folder_is_a_store_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_array, "mkdtemp", _nothing_fits)
    with pytest.raises(StoreFullError):
        TokenArray(None, "test", DIMENSION)
