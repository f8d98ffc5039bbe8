"""Writers of small files in the published layouts."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.builders import solid_image


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), "utf-8")
    return path


def write_image(path: Path, shade: int) -> Path:
    """Write PNG bytes under any file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(solid_image(shade).data)
    return path


def write_archive(archive: Path, members: Mapping[str, bytes]) -> Path:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w") as file:
        for name, data in members.items():
            file.writestr(name, data)
    return archive


def write_table(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write a parquet file as on the Hugging Face hub."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def image_cell(shade: int) -> dict[str, object]:
    return {"bytes": solid_image(shade).data, "path": None}
