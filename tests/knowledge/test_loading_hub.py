from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import pytest

from bottega.errors import ImageError, LoadError, MissingDependencyError
from bottega.knowledge.loaders.tables import Columns, Names, load_hugging_face
from bottega.types import IMAGE_QUESTION
from tests.builders import solid_image
from tests.knowledge.doubles import ErrorList

pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

IMAGE = {"_type": "Image"}
CLASS = {"names": ["cat", "dog"], "_type": "ClassLabel"}


def written(path: Path, columns: dict[str, list[object]], features: dict[str, object]) -> Path:
    """Write a parquet file as on the hub, with column types in the metadata."""
    info = json.dumps({"info": {"features": features}}) if features else "{}"
    table = pa.table(columns)
    parquet.write_table(table.replace_schema_metadata({"huggingface": info}), path)
    return path


def stored(shade: int) -> dict[str, object]:
    return {"bytes": solid_image(shade).data, "path": "x.png"}


def test_class_labels_become_their_names(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x.parquet",
        {"photo": [stored(1), stored(2)], "kind": [1, 0]},
        {"photo": IMAGE, "kind": CLASS},
    )
    found = list(load_hugging_face(path))
    assert [e.answer for e in found] == ["dog", "cat"]
    assert [e.query.images for e in found] == [(solid_image(1),), (solid_image(2),)]
    assert found[0].query.text == IMAGE_QUESTION
    assert found[1].source == f"{path}, train, row 1"


def test_folder_of_parquet_files_has_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, shade in (("train", 1), ("test", 2)):
        written(
            tmp_path / "data" / f"{split}-00000-of-00001.parquet",
            {"image": [stored(shade)], "label": [0]},
            {"image": IMAGE, "label": CLASS},
        )
    (found,) = load_hugging_face(tmp_path, "test")
    assert found.query.images == (solid_image(2),)
    with pytest.raises(LoadError, match="validation"):
        list(load_hugging_face(tmp_path, "validation"))


def test_list_of_labels_is_multi_label(tmp_path: Path) -> None:
    kinds = {"feature": CLASS, "_type": "List"}
    path = written(
        tmp_path / "x.parquet",
        {"image": [stored(1)] * 2, "labels": [[0, 1], []]},
        {"image": IMAGE, "labels": kinds},
    )
    found = list(load_hugging_face(path))
    assert [(e.answer, e.labels) for e in found] == [
        ("cat, dog", ("cat", "dog")),
        ("none", ()),
    ]


def test_question_and_answer_columns_are_inferred_by_name(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x.parquet",
        {
            "image": [solid_image(1).data, None],
            "question": ["Hue?", "Sum?"],
            "answers": [["red", "blue", "blue"], ["4"]],
        },
        {},
    )
    found = list(load_hugging_face(path))
    assert [(e.query.text, e.answer) for e in found] == [("Hue?", "blue"), ("Sum?", "4")]
    assert [len(e.query.images) for e in found] == [1, 0]


def test_columns_may_be_named(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x.parquet",
        {"a": [solid_image(1).data], "b": ["w?"], "c": [3], "label": [0]},
        {},
    )
    (found,) = load_hugging_face(path, image_column="a", question_column="b", answer_column="c")
    assert (found.query.text, found.answer) == ("w?", "3")
    with pytest.raises(LoadError, match="column 'z' does not exist") as raised:
        list(load_hugging_face(path, image_column="z"))
    assert "a, b, c" in raised.value.hint


def test_columns_that_cannot_be_inferred_are_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "x.parquet", {"image": [solid_image(1).data], "c": [1]}, {})
    with pytest.raises(LoadError, match="label and answer columns"):
        list(load_hugging_face(path))
    path = written(tmp_path / "y.parquet", {"label": ["x"]}, {})
    with pytest.raises(LoadError, match="image and question columns"):
        list(load_hugging_face(path))


def test_bad_rows_are_named_and_the_rest_loaded(tmp_path: Path) -> None:
    broken = {"bytes": b"not an image", "path": "x.png"}
    path = written(
        tmp_path / "x.parquet",
        {"image": [broken, stored(1), stored(2)], "label": [0, 1, -1]},
        {"image": IMAGE, "label": CLASS},
    )
    bad = ErrorList()
    assert [e.answer for e in load_hugging_face(path, on_error=bad)] == ["dog"]
    assert "row 0" in str(bad[0])
    assert "row 2: label is missing" in str(bad[1])


