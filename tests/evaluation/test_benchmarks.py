from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageDraw, ImageOps
from sklearn import datasets

from bottega import KnowledgeBase, PixelEmbedder, load_image_folder
from bottega.errors import BottegaError, LoadError, NoticeError, SettingError
from bottega.evaluation.benchmarks.loading import load_benchmark
from tests.paths import SHARED

UCMERCED = SHARED / "data" / "ucmerced"


def paint(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Pillow.new("RGB", (8, 8), (shade, 0, 0)).save(path.with_suffix(".png"))


def folder(root: Path, sizes: dict[str, int]) -> Path:
    labelled = [(label, i) for label, size in sizes.items() for i in range(size)]
    for shade, (label, i) in enumerate(labelled):
        paint(root / label / str(i), shade)
    return root


def test_digits_are_split_by_seed_without_overlap() -> None:
    first, again, other = (load_benchmark("digits", seed=s) for s in (0, 0, 1))
    assert (len(first.knowledge), len(first.items), len(first.labels)) == (1297, 500, 10)
    assert (first.items, first.knowledge) == (again.items, again.knowledge)
    assert first.items != other.items


def test_digit_halves_are_disjoint() -> None:
    first, second = (load_benchmark(f"digits:half={half}", seed=0) for half in ("first", "second"))
    assert [len(half.knowledge) + len(half.items) for half in (first, second)] == [898, 899]
    assert len(first.items) == len(second.items) == 500
    rows = [row(e.source) for e in (*first.knowledge, *first.items)]
    assert sorted(rows) == list(range(898))
    assert min(row(e.source) for e in (*second.knowledge, *second.items)) == 898
    assert {e.query.text for e in second.items} == {"Which digit is this?"}
    assert load_benchmark("digits:half=all", seed=0).items == load_benchmark("digits", seed=0).items


def row(source: str | None) -> int:
    return int(str(source).rpartition(" ")[2])


def test_unknown_half_lists_valid_halves() -> None:
    with pytest.raises(SettingError) as raised:
        load_benchmark("digits:half=third", seed=0)
    assert raised.value.hint == "use all or first or second"


def test_limit_and_per_class_reduce_the_benchmark() -> None:
    data = load_benchmark("digits", seed=0, limit=20, per_class=3)
    assert len(data.items) == 20
    assert set(Counter(e.answer for e in data.knowledge).values()) == {3}


def test_plain_folder_holds_out_a_quarter_of_each_class(tmp_path: Path) -> None:
    data = load_benchmark(f"image-folder:{folder(tmp_path, {'a': 8, 'b': 3, 'c': 1})}", seed=0)
    assert Counter(e.answer for e in data.items) == {"a": 2, "b": 1}
    assert Counter(e.answer for e in data.knowledge) == {"a": 6, "b": 2, "c": 1}
    assert not data.multi_label


def test_train_and_test_folders_define_the_split(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 3, "b": 3})
    paint(tmp_path / "test" / "a" / "x", 99)
    data = load_benchmark(f"image-folder:{tmp_path}", seed=0)
    assert (len(data.knowledge), len(data.items)) == (6, 1)


def test_question_option_applies_to_every_image(tmp_path: Path) -> None:
    spec = f"image-folder:{folder(tmp_path, {'cat': 4, 'dog': 4})}"
    for question in ("", "Cat, or dog?"):
        data = load_benchmark(f"{spec},question={question}", seed=0)
        assert {one.query.text for one in (*data.knowledge, *data.items)} == {question}
    assert load_benchmark(spec, seed=0).items[0].query.text == "What is in the image above?"


def test_overlap_is_rejected_unless_allowed(tmp_path: Path) -> None:
    folder(tmp_path / "train", {"a": 3, "b": 1})
    paint(tmp_path / "test" / "a" / "x", 0)
    with pytest.raises(LoadError, match="1 of 1 test items"):
        load_benchmark(f"image-folder:{tmp_path}", seed=0)
    assert load_benchmark(f"image-folder:{tmp_path}", seed=0, allow_overlap=True).items


SIZES = (160, 120)


def scene(rng: np.random.Generator) -> Pillow.Image:
    """Return coloured discs on a background with a gradient, like a simple photograph."""
    image = Pillow.linear_gradient("L").resize(SIZES).convert("RGB")
    draw = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, radius = rng.integers(0, 160), rng.integers(0, 120), rng.integers(6, 40)
        box = [int(x - radius), int(y - radius), int(x + radius), int(y + radius)]
        draw.ellipse(box, fill=tuple(rng.integers(0, 255, 3).tolist()))
    return image


def recoloured(image: Pillow.Image) -> Pillow.Image:
    return Pillow.merge("RGB", image.split()[::-1])


