from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bottega.errors import BottegaError, ImageError, LoadError, MissingDependencyError, SettingError
from bottega.evaluation.benchmarks.downloads import (
    image,
    option,
    read_examples,
    read_rows,
    required,
    text,
    texts,
)
from bottega.evaluation.benchmarks.source import Source, read_location
from bottega.knowledge.loaders.jsonl import Row
from bottega.types import Example, Query
from tests.builders import solid_image

ROWS: list[dict[str, object]] = [{"n": 1, "word": "één"}, {"n": 2, "word": "two"}]


def numbers(
    location: Path | str, split: str = "test", *, allow_multiple: bool = False
) -> list[object]:
    return [row["n"] for _, row in read_rows(str(location), split, allow_multiple=allow_multiple)]


def lines(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", "utf-8")
    return path


def test_json_and_json_lines_are_read(tmp_path: Path) -> None:
    lines(tmp_path / "a" / "test.jsonl", *ROWS)
    lines(tmp_path / "b" / "data" / "test.json", ROWS)
    lines(tmp_path / "c" / "test.json", *ROWS)
    assert [row for _, row in read_rows(str(tmp_path / "c"), "test")] == ROWS
    assert [numbers(tmp_path / part) for part in "abc"] == [[1, 2]] * 3
    [(first, _), _] = read_rows(str(tmp_path / "a"), "test")
    assert first == f"{tmp_path}/a/test.jsonl, row 0"


def test_parquet_shards_and_saved_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_table = datasets.Dataset.from_list([{"n": n, "image": stored(n)} for n in range(100)])
    for shard in range(2):
        part = write_table.shard(2, shard, contiguous=True)
        (tmp_path / "hub" / "data").mkdir(parents=True, exist_ok=True)
        part.to_parquet(str(tmp_path / "hub" / "data" / f"test-0000{shard}-of-00002.parquet"))
    saved = datasets.DatasetDict({"test": write_table, "testmini": write_table.select([3])})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert numbers(tmp_path / "hub") == numbers(tmp_path / "saved") == list(range(100))
    assert numbers(tmp_path / "saved", "testmini") == [3]
    for location in ("hub", "saved"):
        [*_, (source, last)] = read_rows(str(tmp_path / location), "test")
        assert image(last["image"], str(tmp_path), source) == solid_image(99)


def stored(shade: int) -> dict[str, object]:
    return {"bytes": solid_image(shade).data, "path": None}


def test_tables_in_a_folder_are_joined_or_selected_by_name(tmp_path: Path) -> None:
    for number, config in enumerate(("FULL", "IMG")):
        lines(tmp_path / config / "test-00000-of-00001.jsonl", {"n": number})
    assert numbers(tmp_path, allow_multiple=True) == [0, 1]
    assert numbers(tmp_path / "IMG") == [1]
    with pytest.raises(LoadError, match="FULL, IMG") as raised:
        numbers(tmp_path)
    assert raised.value.hint == f"select one, e.g. {tmp_path}/FULL"


def test_unsupported_table_raises(tmp_path: Path) -> None:
    lines(tmp_path / "testing.jsonl", ROWS[0])
    with pytest.raises(LoadError, match="'test'"):
        numbers(tmp_path)
    with pytest.raises(LoadError, match="neither a folder"):
        numbers(tmp_path / "missing")
    (tmp_path / "test.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(LoadError, match=r"test\.parquet cannot be loaded"):
        numbers(tmp_path)
    (tmp_path / "test.parquet").unlink()
    lines(tmp_path / "test.jsonl", 3)
    with pytest.raises(LoadError, match="does not hold objects"):
        numbers(tmp_path)
    (tmp_path / "test.jsonl").write_text('{"n": 1}\n{"n":', "utf-8")
    with pytest.raises(LoadError, match=r"test\.jsonl cannot be loaded"):
        numbers(tmp_path)


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"")
    for package in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    for location in (str(tmp_path), "owner/name"):
        with pytest.raises(MissingDependencyError) as raised:
            numbers(location)
        assert "bottega-vlm[eval]" in raised.value.hint


def test_hub_id_can_name_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load(name: str, config: str, *, split: str, streaming: bool) -> object:
        assert (name, split, streaming) == ("owner/name", "test", True)
        rows = [{"n": config, "image": stored(7)}]
        features = datasets.Features({"n": datasets.Value("string"), "image": datasets.Image()})
        return datasets.Dataset.from_list(rows, features).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda name: ["Art", "Music"])
    assert numbers("owner/name/Art") == ["Art"]
    assert numbers("owner/name", allow_multiple=True) == ["Art", "Music"]
    with pytest.raises(LoadError, match="Art, Music"):
        numbers("owner/name")
    [(source, row)] = read_rows("owner/name/Music", "test")
    assert source == "owner/name/Music, test, row 0"
    assert image(row["image"], "owner/name", source) == solid_image(7)


