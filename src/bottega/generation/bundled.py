"""Bundled models as generators."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image as Pillow

from bottega.bundled import bundled_folder
from bottega.errors import ImageError
from bottega.generation.local import TransformersGenerator
from bottega.image import Image
from bottega.types import Prompt, Reply, Sampling

LOSSY = {"image/jpeg", "image/webp", "image/avif", "image/heic"}
# Images of the synthetic tasks and the digits are smaller and never in a lossy format.
LARGE = 128
SIDE = 64
LEAST_SPREAD, LEAST_COLOURS = 4.0, 150  # mean range across channels; distinct colours out of 32,768
WARNING = (
    "bundled models do not understand photographs: their vision was trained on 64 x 64 synthetic"
    " images; use a larger vision-language model, and an image encoder as the embedder"
)


class PhotographWarning(UserWarning):
    """Warning that a bundled model was prompted with a photograph."""


@dataclass
class PhotographCheck:
    """Check that warns once if the last image of a prompt looks like a photograph."""

    _warned: bool = False

    async def run(self, prompt: Prompt) -> None:
        image = _last_image(prompt)
        if self._warned or image is None or not _may_be_photograph(image):
            return
        if await asyncio.to_thread(is_photograph, image) and not self._warned:
            self._warned = True
            warnings.warn(WARNING, PhotographWarning, stacklevel=2)


def is_photograph(image: Image) -> bool:
    """Return whether the image has many colours, and a lossy format or more than `LARGE` pixels a
    side.

    Grey photographs, and small ones in lossless formats, are not recognised.
    """
    if not _may_be_photograph(image):
        return False
    try:
        pixels = np.asarray(_reduced(image.decode()), dtype=np.int16)
    except ImageError:
        return False  # the model will report it
    spread = float(np.ptp(pixels, axis=2).mean())
    colours = len(np.unique((pixels // 8).reshape(-1, 3), axis=0))
    return spread >= LEAST_SPREAD and colours >= LEAST_COLOURS


def _may_be_photograph(image: Image) -> bool:
    return image.media_type in LOSSY or min(image.width, image.height) > LARGE


def _reduced(image: Pillow.Image) -> Pillow.Image:
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    return small


def _last_image(prompt: Prompt) -> Image | None:
    images = (part for message in reversed(prompt.messages) for part in reversed(message.parts))
    return next((part for part in images if isinstance(part, Image)), None)


class BundledGenerator(TransformersGenerator):
    """Bundled model that warns once when a prompt ends with a photograph."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._photographs = PhotographCheck()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        await self._photographs.run(prompt)
        return await super().generate(prompt, sampling)


def bundled(
    name: str = "apprentice", *, max_batch: int = 16, threads: int | None = 1
) -> TransformersGenerator:
    """Return a bundled model as a generator.

    `bundled("apprentice")` learns from demonstrations; `bundled("master")` also knows digits and
    the English words for scenes. The models are so small that a second thread slows them down.
    Raises `ModelLoadError` for an unknown name.
    """
    return BundledGenerator(
        bundled_folder(name),
        name=f"bundled:{name}",
        device="cpu",
        max_batch=max_batch,
        threads=threads,
        turns_only=True,
        prefix_cache_mb=0,
    )