def test_files_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        list(load_hugging_face(tmp_path / "gone"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(LoadError, match=r"x\.parquet cannot be loaded"):
        list(load_hugging_face(tmp_path / "x.parquet"))


GOOD = {"image": [solid_image(1).data] * 2, "label": ["cat", "dog"]}
TIME = datetime(2020, 1, 1)
# Columns, bytes cut off at the end, and the error.
DAMAGED: dict[str, tuple[dict[str, object], int | None, str]] = {
    "nothing": (GOOD, 0, r"x\.parquet cannot be loaded.* 0 bytes"),
    "the first bytes": (GOOD, 40, r"x\.parquet cannot be loaded"),
    "all but the end": (GOOD, -30, r"x\.parquet cannot be loaded"),
    "no rows": ({"image": [], "label": []}, None, r"x\.parquet has no rows"),
    "a map": (
        {**GOOD, "boxes": pa.array([[("x", 1)]] * 2, pa.map_(pa.string(), pa.int64()))},
        None,
        r"x\.parquet: the column 'boxes' has the type map<string, int64",
    ),
    "times as labels": (
        {**GOOD, "label": [TIME] * 2},
        None,
        r"x\.parquet, train, row 0: .* got datetime, in the column 'label'",
    ),
    "numbers as images": (
        {**GOOD, "image": [1, 2]},
        None,
        r"x\.parquet, train, row 0, column 'image': image must be bytes or a path, got int",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_unreadable_parquet_files_are_named(tmp_path: Path, case: str) -> None:
    columns, end, expected = DAMAGED[case]
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table(columns), path)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(LoadError, match=expected) as raised:
        list(load_hugging_face(path))
    assert raised.value.hint and "network" not in raised.value.hint
    if end is not None or "row 0" not in expected:
        path.rename(tmp_path / "train-00001-of-00002.parquet")
        parquet.write_table(pa.table(GOOD), tmp_path / "train-00000-of-00002.parquet")
        with pytest.raises(LoadError, match=expected.replace("x", "train-00001-of-00002", 1)):
            list(load_hugging_face(tmp_path))


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError) as raised:
        list(load_hugging_face(tmp_path))
    assert "bottega-vlm[eval]" in raised.value.hint


@pytest.mark.parametrize("label", [2, -3, None, float("nan"), {"name": "cat"}, b"cat", ""])
def test_label_number_outside_the_classes_is_an_error(label: object) -> None:
    names = Names(question="q", label="l")
    row = {"q": "Which?", "l": label}
    with pytest.raises(LoadError):
        Columns(names, ("cat", "dog"), "?", None).example(row, "row 0")
    with pytest.raises(LoadError):
        Columns(names, ("cat", "dog"), "?", None).example({**row, "l": [0, label]}, "row 0")


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        ({"text": ["a", "b", "b"], "answer_start": [1, 2, 2]}, "a"),
        ([{"text": "a"}], "a"),
        ([{"answer": "b"}, {"answer": "c"}, {"answer": "c"}], "c"),
        ({"text": [], "answer_start": [0]}, None),
        ({"value": "a"}, None),
        ([], None),
        (" ", None),
    ],
)
def test_nested_answers_become_text(answer: object, read: str | None) -> None:
    columns = Columns(Names(question="q", answer="a"), (), "?", None)
    if read is None:
        with pytest.raises(LoadError):
            columns.example({"q": "Which?", "a": answer}, "row 0")
    else:
        assert columns.example({"q": "Which?", "a": answer}, "row 0").answer == read


def test_image_paths_must_be_inside_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "x.png"
    inside = tmp_path / "set" / "a.png"
    inside.parent.mkdir()
    for shade, path in enumerate((outside, inside)):
        path.write_bytes(solid_image(shade).data)
    images: list[object] = ["../x.png", str(outside), "a.png", str(inside)]
    path = written(inside.with_name("x.parquet"), {"image": images, "label": ["l"] * 4}, {})
    bad = ErrorList()
    found = list(load_hugging_face(path, on_error=bad))
    assert [e.query.images for e in found] == [(solid_image(1),)] * 2
    assert ["is outside of" in str(error) for error in bad] == [True] * 2
    with pytest.raises(ImageError, match="is not base64"):
        Columns(Names("i", "l"), (), "?", None).example({"i": str(outside), "l": "x"}, "row 0")