# How an image of the test split comes from one of the training split, and whether it is a copy.
EDITS: dict[str, tuple[Callable[[Pillow.Image], Pillow.Image], str, dict[str, Any], bool]] = {
    "JPEG": (lambda image: image, "jpg", {"quality": 60}, True),
    "WebP": (lambda image: image, "webp", {"quality": 80}, True),
    "half the size": (lambda image: image.resize((80, 60)), "png", {}, True),
    "a third more": (lambda image: image.resize((213, 160)), "jpg", {"quality": 85}, True),
    "grey in RGB": (lambda image: image.convert("L"), "png", {}, False),
    "other colours": (recoloured, "png", {}, False),
    "mirrored": (ImageOps.mirror, "png", {}, False),
    "flat": (lambda image: Pillow.new("RGB", SIZES, (7, 7, 7)), "png", {}, False),
}


@pytest.mark.parametrize("edit", EDITS)
def test_copies_in_other_bytes_are_reported_once(tmp_path: Path, edit: str) -> None:
    change, suffix, options, is_copy = EDITS[edit]
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for split in ("train", "test"):
            (tmp_path / split / label).mkdir(parents=True)
        for number in range(3):
            original = scene(rng)
            original.save(tmp_path / "train" / label / f"{number}.png")
            scene(rng).save(tmp_path / "test" / label / f"{number}.png")
    change(original).save(tmp_path / "test" / "dog" / f"copy.{suffix}", **options)
    Pillow.new("RGB", SIZES, (9, 9, 9)).save(tmp_path / "train" / "cat" / "flat.png")
    reported: list[BottegaError] = []
    data = load_benchmark(f"image-folder:{tmp_path}", seed=0, on_error=reported.append)
    assert len(data.items) == 7
    if not is_copy:
        assert reported == []
        return
    [notice] = reported
    assert isinstance(notice, NoticeError)
    assert str(notice).startswith("1 of 7 evaluated items look like labelled examples in another")
    pair = (tmp_path / "test" / "dog" / f"copy.{suffix}", tmp_path / "train" / "dog" / "2.png")
    assert " and ".join(map(str, pair)) in str(notice)


def photographs() -> list[Pillow.Image]:
    """Return eight real photographs: the quarters of scikit-learn's two."""
    found = []
    for name in ("china.jpg", "flower.jpg"):
        whole = Pillow.fromarray(datasets.load_sample_image(name))
        width, height = whole.width // 2, whole.height // 2
        for left, top in ((0, 0), (width, 0), (0, height), (width, height)):
            found.append(whole.crop((left, top, left + width, top + height)))
    return found


def without_edge(image: Pillow.Image, left: int, right: int) -> Pillow.Image:
    return image.crop((left, left, image.width - right, image.height - right))


def with_object(image: Pillow.Image, colour: str, share: float) -> Pillow.Image:
    changed, (width, height) = image.copy(), image.size
    radius = share * height / 2
    box = (width / 2 - radius, height / 2 - radius, width / 2 + radius, height / 2 + radius)
    ImageDraw.Draw(changed).ellipse(box, fill=colour)
    return changed


def scaled(image: Pillow.Image, factor: float) -> Pillow.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)))


# Scale and JPEG quality of the copies of the photographs.
COPIES = [
    *((1, quality) for quality in (10, 20, 30, 60, 90)),
    *((scale, 95) for scale in (1 / 3, 1 / 2, 2)),
    *((1 / 3, 20), (1 / 3, 60), (1 / 2, 10), (1 / 2, 60), (2, 10)),
]
# Two images of a scene that are different images.
SCENES: dict[str, tuple[Callable[[Pillow.Image], Pillow.Image], ...]] = {
    "a small object": (lambda image: with_object(image, "red", 0.15), lambda image: image),
    "another small object": tuple(
        partial(with_object, colour=colour, share=0.2) for colour in ("red", "white")
    ),
    "another object": tuple(
        partial(with_object, colour=colour, share=0.4) for colour in ("navy", "white")
    ),
    "a moved camera": (
        lambda image: without_edge(image, 0, 16),
        lambda image: without_edge(image, 16, 0),
    ),
}


def reported_of(root: Path, pairs: list[tuple[Pillow.Image, Pillow.Image]], quality: int) -> str:
    """Return what is reported if each pair is an example and an item."""
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            (root / split / label).mkdir(parents=True)
    for number, (known, item) in enumerate(pairs):
        label = ("cat", "dog")[number % 2]
        known.save(root / "train" / label / f"{number}.png")
        item.save(root / "test" / label / f"{number}.jpg", quality=quality)
    reported: list[BottegaError] = []
    load_benchmark(f"image-folder:{root}", seed=0, on_error=reported.append)
    return " ".join(map(str, reported))


@pytest.mark.parametrize(("scale", "quality"), COPIES)
def test_compressed_copies_of_photographs_are_found(
    tmp_path: Path, scale: float, quality: int
) -> None:
    pairs = [(image, scaled(image, scale)) for image in photographs()]
    assert reported_of(tmp_path, pairs, quality).startswith("8 of 8 evaluated items look like")


