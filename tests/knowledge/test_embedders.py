from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageDraw

from bottega.bundled import bundled_folder
from bottega.errors import EmbeddingError, MissingDependencyError, SettingError
from bottega.image import Image
from bottega.knowledge import PixelEmbedder, SentenceEmbedder, TowerEmbedder
from bottega.knowledge.embedders.pixel_embedder import unit_images
from bottega.knowledge.loaders.folders import load_digits
from bottega.protocols import Embedder, Vectors
from bottega.types import Query
from tests.builders import solid_image
from tests.knowledge import tiny_models


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_clip(tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_fast_vlm(tmp_path_factory.mktemp("models") / "vlm")


def noise(seed: int, size: tuple[int, int] = (40, 30)) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    return Image.from_pillow(Pillow.fromarray(pixels))


def queries(*seeds: int, text: str = "abc") -> list[Query]:
    return [Query(text, (noise(seed),)) for seed in seeds]


def lengths(vectors: Vectors) -> list[float]:
    return [float(length) for length in np.linalg.norm(vectors, axis=1)]


def right_neighbours(vectors: Vectors, labels: Sequence[str]) -> float:
    """Leave-one-out accuracy of the nearest neighbour."""
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    names = np.array(labels)
    return float((names[scores.argmax(1)] == names).mean())


def check_image_embedder(embedder: Embedder) -> None:
    vectors = embedder.embed(queries(1, 2, 3))
    assert vectors.dtype == np.float32
    assert vectors.shape == (3, embedder.dimension)
    assert lengths(vectors) == pytest.approx([1.0] * 3, abs=1e-5)
    assert np.allclose(embedder.embed(queries(2)), vectors[1:2], atol=1e-5)
    both = embedder.embed([Query("", (noise(1), noise(2)))])
    mean = vectors[0] + vectors[1]
    assert np.allclose(both[0], mean / np.linalg.norm(mean), atol=1e-5)
    mixed = embedder.embed([*queries(1), Query("", (noise(1), noise(2))), *queries(3)])
    assert np.allclose(mixed, [vectors[0], both[0], vectors[2]], atol=1e-5)
    assert embedder.embed([]).shape == (0, embedder.dimension)
    with pytest.raises(EmbeddingError, match="only the text 'what\\?'") as raised:
        embedder.embed([*queries(1), Query("what?")])
    assert raised.value.hint


def test_pixels_embed_images() -> None:
    check_image_embedder(PixelEmbedder(batch_size=2))


def test_pixels_distinguish_digits() -> None:
    digits = list(load_digits())
    vectors = PixelEmbedder().embed([e.query for e in digits])
    assert right_neighbours(vectors, [e.answer for e in digits]) >= 0.99


def test_pixels_distinguish_colours() -> None:
    flat = [
        Image.from_pillow(Pillow.new("RGB", (30, 20), colour))
        for colour in ("red", "darkred", "blue", "black")
    ]
    red, dark, blue, black = PixelEmbedder().embed([Query("", (image,)) for image in flat])
    assert red @ dark > red @ blue + 0.1
    assert np.linalg.norm(black) == pytest.approx(1.0)


def test_tower_embeds_images(vlm: Path) -> None:
    embedder = TowerEmbedder(vlm, batch_size=2)
    assert embedder.dimension == 80
    check_image_embedder(embedder)


def test_tower_fingerprint_covers_weights_and_preprocessing(tmp_path: Path, vlm: Path) -> None:
    original = TowerEmbedder(vlm).fingerprint
    decoder = tiny_models.save_fast_vlm(tmp_path / "a", decoder_seed=7)
    tower = tiny_models.save_fast_vlm(tmp_path / "b", seed=7)
    assert TowerEmbedder(decoder).fingerprint == original
    assert TowerEmbedder(tower).fingerprint != original


def test_tower_may_be_used_by_several_threads(vlm: Path) -> None:
    embedder = TowerEmbedder(vlm)
    alone = [embedder.embed(queries(seed)) for seed in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: embedder.embed(queries(seed)), range(8)))
    assert np.allclose(alone, together, atol=1e-5)


def test_bundled_tower_embeds_images() -> None:
    check_image_embedder(TowerEmbedder.bundled())


def character(*, left: int = 10, ink: int = 0) -> Query:
    image = Pillow.new("L", (105, 105), 255 - ink)
    pen = ImageDraw.Draw(image)
    pen.line([(left, 20), (left + 30, 50), (left, 50)], fill=ink, width=3)
    return Query("", (Image.from_pillow(image),))


