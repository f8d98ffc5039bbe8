from __future__ import annotations

import base64
import os
from pathlib import Path

import orjson
import pytest

from bottega.errors import LoadError
from bottega.knowledge.loaders.jsonl import load_jsonl
from bottega.types import IMAGE_QUESTION, Example, Query
from tests.builders import solid_image
from tests.knowledge.doubles import ErrorList


def written(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    lines = [row if isinstance(row, bytes) else orjson.dumps(row) for row in rows]
    path.write_bytes(b"\n".join(lines))
    (folder / "a.png").write_bytes(solid_image(1).data)
    return path


def test_every_field_is_read(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "image": "a.png",
            "question": "Which?",
            "answer": "a",
            "labels": ["a", "b"],
            "choices": ["a", "b"],
            "rationale": "why",
            "tags": {"hue": "red", "level": 3},
            "id": 7,
            "unknown": None,
        },
    )
    assert list(load_jsonl(path)) == [
        Example(
            Query("Which?", (solid_image(1),), ("a", "b")),
            "a",
            labels=("a", "b"),
            rationale="why",
            tags={"hue": "red", "level": "3"},
            source=f"{path}, line 1",
        )
    ]


@pytest.mark.parametrize(
    ("fields", "answer", "labels"),
    [
        ({"answer": 4}, "4", None),
        ({"answer": " cat\n"}, "cat", None),
        ({"label": "cat"}, "cat", None),
        ({"labels": ["x", "y"]}, "x, y", ("x", "y")),
        ({"label": " B\u0075\u0308lbu\u0308l "}, "B\u00fclb\u00fcl", None),
        ({"answer": "cafe\u0301"}, "caf\u00e9", None),
        ({"label": "cat ", "answer": "Cat"}, "Cat", None),
        ({"labels": ["cat"], "answer": "a small cat"}, "a small cat", ("cat",)),
        ({"labels": ["x", " x", "y"]}, "x, y", ("x", "y")),
        ({"labels": []}, "none", ()),
    ],
)
def test_answer_may_be_a_label(
    tmp_path: Path, fields: dict[str, object], answer: str, labels: tuple[str, ...] | None
) -> None:
    (found,) = load_jsonl(written(tmp_path, fields))
    assert (found.answer, found.labels, found.query.text) == (answer, labels, IMAGE_QUESTION)


def test_image_is_a_path_a_data_url_or_base64(tmp_path: Path) -> None:
    text = base64.b64encode(solid_image(1).data).decode()
    images = ["a.png", str(tmp_path / "a.png"), f"data:image/png;base64,{text}", text]
    rows = [{"image": image, "answer": "x"} for image in images]
    found = list(load_jsonl(written(tmp_path, *rows, {"images": images, "answer": "x"})))
    assert [e.query.images for e in found] == [(solid_image(1),)] * 4 + [(solid_image(1),) * 4]


def test_numbers_are_texts_also_in_lists(tmp_path: Path) -> None:
    path = written(tmp_path, {"question": "How many?", "choices": [1, 2.5], "answer": 2.5})
    (found,) = load_jsonl(path)
    assert (found.query.choices, found.answer) == (("1", "2.5"), "2.5")
    with pytest.raises(LoadError, match="labels must be a list of texts, got list"):
        list(load_jsonl(written(tmp_path, {"labels": [["x"]]})))


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"file_name": "a.png"}, 1),
        ({"fileName": "a.png"}, 1),
        ({"image_path": "a.png"}, 1),
        ({"image_1": "a.png", "image_2": "a.png", "image_3": None}, 2),
        ({"image": "a.png", "file_name": "other.png"}, 1),
        ({"images": ["a.png"], "image_1": "other.png"}, 1),
        ({"image": "a"}, 1),
        ({"image_count": 2, "path": "notes.txt"}, 0),
    ],
)
def test_images_may_have_usual_names(tmp_path: Path, fields: dict[str, object], count: int) -> None:
    [found] = load_jsonl(written(tmp_path, {**fields, "answer": "x"}))
    assert found.query.images == (solid_image(1),) * count


