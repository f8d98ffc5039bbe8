"""Snapshots and caches of the Hugging Face hub, added by `bottega add`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.builders import solid_image
from tests.cli.conftest import Run
from tests.cli.table_files import FILES, IMAGES, LABELS, added_labels, encoded


def test_a_snapshot_of_the_hub_is_read(run: Run, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    from pyarrow import parquet

    blob = tmp_path / "blobs" / "0a1b"
    blob.parent.mkdir()
    columns = {"image": [encoded(1), encoded(2)], "choices": [["cat", "dog"]] * 2}
    answers = pa.array([1, 0])
    parquet.write_table(pa.table({**columns, "question": ["a", "b"], "answer": answers}), blob)
    data = tmp_path / "snapshot" / "data"
    data.mkdir(parents=True)
    (data / "train-00000-of-00001.parquet").symlink_to(os.path.relpath(blob, data))
    assert added_labels(run, "snapshot") == {"cat": 1, "dog": 1}


def cached_data_set(hub: Path, name: str, files: dict[str, bytes], revision: str = "a1") -> Path:
    """Write a data set as the hub's client caches it: a snapshot of links to blobs."""
    repository = hub / f"datasets--{name}"
    for path, data in files.items():
        link = repository / "snapshots" / revision / path
        blob = repository / "blobs" / f"{revision}-{path.replace('/', '-')}"
        for folder in (link.parent, blob.parent, repository / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (repository / "refs" / "main").write_text(revision)
    return repository


NAMED = "file_name,label\n" + "".join(f"{name},{name[:3]}\n" for name in FILES)


@pytest.mark.parametrize("files", [IMAGES, {**IMAGES, "metadata.csv": NAMED.encode()}])
def test_a_cache_of_the_hub_is_read(run: Run, tmp_path: Path, files: dict[str, bytes]) -> None:
    hub = tmp_path / "hub"
    old = {"old/1.png": solid_image(9).data}
    cached_data_set(hub, "me--pets", old, "a0")
    cached_data_set(hub, "me--pets", {**files, ".gitattributes": b"x"}, "a1")
    (hub / "models--me--vlm" / "snapshots" / "b1").mkdir(parents=True)
    for source in (hub, hub / "datasets--me--pets", hub / "datasets--me--pets/snapshots/a1"):
        (tmp_path / "k.db").unlink(missing_ok=True)
        assert added_labels(run, source) == LABELS
    has_table = "metadata.csv" in files
    table = hub / "datasets--me--pets/snapshots/a1/metadata.csv"
    planned = run("eval", f"image-folder:{hub}", "--methods", "nearest", "--dry-run")
    assert (planned.code, f"table:{table}" in planned.err) == (int(has_table), has_table)
    if has_table:
        assert run("eval", f"table:{table}", "--methods", "nearest", "--dry-run").code == 0
    outside = "file_name,label\n../../../../secret.png,cat\n"
    cached_data_set(hub, "me--pets", {"metadata.csv": outside.encode()}, "a2")
    (tmp_path / "secret.png").write_bytes(solid_image(3).data)
    refused = run("add", "other.db", hub)
    assert (refused.code, "is outside of" in refused.err) == (1, True)


def test_a_cache_of_the_hub_needs_one_data_set(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hub" / "models--me--vlm" / "snapshots" / "b1").mkdir(parents=True)
    refused = run("add", "k.db", "hub")
    assert (refused.code, "the Hugging Face hub with 0 data sets" in refused.err) == (1, True)
    for name in ("me--cats", "me--dogs"):
        cached_data_set(tmp_path / "hub", name, IMAGES)
    refused = run("add", "k.db", "hub")
    assert "name one: hub/datasets--me--cats, hub/datasets--me--dogs" in refused.err