def test_unreachable_hub_raises_a_load_error(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def fail(name: str) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "get_dataset_config_names", fail)
    with pytest.raises(LoadError, match="owner/name cannot be loaded: no route") as raised:
        numbers("owner/name")
    assert "folder" in raised.value.hint


def test_invalid_rows_are_reported_and_others_kept(tmp_path: Path) -> None:
    lines(tmp_path / "test.jsonl", {"word": "one"}, {"word": ["two"]}, {"word": " "}, {"word": 4})
    bad: list[BottegaError] = []
    examples = read_examples(str(tmp_path), "test", word_example, on_error=bad.append)
    assert [e.answer for e in examples] == ["one", "4"]
    file = tmp_path / "test.jsonl"
    assert [str(error) for error in bad] == [
        f"{file}, row 1: word must be a text, got list",
        f"{file}, row 2: word is missing",
    ]
    with pytest.raises(LoadError, match="row 1"):
        read_examples(str(tmp_path), "test", word_example, on_error=None)


def word_example(row: Row, source: str) -> Example:
    return Example(Query("?"), required(row, "word"), source=source)


def test_row_fields_are_validated() -> None:
    row: Row = {"a": " x ", "b": None, "c": ["1", 2], "d": {"e": 1}}
    assert (text(row, "a"), text(row, "b"), text(row, "missing")) == ("x", "", "")
    assert (texts(row, "c"), texts(row, "b")) == (("1", "2"), ())
    for name in ("a", "d"):
        with pytest.raises(LoadError, match=f"{name} must be a list of texts"):
            texts(row, name)
    assert option(("x", "y"), 1) == "y"
    for index in (2, -1, None, "1"):
        with pytest.raises(LoadError, match="not one of the 2 choices"):
            option(("x", "y"), index)


def test_images_outside_the_folder_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "out.png").write_bytes(solid_image(1).data)
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "x.png").write_bytes(solid_image(2).data)
    assert image("x.png", str(inside), "row 1") == solid_image(2)
    for value in ("../out.png", {"bytes": None, "path": "../out.png"}, 7, None):
        with pytest.raises(ImageError):
            image(value, str(inside), "row 1")
    with pytest.raises(ImageError):
        image("x.png", "owner/name", "row 1")


ALLOWED = {"split": ("dev", "validation"), "images": ("any", "one")}


@pytest.mark.parametrize(
    ("spec", "location", "changed"),
    [
        ("data/mmmu", "data/mmmu", {}),
        ("data/mmmu,split=validation", "data/mmmu", {"split": "validation"}),
        ("a,b, images=one,split=dev", "a,b", {"images": "one"}),
        ("owner/name", "owner/name", {}),
    ],
)
def test_options_follow_the_location(spec: str, location: str, changed: dict[str, str]) -> None:
    expected = {"split": "dev", "images": "any"} | changed
    assert read_location(Source(f"mmmu:{spec}", 0), ALLOWED) == (location, expected)


@pytest.mark.parametrize("options", ["split=test", "shots=3", "split=dev,split=dev", "split=dev,"])
def test_invalid_options_raise(options: str) -> None:
    with pytest.raises(SettingError):
        read_location(Source(f"mmmu:DIR,{options}", 0), ALLOWED)