def test_urls_are_not_fetched(tmp_path: Path) -> None:
    row = {"image": f"https://example.org/{'a' * 200}.png", "answer": "x"}
    with pytest.raises(LoadError, match=r"line 1: image 'https://example\.org.* is not fetched"):
        list(load_jsonl(written(tmp_path, row)))


def test_bad_lines_are_named_by_number_and_the_rest_is_loaded(tmp_path: Path) -> None:
    good = {"answer": "yes", "question": "ok?"}
    path = written(
        tmp_path,
        b'\xef\xbb\xbf{"answer": "first"}',
        b"",
        b'{"answer": "half-wri',
        good,
        {"question": "no answer"},
        {"answer": "x", "image": "gone.png"},
        {"answer": "x", "image": "A" * 5000},
        {"answer": ["x"]},
        {"answer": "x", "choices": "a"},
        {"answer": "x", "tags": ["a"]},
        ["not an object"],
        b'{"answer": "\xff"}',
        b'{"answer": "\\ud800"}',
        {"answer": "x", "image": "empty.png"},
        b'{"answer": "last, without a newl',
    )
    (tmp_path / "empty.png").touch()
    bad = ErrorList()
    found = list(load_jsonl(path, on_error=bad))
    assert [e.answer for e in found] == ["first", "yes"]
    numbers = [str(error).split("line ")[1].split(":")[0] for error in bad]
    assert numbers == ["3", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"]
    assert all(isinstance(error, LoadError) and error.hint for error in bad)
    assert "gone.png" in str(bad[2])
    with pytest.raises(LoadError, match="line 3"):
        list(load_jsonl(path))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"gone\.jsonl cannot be read"):
        list(load_jsonl(tmp_path / "gone.jsonl"))


def test_relative_path_stays_in_the_folder_of_the_file(tmp_path: Path) -> None:
    outside = tmp_path / "x.png"
    outside.write_bytes(solid_image(2).data)
    folder = tmp_path / "set"
    (folder / "deep").mkdir(parents=True)
    (folder / "link.png").symlink_to(outside)
    images = ["../x.png", "deep/../../x.png", "link.png", "deep/../a.png", str(outside)]
    rows = [{"image": image, "answer": "x"} for image in images]
    bad = ErrorList()
    found = list(load_jsonl(written(folder, *rows), on_error=bad))
    assert [e.query.images[0] for e in found] == [solid_image(1), solid_image(2)]
    assert ["is outside of" in str(error) for error in bad] == [True] * 3


@pytest.mark.parametrize(
    "fields",
    [
        {"label": ""},
        {"answer": "  "},
        {"answer": "dog", "label": "cat"},
        {"answer": "", "label": "cat"},
        {"labels": ["a", " "]},
        {"answer": "c", "choices": ["a", "b"]},
        {"labels": ["a", "c"], "choices": ["a", "b"]},
    ],
)
def test_answer_outside_the_choices_is_an_error(tmp_path: Path, fields: dict[str, object]) -> None:
    bad = ErrorList()
    assert not list(load_jsonl(written(tmp_path, fields), on_error=bad))
    assert "line 1: " in str(bad[0])


def test_answer_matches_its_choices_in_any_form(tmp_path: Path) -> None:
    composed, decomposed = "B\u00fclb\u00fcl", "Bu\u0308lbu\u0308l "
    path = written(tmp_path, {"label": decomposed, "choices": ["x", decomposed]})
    assert [e.answer for e in load_jsonl(path)] == [composed]


def test_sources_are_valid_text_for_any_folder_name(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    path = written(folder, {"image": "a.png", "answer": "x"})
    (found,) = load_jsonl(path)
    assert "caf\ufffd" in str(found.source)
    assert "caf\ufffd" in str(found.query.images[0].source)
    with pytest.raises(LoadError, match="caf\ufffd"):
        list(load_jsonl(folder / "gone.jsonl"))
