from __future__ import annotations

import csv
import gzip
import hashlib
import io
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from bottega.errors import BottegaError, LoadError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.passages import (
    GS_TRAIN,
    load_passages,
    with_passages,
)
from bottega.knowledge.loaders import delimited
from bottega.types import Example, Query
from tests.builders import example, solid_image
from tests.evaluation.benchmarks.published import write_table

WIT = [
    "language",
    "page_url",
    "image_url",
    "page_title",
    "section_title",
    "hierarchical_section_title",
    "caption_reference_description",
    "caption_attribution_description",
    "caption_alt_text_description",
    "mime_type",
    "original_height",
    "original_width",
    "is_main_image",
    "attribution_passes_lang_id",
    "page_changed_recently",
    "context_page_description",
    "context_section_description",
]


def write_json(path: Path, rows: Sequence[Iterable[object]], delimiter: str = ",") -> Path:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter).writerows(rows)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        file.write(text.getvalue())
    return path


def texts_by_id(path: Path, *, train: bool = False) -> dict[str | None, str]:
    return {one.query.id: one.query.text for one in load_passages(path, train=train)}


def test_google_search_corpus_is_read(tmp_path: Path) -> None:
    rows: list[list[object]] = [
        ["kid", "text"],
        [0, 'Surfers, they say, "hang ten".\nA board.'],
        [GS_TRAIN, "Sushi"],
    ]
    path = write_json(tmp_path / "okvqa_full_corpus.csv", rows)
    first, second = load_passages(path)
    assert first == Example(
        Query('Surfers, they say, "hang ten".\nA board.', id="GS_0"), "", source=str(path)
    )
    assert (second.query.id, second.query.text) == (f"GS_{GS_TRAIN}", "Sushi")
    assert first.source is second.source  # one shared string for all 168,306 passages
    assert list(texts_by_id(path, train=True)) == ["GS_0"]


def test_tab_separated_corpus_is_read(tmp_path: Path) -> None:
    rows: list[list[object]] = [["id", "text", "title"], [3, "Hang ten, they say", "Surfing"]]
    assert texts_by_id(write_json(tmp_path / "psgs.tsv", rows, "\t")) == {
        "GS_3": "Hang ten, they say"
    }


def wit(**fields: str) -> list[str]:
    return [fields.get(name, "") for name in WIT]


@pytest.mark.parametrize("name", ["wit_v1.train.all-00000-of-00010.tsv", "sample.tsv.gz"])
def test_wit_is_read(tmp_path: Path, name: str) -> None:
    full = {
        "page_title": "Surfing",
        "section_title": "Boards",
        "hierarchical_section_title": "Surfing / Boards",
        "caption_reference_description": "A board",
        "caption_attribution_description": "By Ann",
        "caption_alt_text_description": "alt",
        "context_page_description": "Surfing is a sport.",
    }
    rows = [
        WIT,
        wit(language="de", page_title="Wellenreiten"),
        wit(language="en", **full),
        wit(language="en", page_title="Sushi", context_page_description="A dish."),
    ]
    assert texts_by_id(write_json(tmp_path / name, rows, "\t")) == {
        "WIT_0": "title: Surfing section title: Boards hierarchical section title: Surfing / Boards"
        " caption reference description: A board caption attribution description: By Ann"
        " caption alt text description: alt content: Surfing is a sport.",
        "WIT_1": "title: Sushi content: A dish.",
    }


BOARD = "https://upload.wikimedia.org/wikipedia/commons/1/1a/Surf%20board.png"
WAVE = "https://upload.wikimedia.org/wikipedia/commons/2/2b/Wave.jpg?width=300"


@pytest.mark.parametrize("packed", [False, True])
def test_wit_rows_have_their_downloaded_images(tmp_path: Path, packed: bool) -> None:
    """RA-VQA's code names images by the MD5 of their URL; other downloads keep the URL's name."""
    digest = hashlib.md5(BOARD.encode()).hexdigest()
    images = {f"{digest}.jpg": b"", "Surf board.png": b"", "Wave.jpg": b"", "bad.jpg": b"x"}
    images |= {name: solid_image(i).data for i, name in enumerate(images) if name != "bad.jpg"}
    rows = [
        WIT,
        wit(language="en", page_title="Missing", image_url="https://example.org/no.jpg"),
        wit(language="en", page_title="Board", image_url=BOARD),
        wit(language="en", page_title="Wave", image_url=WAVE),
        wit(language="en", page_title="Twin", image_url="https://example.org/Surf%20board.png"),
        wit(language="en", page_title="Damaged", image_url="https://example.org/bad.jpg"),
        wit(language="en", page_title="Outside", image_url="https://example.org/..%2Fwit.tsv"),
        wit(language="en", page_title="Without", image_url=""),
    ]
    path = write_json(tmp_path / "wit.tsv", rows, "\t")
    if packed:
        with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
            for name, data in images.items():
                archive.writestr(f"images/{name}", data)
    else:
        (tmp_path / "images").mkdir()
        for name, data in images.items():
            (tmp_path / "images" / name).write_bytes(data)
    bad: list[BottegaError] = []

    found = list(load_passages(path, on_error=bad.append))

    assert [(one.query.id, one.query.text) for one in found] == [
        ("WIT_1", "title: Board"),
        ("WIT_2", "title: Wave"),
        ("WIT_3", "title: Twin"),
    ]
    assert [[image.data for image in one.query.images] for one in found] == [
        [images[f"{digest}.jpg"]],
        [images["Wave.jpg"]],
        [images["Surf board.png"]],
    ]
    lines = [str(error).partition(":")[0] for error in bad]
    assert lines == [f"{path}, line {number}" for number in ([6] if packed else [6, 7])]
    assert all("is not a readable image" in str(error) for error in bad)


