"""Loaders of labelled images: class folders, ManyICL tables, digits."""

from __future__ import annotations

import os
import shutil
import unicodedata
from pathlib import Path

import pytest
from PIL import Image as Pillow

from bottega.errors import ImageError, LoadError
from bottega.knowledge.loaders.delimited import load_manyicl
from bottega.knowledge.loaders.folders import (
    find_splits,
    load_digits,
    load_image_folder,
)
from bottega.knowledge.loaders.scan import scan_images
from bottega.types import IMAGE_QUESTION
from tests.builders import solid_image
from tests.knowledge.doubles import ErrorList, damaged_image

UCMERCED = Path(__file__).parents[3] / "shared" / "data" / "ucmerced"


def save(path: Path, shade: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(solid_image(shade).data)
    return path


def test_each_subfolder_is_a_class(tmp_path: Path) -> None:
    save(tmp_path / "dog" / "1.PNG", 2)
    save(tmp_path / "cat" / "deep" / "2.png")
    save(tmp_path / "cat" / "1.png")
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    save(tmp_path / "cat" / ".hidden.png")
    save(tmp_path / "__MACOSX" / "cat.png")
    found = list(load_image_folder(tmp_path))
    assert [(e.answer, Path(str(e.source)).name) for e in found] == [
        ("cat", "1.png"),
        ("cat", "2.png"),
        ("dog", "1.PNG"),
    ]
    assert {e.query.text for e in found} == {IMAGE_QUESTION}
    assert found[0].query.images[0].source == found[0].source
    assert found[0].labels is None


def test_split_is_a_folder_of_classes(tmp_path: Path) -> None:
    save(tmp_path / "train" / "cat" / "1.png", 1)
    save(tmp_path / "test" / "cat" / "2.png", 2)
    assert find_splits(tmp_path)
    (only,) = load_image_folder(tmp_path, split="test", question="Which?")
    assert only.query.images == (solid_image(2),)
    assert only.query.text == "Which?"
    with pytest.raises(LoadError, match="splits") as raised:
        list(load_image_folder(tmp_path))
    assert (
        raised.value.hint
        == f"choose the split train or test (--split), or name {tmp_path / 'train'}"
    )
    with pytest.raises(LoadError, match="no folder 'val'"):
        list(load_image_folder(tmp_path, split="val"))


def test_equal_looking_labels_are_merged(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "Bülbül") for form in ("NFC", "NFD"))
    for index, name in enumerate([composed, decomposed, f" {composed} ", "鳥"]):
        save(tmp_path / name / f"{index}.png", index)
    found = list(load_image_folder(tmp_path))
    assert [e.answer for e in found] == [composed] * 3 + ["鳥"]
    assert {e.query.images[0] for e in found} == {solid_image(i) for i in range(4)}


def test_file_name_that_is_not_utf8_is_loaded(tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    save(tmp_path / name / "1.png")
    (found,) = load_image_folder(tmp_path)
    assert found.answer == "caf\ufffd"
    assert str(found.query.images[0].source).encode()


def test_unreadable_images_are_reported(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "good.png")
    (tmp_path / "cat" / "empty.jpg").touch()
    (tmp_path / "cat" / "text.png").write_text("hello")
    save(tmp_path / "stray.png")
    bad = ErrorList()
    assert len(list(load_image_folder(tmp_path, on_error=bad))) == 1
    assert [type(error) for error in bad] == [LoadError, ImageError, ImageError]
    assert all(
        name in str(error)
        for name, error in zip(["stray.png", "empty.jpg", "text.png"], bad, strict=True)
    )
    with pytest.raises(LoadError, match=r"stray\.png"):
        list(load_image_folder(tmp_path))


@pytest.mark.parametrize("make", ["nothing", "images only", "empty classes", "a file"])
def test_folder_without_classes_shows_the_layout(tmp_path: Path, make: str) -> None:
    folder = tmp_path
    if make == "images only":
        save(tmp_path / "1.png")
    elif make == "empty classes":
        (tmp_path / "cat").mkdir()
    elif make == "a file":
        folder = save(tmp_path / "1.png")
    bad = ErrorList()
    with pytest.raises(LoadError) as raised:
        list(load_image_folder(folder, on_error=bad))
    assert raised.value.hint
    assert not bad


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"gone is not a folder"):
        list(load_image_folder(tmp_path / "gone"))