@pytest.mark.parametrize("case", SCENES)
def test_different_photographs_of_a_scene_are_no_copies(tmp_path: Path, case: str) -> None:
    first, second = SCENES[case]
    pairs = [(first(image), second(image)) for image in photographs()]
    assert reported_of(tmp_path, pairs, 90) == ""


def test_copies_inside_of_a_knowledge_base_are_found(tmp_path: Path) -> None:
    for number, image in enumerate(photographs()):
        path = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    scaled(image, 0.5).save(path.with_name("copy.jpg"))
    with KnowledgeBase.open(tmp_path / "k.db", PixelEmbedder()) as knowledge:
        knowledge.add(load_image_folder(tmp_path / "photos"))
    reported: list[BottegaError] = []
    load_benchmark(f"knowledge-base:{tmp_path / 'k.db'}", seed=0, on_error=reported.append)
    [notice] = reported
    assert str(notice).startswith("2 of 9 evaluated items look like labelled examples in another")
    assert all(str(path.with_name(name)) in str(notice) for name in ("7.png", "copy.jpg"))


@pytest.mark.skipif(not UCMERCED.exists(), reason="UC Merced is not available")
def test_different_photographs_are_no_copies() -> None:
    reported: list[BottegaError] = []
    load_benchmark(f"manyicl:{UCMERCED}", seed=0, on_error=reported.append)
    photos = SHARED / "data" / "photos" / "cifar10"
    load_benchmark(f"image-folder:{photos}", seed=0, on_error=reported.append)
    assert reported == []


def test_too_few_items_raise(tmp_path: Path) -> None:
    with pytest.raises(LoadError):
        load_benchmark(f"image-folder:{folder(tmp_path, {'a': 1})}", seed=0)


@pytest.mark.parametrize("spec", ["", "digitz"])
def test_unknown_benchmarks_are_named(spec: str) -> None:
    with pytest.raises(SettingError, match="unknown benchmark"):
        load_benchmark(spec, seed=0)


@pytest.mark.parametrize("spec", ["image-folder:", "manyicl", "mmmu"])
def test_benchmarks_without_location_are_rejected(spec: str) -> None:
    with pytest.raises(SettingError, match="needs a folder or a Hugging Face id") as raised:
        load_benchmark(spec, seed=0)
    assert raised.value.hint == f"write {spec.rstrip(':')}:DIR"


def test_folder_is_no_benchmark(tmp_path: Path) -> None:
    with pytest.raises(SettingError) as raised:
        load_benchmark(str(tmp_path), seed=0)
    assert raised.value.hint == f"use image-folder:{tmp_path}"


@pytest.mark.skipif(not UCMERCED.exists(), reason="sample data are absent")
def test_manyicl_sample_is_read() -> None:
    data = load_benchmark(f"manyicl:{UCMERCED}", seed=0)
    assert (len(data.knowledge), len(data.items), len(data.labels)) == (21, 21, 21)


def test_manyicl_reads_multi_label_rows(tmp_path: Path) -> None:
    for shade, name in enumerate("uvwx"):
        paint(tmp_path / "images" / name, shade)
    rows = ",flat,round\nu.png,1.0,1.0\nv.png,0.0,0.0\n"
    (tmp_path / "demo.csv").write_text(rows)
    (tmp_path / "test.csv").write_text(rows.replace("u.png", "w.png").replace("v.png", "x.png"))
    data = load_benchmark(f"manyicl:{tmp_path}", seed=0)
    assert data.multi_label
    assert {e.labels for e in data.items} == {("flat", "round"), ()}


def test_share_keeps_a_random_part_of_each_episode() -> None:
    spec = "rules:episodes=3,examples=16"
    whole, half = (load_benchmark(spec, seed=2, kb_share=share) for share in (1.0, 0.5))
    assert (len(whole.knowledge), len(half.knowledge)) == (48, 24)
    kept = [example for example in whole.knowledge if example in half.knowledge]
    assert kept == list(half.knowledge)
    counts = Counter(example.tags["episode"] for example in half.knowledge)
    assert set(counts.values()) == {8}
    other = load_benchmark(spec, seed=2, kb_share=0.5)
    assert other.knowledge == half.knowledge and half.items == whole.items


def test_manyicl_labels_have_the_order_of_the_columns(tmp_path: Path) -> None:
    for shade in (1, 2):
        paint(tmp_path / "images" / str(shade), shade)
    for split in ("demo", "test"):
        rows = "1.png,0,0,1\n2.png,1,0,0\n" if split == "demo" else "2.png,0,0,0\n1.png,0,1,0\n"
        (tmp_path / f"{split}.csv").write_text(f",zebra,ape,cat\n{rows}", "utf-8")
    data = load_benchmark(f"manyicl:{tmp_path}", seed=0, allow_overlap=True)
    assert data.labels[:3] == ("zebra", "ape", "cat")
