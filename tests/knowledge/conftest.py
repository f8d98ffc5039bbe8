from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Folder that other users can enter, unlike pytest's `tmp_path`."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "knowledge"
        folder.mkdir()
        Path(parent).chmod(0o755)
        yield folder
        folder.chmod(0o755)