def table(folder: Path, text: str) -> None:
    (folder / "demo.csv").write_text(text, encoding="utf-8")
    for shade, name in enumerate(["a.png", "b.png", "c.png"]):
        save(folder / "images" / name, shade)


def test_one_hot_columns_become_labels(tmp_path: Path) -> None:
    table(tmp_path, ",cat,dog \na.png,1.0,0.0\nb.png,0.0,1.0\n")
    found = list(load_manyicl(tmp_path, "demo"))
    assert [(e.answer, e.labels) for e in found] == [("cat", None), ("dog", None)]
    assert str(found[1].source).endswith("demo.csv, line 3")
    assert found[1].query.images == (solid_image(1),)


def test_several_ones_or_none_make_a_multi_label_set(tmp_path: Path) -> None:
    table(tmp_path, ",cat,dog\na.png,1.0,1.0\nb.png,0.0,0.0\nc.png,1.0,0.0\n")
    found = list(load_manyicl(tmp_path, "demo"))
    assert [(e.answer, e.labels) for e in found] == [
        ("cat, dog", ("cat", "dog")),
        ("none", ()),
        ("cat", ("cat",)),
    ]


def test_bad_rows_of_a_table_are_named_by_line(tmp_path: Path) -> None:
    table(tmp_path, ",cat,dog\na.png,1.0\nb.png,x,0\ngone.png,1,0\n\nc.png,1,0\n")
    save(tmp_path / "images" / "c.png", 5)
    bad = ErrorList()
    assert [e.query.images[0] for e in load_manyicl(tmp_path, "demo", on_error=bad)] == [
        solid_image(5)
    ]
    assert ["line 2" in str(bad[0]), "line 3" in str(bad[1]), "line 4" in str(bad[2])] == [True] * 3
    with pytest.raises(LoadError, match=r"test\.csv cannot be read"):
        list(load_manyicl(tmp_path, "test"))
    (tmp_path / "demo.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadError, match="utf-8"):
        list(load_manyicl(tmp_path, "demo"))
    (tmp_path / "demo.csv").write_bytes(b"")
    with pytest.raises(LoadError, match="no class columns"):
        list(load_manyicl(tmp_path, "demo"))


@pytest.mark.skipif(not UCMERCED.exists(), reason="the UCMerced sample is not beside this checkout")
def test_published_sample_loads() -> None:
    demo, test = (list(load_manyicl(UCMERCED, split)) for split in ("demo", "test"))
    assert len(demo) == len(test) == 21
    assert len({e.answer for e in demo}) == 21
    assert {e.labels for e in demo} == {None}


def test_digits_are_stable_images_with_word_labels() -> None:
    digits = list(load_digits())
    assert len(digits) == 1797
    assert [e.answer for e in digits[:3]] == ["zero", "one", "two"]
    assert next(load_digits(words=False)).answer == "0"
    image = digits[0].query.images[0]
    assert (image.width, image.height, image.media_type) == (8, 8, "image/png")
    assert image.decode().getpixel((0, 0)) == (0, 0, 0)
    assert len({e.query.images[0] for e in digits}) == 1797


def test_loader_does_not_check_image_bodies(tmp_path: Path) -> None:
    path = tmp_path / "cat" / "half.png"
    path.parent.mkdir()
    path.write_bytes(damaged_image().data)
    (found,) = load_image_folder(tmp_path)
    with pytest.raises(ImageError, match=r"half\.png is damaged"):
        found.query.images[0].decode()


def test_every_kind_of_photograph_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for mode, suffix in (("CMYK", "jpg"), ("RGBA", "png"), ("I;16", "png"), ("P", "gif")):
        Pillow.new(mode, (9, 7)).save(tmp_path / "x" / f"{mode.replace(';', '')}.{suffix}")
    found = list(load_image_folder(tmp_path))
    assert [e.query.images[0].decode().size for e in found] == [(9, 7)] * 4


def test_image_in_two_classes_is_reported_and_stays_in_the_first(tmp_path: Path) -> None:
    for path in ("cat/1.png", "cat/2.png", "dog/3.png"):
        save(tmp_path / path, 1)
    save(tmp_path / "dog" / "4.png", 2)
    bad = ErrorList()
    found = list(load_image_folder(tmp_path, on_error=bad))
    assert [Path(str(e.source)).name for e in found] == ["1.png", "2.png", "4.png"]
    (error,) = bad
    assert isinstance(error, LoadError)
    assert str(tmp_path / "cat" / "1.png") in str(error)
    assert str(tmp_path / "dog" / "3.png") in str(error)


def test_class_without_a_name_is_reported_once(tmp_path: Path) -> None:
    save(tmp_path / "   " / "1.png", 1)
    save(tmp_path / "   " / "2.png", 2)
    save(tmp_path / "cat" / "3.png", 3)
    bad = ErrorList()
    assert [e.answer for e in load_image_folder(tmp_path, on_error=bad)] == ["cat"]
    assert ["label is empty" in str(error) for error in bad] == [True]
    table(tmp_path, ",cat,\na.png,1,0\n")
    with pytest.raises(LoadError, match="unnamed"):
        list(load_manyicl(tmp_path, "demo"))
    table(tmp_path, f",cat,{'x' * 10240}\na.png,1,0\n")
    with pytest.raises(LoadError, match=r"demo\.csv: the label has 10,240"):
        list(load_manyicl(tmp_path, "demo"))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_in_a_table_is_an_error(tmp_path: Path, value: str) -> None:
    table(tmp_path, f",cat,dog\na.png,1,0\nb.png,0,{value}\n")
    bad = ErrorList()
    assert [e.labels for e in load_manyicl(tmp_path, "demo", on_error=bad)] == [None]
    assert "demo.csv, line 3" in str(bad[0])


def test_table_images_must_be_inside_the_folder(tmp_path: Path) -> None:
    outside = save(tmp_path / "x.png", 9)
    folder = tmp_path / "set"
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "link.png").symlink_to(outside)
    table(folder, f",cat\n../../x.png,1\n{outside},1\nlink.png,1\na.png,1\n")
    bad = ErrorList()
    assert [e.query.images for e in load_manyicl(folder, "demo", on_error=bad)] == [
        (solid_image(0),)
    ]
    assert ["is outside of" in str(error) for error in bad] == [True] * 3


