"""What a token array does with a folder that is not, or not only, its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.errors import StoreError
from bottega.knowledge.late import TokenArray
from tests.knowledge.late.data import DIMENSION, documents, names

MATRICES = documents(40, seed=6)
FOREIGN = ("ids.csv", "codes.py", "half.png", "offsets.txt", "eighth.7", "readme")


def opened(folder: Path | str) -> TokenArray:
    return TokenArray(folder, "test", DIMENSION)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("foreign", [FOREIGN, ("half.0",), ("lock", "readme"), ("manifest.json",)])
def test_a_folder_with_the_users_files_is_refused_and_left_as_it_is(
    tmp_path: Path, foreign: tuple[str, ...]
) -> None:
    for name in foreign:
        (tmp_path / name).write_text('{"name": "mine"}')
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="not an index's") as raised:
        opened(tmp_path)
    assert "empty folder" in raised.value.hint
    assert contents(tmp_path) == before


def test_what_the_user_puts_into_an_arrays_folder_stays(tmp_path: Path) -> None:
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


def test_a_directory_where_a_file_should_be_is_an_error_of_ours(tmp_path: Path) -> None:
    array = opened(tmp_path)
    (tmp_path / "half.0").mkdir()
    with pytest.raises(StoreError) as raised:
        array.append(names(3), MATRICES[:3])
    assert raised.value.hint
    assert len(array) == 0
    array.close()