def test_hub_table_is_read(tmp_path: Path) -> None:
    rows = [{"passage_content": "Hang ten", "passage_id": "GS_0"}]
    write_table(tmp_path / "data" / "train_passages-00000-of-00001.parquet", rows)
    more = [*rows, {"passage_content": "Sushi", "passage_id": f"GS_{GS_TRAIN}"}]
    bad_row = {"passage_content": "", "passage_id": "GS_9"}
    write_table(tmp_path / "data" / "test_passages-00000-of-00001.parquet", [*more, bad_row])
    bad: list[BottegaError] = []
    assert len(list(load_passages(tmp_path, on_error=bad.append))) == 2
    assert ["passage_content is missing" in str(error) for error in bad] == [True]
    assert list(texts_by_id(tmp_path, train=True)) == ["GS_0"]


def test_lines_load_images_and_invalid_lines_are_reported(tmp_path: Path) -> None:
    solid_image(3).decode().save(tmp_path / "board.png")
    path = tmp_path / "passages.jsonl"
    lines = (
        '{"text": " Hang ten ", "id": "WIT_7", "image": "board.png", "tags": {"page": 2}}',
        '{"text": "Tea"}',
        '{"text": "Sushi", "answer": "rice"}',
        '{"question": "Which board?"}',
        '{"text": "Lost", "image": "../lost.png"}',
    )
    path.write_text("\n".join(lines))
    bad: list[BottegaError] = []
    seen, tea = load_passages(path, on_error=bad.append)
    assert (seen.query.text, seen.query.id, seen.tags) == ("Hang ten", "WIT_7", {"page": "2"})
    assert [one.decode().size for one in seen.query.images] == [(8, 8)]
    assert tea == Example(Query("Tea"), "", source=str(path))
    messages = [str(error).removeprefix(f"{path}, line ") for error in bad]
    assert messages[:2] == ["3: a passage cannot have the field answer", "4: text is missing"]
    assert messages[2].startswith("5: ") and len(messages) == 3
    with pytest.raises(LoadError, match="line 3"):
        list(load_passages(path))


def test_invalid_rows_are_reported_and_skipped(tmp_path: Path) -> None:
    rows: list[list[object]] = [
        ["kid", "text"],
        [0, "Hang ten"],
        ["x", "Sushi"],
        [2, " "],
        [3],
        [4, "Tea"],
    ]
    path = write_json(tmp_path / "corpus.csv", rows)
    bad: list[BottegaError] = []
    found = [one.query.id for one in load_passages(path, on_error=bad.append)]
    assert found == ["GS_0", "GS_4"]
    assert [str(error).partition(":")[0] for error in bad] == [
        f"{path}, line {n}" for n in (3, 4, 5)
    ]
    with pytest.raises(LoadError, match="line 3"):
        list(load_passages(path))


def test_oversized_field_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delimited, "MAX_CELL", 1000)
    path = write_json(tmp_path / "corpus.csv", [["kid", "text"], [0, "x" * 1001], [1, "Tea"]])
    bad: list[BottegaError] = []
    previous = csv.field_size_limit(1000)
    try:
        assert [one.query.id for one in load_passages(path, on_error=bad.append)] == ["GS_1"]
    finally:
        csv.field_size_limit(previous)
    assert ["field larger" in str(error) for error in bad] == [True]


@pytest.mark.parametrize(
    "name, data",
    [
        ("missing.csv", None),
        ("empty.csv", b""),
        ("other.csv", b"question,answer\nWhat?,this\n"),
        ("latin.csv", b"kid,text\n0,\xe9t\xe9\n"),
        ("cut.tsv.gz", gzip.compress(b"id\ttext\n" + b"0\tTea\n" * 500, mtime=0)[:40]),
        ("not.tsv.gz", b"id\ttext\n"),
    ],
)
def test_unreadable_files_name_the_expected_format(
    tmp_path: Path, name: str, data: bytes | None
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(LoadError) as raised:
        list(load_passages(tmp_path / name))
    assert "okvqa_full_corpus.csv" in raised.value.hint


def test_passages_extend_or_replace_the_examples(tmp_path: Path) -> None:
    data = Benchmark("x", (example("a", 1),), (example("a", 2),))
    path = write_json(tmp_path / "corpus.csv", [["kid", "text"], [0, "Tea"]])
    assert [one.answer for one in with_passages(data, path).knowledge] == ["a", ""]
    assert [one.answer for one in with_passages(data, path, alone=True).knowledge] == [""]
    write_json(path, [["kid", "text"]])
    with pytest.raises(LoadError, match="no passages"):
        with_passages(data, path)