def test_table_sources_are_utf8_in_any_folder(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    table(folder, ",cat\na.png,1\ngone.png,1\n")
    bad = ErrorList()
    (found,) = load_manyicl(folder, "demo", on_error=bad)
    assert "caf\ufffd".encode() in str(found.source).encode()
    assert str(bad[0]).encode()


def test_heic_files_are_reported(tmp_path: Path) -> None:
    save(tmp_path / "cat" / "1.png")
    (tmp_path / "cat" / "2.HEIC").write_bytes(b"\x00\x00\x00\x18ftypheic" + bytes(100))
    errors = ErrorList()
    [found] = load_image_folder(tmp_path, on_error=errors)
    assert found.answer == "cat"
    assert "HEIC" in str(errors[0])


@pytest.mark.parametrize("suffix", ["avif", "jp2"])
def test_other_suffixes_of_supported_formats_are_loaded(tmp_path: Path, suffix: str) -> None:
    save(tmp_path / "cat" / f"1.{suffix}")
    assert len(list(load_image_folder(tmp_path))) == 1


def test_labels_are_on_one_line(tmp_path: Path) -> None:
    save(tmp_path / "polar \n bear" / "1.png")
    save(tmp_path / "polar bear" / "2.png", 2)
    assert {one.answer for one in load_image_folder(tmp_path)} == {"polar bear"}


def test_images_deleted_while_the_folder_is_read_are_reported(tmp_path: Path) -> None:
    for number, name in enumerate(("bird", "cat", "dog")):
        save(tmp_path / name / "1.png", number)
    bad = ErrorList()
    found = load_image_folder(tmp_path, on_error=bad)
    first = next(found)
    shutil.rmtree(tmp_path / "cat")
    assert [one.answer for one in (first, *found)] == ["bird", "dog"]
    assert "cannot be read: No such file or directory" in str(bad[0])


def test_a_folder_deleted_while_it_is_scanned_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("bird", "cat")):
        save(tmp_path / name / "1.png", number)
    is_dir = Path.is_dir

    def removing(path: Path) -> bool:
        found = is_dir(path)
        if path.name == "cat":
            shutil.rmtree(path, ignore_errors=True)
        return found

    monkeypatch.setattr(Path, "is_dir", removing)
    scan = scan_images(tmp_path)
    assert [path.parent.name for path in scan.images] == ["bird"]
    assert scan.unread_text == "1 broken or repeated link"