def test_bundled_tower_ignores_position_and_polarity_of_drawings() -> None:
    embedder = TowerEmbedder.bundled()
    first, *others = embedder.embed([character(), character(left=60), character(ink=255)])
    assert [float(first @ one) for one in others] == pytest.approx([1.0, 1.0], abs=1e-4)
    whole = TowerEmbedder(bundled_folder())
    first, *others = whole.embed([character(), character(left=60), character(ink=255)])
    assert max(float(first @ one) for one in others) < 0.95
    assert embedder.fingerprint != whole.fingerprint


def test_bundled_tower_centres_drawings_of_every_size() -> None:
    drawn = Pillow.new("L", (1024, 1024), 255)
    ImageDraw.Draw(drawn).line([(300, 250), (600, 700), (420, 820)], fill=0, width=40)
    sides = (105, 128, 256, 400, 512, 1024)
    sizes = [Image.from_pillow(drawn.resize((side, side))) for side in sides]
    first, *others = TowerEmbedder.bundled().embed([Query("", (image,)) for image in sizes])
    assert min(float(first @ one) for one in others) > 0.98


def test_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingError, match="gone does not exist"):
        TowerEmbedder(tmp_path / "gone")
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        TowerEmbedder(tmp_path)
    with pytest.raises(EmbeddingError, match="cannot be loaded") as raised:
        SentenceEmbedder(tmp_path)
    assert raised.value.hint


def test_clip_embeds_images(clip: Path) -> None:
    check_image_embedder(SentenceEmbedder(clip, batch_size=2))


def test_clip_embeds_texts_without_images(clip: Path) -> None:
    embedder = SentenceEmbedder(clip, mode="text")
    vectors = embedder.embed([Query("abc"), Query("xyz", (solid_image(1),)), Query("abc")])
    assert lengths(vectors) == pytest.approx([1.0] * 3, abs=1e-5)
    assert np.allclose(vectors[0], vectors[2], atol=1e-5)
    assert not np.allclose(vectors[0], vectors[1], atol=1e-2)
    assert embedder.embed([]).shape == (0, embedder.dimension)


def test_average_weighs_image_and_text_equally(clip: Path) -> None:
    query = queries(1, 2)
    image, text = (SentenceEmbedder(clip, mode=mode).embed(query) for mode in ("image", "text"))
    both = SentenceEmbedder(clip, mode="average").embed(query)
    mean = image + text
    assert np.allclose(both, mean / np.linalg.norm(mean, axis=1, keepdims=True), atol=1e-5)


def test_raw_average_keeps_the_models_lengths(clip: Path) -> None:
    query = queries(1, 2)
    image, text = (
        SentenceEmbedder(clip, mode=mode, normalize=False).embed(query)
        for mode in ("image", "text")
    )
    released = SentenceEmbedder(clip, mode="average", average="raw", normalize=False)
    assert lengths(image) != pytest.approx([1.0, 1.0], abs=1e-2)
    assert np.allclose(released.embed(query), (image + text) / 2, atol=1e-5)


def test_fingerprints_of_different_settings_differ(tmp_path: Path, clip: Path) -> None:
    other = tiny_models.save_clip(tmp_path / "clip", seed=1)
    prints = [
        SentenceEmbedder(clip).fingerprint,
        SentenceEmbedder(clip, normalize=False).fingerprint,
        SentenceEmbedder(clip, mode="text").fingerprint,
        SentenceEmbedder(clip, mode="average").fingerprint,
        SentenceEmbedder(clip, mode="average", average="raw").fingerprint,
        SentenceEmbedder(other).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert SentenceEmbedder(str(clip)).fingerprint == prints[0]


def test_threads_share_a_tokenizer(clip: Path) -> None:
    embedder = SentenceEmbedder(clip, mode="text")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: embedder.embed([Query("ab" * n)] * 3), range(1, 9)))
    assert all(vectors.shape == (3, 12) for vectors in found)


def test_unknown_mode_is_rejected(clip: Path) -> None:
    with pytest.raises(SettingError, match="got 'sound'"):
        SentenceEmbedder(clip, mode="sound")  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["torch", "sentence_transformers"])
def test_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError) as raised:
        TowerEmbedder(tmp_path) if package == "torch" else SentenceEmbedder(tmp_path)
    assert package in str(raised.value)
    assert "bottega-vlm[local]" in raised.value.hint


def test_a_very_long_image_is_embedded_by_its_centre() -> None:
    sizes: list[tuple[int, int]] = []

    def encode(images: list[Pillow.Image]) -> Vectors:
        sizes.extend(image.size for image in images)
        return np.ones((len(images), 2), np.float32)

    images = [Image.from_pillow(Pillow.new("RGB", size)) for size in ((1, 999), (999, 1))]
    unit_images(
        [Query("", (one,)) for one in images], encode, dimension=2, at_least=64, batch_size=1
    )
    assert all(max(size) <= 21 for size in sizes)
