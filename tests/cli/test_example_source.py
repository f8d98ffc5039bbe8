"""Sources of `bottega add`: each knows its number of examples before they are read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from bottega.cli.example_source import ExampleSource, open_passages, open_source
from bottega.cli.output import SkippedExamples
from bottega.errors import LoadError, SettingError


def count(source: ExampleSource) -> tuple[int | None, int]:
    """Return the number announced and the number read."""
    return source.total, sum(1 for _ in source.examples)


def write_table(path: Path, labels: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    questions = [f"question {i}" for i in range(len(labels))]
    parquet.write_table(pyarrow.table({"question": questions, "label": labels}), path)


def test_folders_of_images_are_counted(pets: Path, tmp_path: Path) -> None:
    skipped = SkippedExamples()
    (pets / "leaf" / "broken.png").write_bytes(b"no image")
    (pets / "leaf" / "notes.txt").write_text("no image")
    assert count(open_source(str(pets), None, skipped)) == (13, 12)
    assert len(skipped) == 1
    split = tmp_path / "split"
    split.mkdir()
    pets.rename(split / "train")
    assert count(open_source(str(split), "train", skipped)) == (13, 12)


def test_tables_are_counted(pets: Path, tmp_path: Path) -> None:
    skipped = SkippedExamples()
    table = tmp_path / "many"
    table.mkdir()
    (pets / "leaf").rename(table / "images")
    (table / "demo.csv").write_text("name,cat,dog\n0.png,1,0\n1.png,0,1\nmissing.png,0,1\n")
    assert count(open_source(str(table), None, skipped)) == (3, 2)
    lines = tmp_path / "questions.jsonl"
    lines.write_text('{"question": "a", "answer": "b"}\n\nbroken\n{"question": "c", "label": "d"}')
    assert count(open_source(str(lines), None, skipped)) == (3, 2)
    assert count(open_source("digits", None, skipped)) == (1797, 1797)


def test_parquet_files_are_counted_by_their_metadata(tmp_path: Path) -> None:
    skipped = SkippedExamples()
    write_table(tmp_path / "one.parquet", ["a", "b", "c"])
    assert count(open_source(str(tmp_path / "one.parquet"), None, skipped)) == (3, 3)
    for name, labels in (("train-0", ["a", "b"]), ("train-1", ["c"]), ("test-0", ["d"] * 5)):
        write_table(tmp_path / "many" / f"{name}.parquet", labels)
    assert count(open_source(str(tmp_path / "many"), None, skipped)) == (3, 3)
    assert count(open_source(str(tmp_path / "many"), "test", skipped)) == (5, 5)
    with pytest.raises(LoadError):
        count(open_source(str(tmp_path / "many"), "nowhere", skipped))


@pytest.mark.parametrize(
    "source", ["digits", "mmmu:DIR", "scienceqa:DIR,split=test", "okvqa:DIR", "one.parquet"]
)
def test_a_split_is_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(Path("one.parquet"), ["a"])
    with pytest.raises(SettingError, match="has no splits to choose from") as raised:
        open_source(source, "test", SkippedExamples())
    assert "omit --split" in str(raised.value.hint)


def test_passages_are_counted(tmp_path: Path) -> None:
    skipped = SkippedExamples()
    corpus = tmp_path / "corpus.csv"
    corpus.write_text('kid,text\n0,"one\nof two lines"\n5,\n200000,three\n')
    assert count(open_passages(str(corpus), None, skipped)) == (2, 2)
    assert count(open_passages(str(corpus), "train", skipped)) == (1, 1)
    assert len(skipped) == 2  # the row without a text, once for each source
    packed = tmp_path / "corpus.tsv.gz"
    packed.write_bytes(gzip.compress(b"id\ttext\n0\tone\n1\ttwo\n"))
    assert count(open_passages(str(packed), None, skipped)) == (2, 2)
    lines = tmp_path / "passages.jsonl"
    lines.write_text("\n".join(json.dumps({"text": f"passage {i}"}) for i in range(4)))
    assert count(open_passages(str(lines), None, skipped)) == (4, 4)
    with pytest.raises(SettingError, match="split of passages must be train, got test"):
        open_passages(str(lines), "test", skipped)
