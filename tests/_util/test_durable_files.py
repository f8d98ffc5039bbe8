from __future__ import annotations

from pathlib import Path

import pytest

from bottega._util.durable_files import replace_file, replacement
from bottega.errors import StoreError, StoreFullError


def test_a_replacement_has_the_new_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"long content", b"short"):
        replace_file(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupted_replacement_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    with pytest.raises(KeyboardInterrupt), replacement(path) as file:
        file.write(b"half of the n")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    (tmp_path / "file.new").symlink_to("/dev/full")
    with pytest.raises(StoreFullError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_missing_folder_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read or written"):
        replace_file(tmp_path / "absent" / "file", b"new")
