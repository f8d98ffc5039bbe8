"""Cache of image features from a model's vision tower (needs torch and transformers).

Many prompts share demonstrations, and resizing and encoding images is most of a small model's work.
A model with one feature shape for all images (LLaVA, FastVLM) accepts projected features instead of
pixels. Other models (tiles, native resolution) encode the images of each prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from PIL import Image as Pillow
from transformers.modeling_outputs import BaseModelOutputWithPooling

from bottega._util.lru import SharedLRUCache

MAX_BYTES = 256 * 1024 * 1024


class VisionCache:
    """Projected features by image sha256, up to `max_bytes`."""

    def __init__(self, model: Any, processor: Any, placeholder: str, max_bytes: int) -> None:
        self._model, self._processor = model, processor
        self.placeholder = placeholder
        self._separate = False
        self._features: SharedLRUCache[str, torch.Tensor] = SharedLRUCache(
            max_bytes, size=lambda rows: rows.nbytes
        )

    @classmethod
    def for_model(
        cls, model: Any, processor: Any, max_bytes: int = MAX_BYTES
    ) -> VisionCache | None:
        """Return a cache for the model, or None if it accepts no features or their shapes vary."""
        if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
            return None
        try:
            placeholder = _placeholder(model, processor)
        except Exception:  # another kind of model; real errors appear when it encodes an image
            return None
        return cls(model, processor, placeholder, max_bytes) if placeholder else None

    def contains(self, sha256: str) -> bool:
        return self._features.get(sha256) is not None

    def features(
        self, images: Iterable[str], decoded: Mapping[str, Pillow.Image]
    ) -> dict[str, torch.Tensor]:
        """Return the features by sha256; `decoded` holds the images that are not cached."""
        cached = {sha: self._features.get(sha) for sha in images}
        fresh = self._encode_images(
            {sha: decoded[sha] for sha, rows in cached.items() if rows is None}
        )
        for sha, rows in fresh.items():
            self._features.put(sha, rows)
        return fresh | {sha: rows for sha, rows in cached.items() if rows is not None}

    def model_inputs(self, features: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the model inputs for images in prompt order.

        The features are a tuple or one tensor, as the model's own vision tower returns them.
        """
        pooled: Any = tuple(features) if self._separate else torch.stack(list(features))
        return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=pooled)}}

    def expand_placeholders(self, text: str) -> str:
        """Repeat the image token once per feature of each image."""
        return text.replace(self._processor.image_token, self.placeholder)

    def _encode_images(self, decoded: Mapping[str, Pillow.Image]) -> dict[str, torch.Tensor]:
        if not decoded:
            return {}
        pixels = self._processor.image_processor(list(decoded.values()), return_tensors="pt")
        features = _encode(self._model, pixels["pixel_values"])
        self._separate = not isinstance(features, torch.Tensor)
        # Copies: a view would keep the memory of the whole batch.
        return {sha: row.clone() for sha, row in zip(decoded, features, strict=True)}


def _placeholder(model: Any, processor: Any) -> str | None:
    """Return the text of one image, or None if it differs between two image shapes."""
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
    """Encode pixels (n, channels, height, width) as features (n, tokens, model width)."""
    features: torch.Tensor | Sequence[torch.Tensor] = model.base_model.get_image_features(
        pixels.to(model.device, model.dtype), return_dict=True
    ).pooler_output
    return features
