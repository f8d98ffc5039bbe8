"""What a model's vision tower made of the images it has seen. Needs torch and transformers.

The demonstrations of a knowledge base come back in prompt after prompt, and resizing and encoding
them is most of a small model's work. Models that turn every image into one tensor of the same
shape (LLaVA, FastVLM) can be given the projected features instead of pixels; the others (tiles,
native resolution) go the ordinary way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image as Pillow
from transformers.modeling_outputs import BaseModelOutputWithPooling

from bottega._util.lru import SharedLRUCache

KEEP_BYTES = 256 * 1024 * 1024


class VisionCache:
    """Projected features by image sha256, at most `keep` bytes of them."""

    def __init__(self, model: Any, processor: Any, placeholder: str, keep: int) -> None:
        self._model, self._processor = model, processor
        self.placeholder = placeholder
        self._apart = False
        self._features: SharedLRUCache[str, torch.Tensor] = SharedLRUCache(
            keep, size=lambda rows: rows.nbytes
        )

    @classmethod
    def of(cls, model: Any, processor: Any, keep: int = KEEP_BYTES) -> VisionCache | None:
        """None if the model's images are not all of one shape, or cannot be given as features."""
        if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
            return None
        try:
            placeholder = _placeholder(model, processor)
        except Exception:  # not this kind of model; what is truly wrong shows the ordinary way
            return None
        return cls(model, processor, placeholder, keep) if placeholder else None

    def knows(self, sha256: str) -> bool:
        return self._features.get(sha256) is not None

    def features(
        self, images: Iterable[str], pictures: Mapping[str, Pillow.Image]
    ) -> dict[str, torch.Tensor]:
        """By sha256; `pictures` are those not known yet."""
        known = {sha: self._features.get(sha) for sha in images}
        fresh = self._look({sha: pictures[sha] for sha, seen in known.items() if seen is None})
        for sha, seen in fresh.items():
            self._features.put(sha, seen)
        return fresh | {sha: seen for sha, seen in known.items() if seen is not None}

    def given(self, features: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The model's inputs for images, in the order of the prompts, in the form in which its own
        eye gives them: LLaVA joins them itself."""
        pooled: Any = tuple(features) if self._apart else torch.stack(list(features))
        return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=pooled)}}

    def spelled(self, text: str) -> str:
        """With room for every image."""
        return text.replace(self._processor.image_token, self.placeholder)

    def _look(self, pictures: Mapping[str, Pillow.Image]) -> dict[str, torch.Tensor]:
        if not pictures:
            return {}
        pixels = self._processor.image_processor(list(pictures.values()), return_tensors="pt")
        features = _encode(self._model, pixels["pixel_values"])
        self._apart = not isinstance(features, torch.Tensor)
        # Copies: a view would keep the whole batch's memory.
        return {sha: row.clone() for sha, row in zip(pictures, features, strict=True)}


def _placeholder(model: Any, processor: Any) -> str | None:
    """What stands for an image in a text, if two images of different shapes come out alike."""
    probes = [Pillow.new("RGB", size) for size in ((8, 8), (200, 90))]
    pixels = processor.image_processor(probes, return_tensors="pt")
    values = pixels["pixel_values"]
    if set(pixels) != {"pixel_values"} or values.ndim != 4 or len(values) != 2:
        return None
    with torch.inference_mode():
        tokens = len(_encode(model, values)[0])
    found = {processor.replace_image_token(pixels, image_idx=i) for i in (0, 1)}
    placeholder = str(processor.image_token) * tokens
    return placeholder if found == {placeholder} else None


def _encode(model: Any, pixels: torch.Tensor) -> torch.Tensor | Sequence[torch.Tensor]:
    """(n, channels, height, width) to (n, tokens, width of the language model)."""
    features: torch.Tensor | Sequence[torch.Tensor] = model.base_model.get_image_features(
        pixels.to(model.device, model.dtype), return_dict=True
    ).pooler_output
    return features
