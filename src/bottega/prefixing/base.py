"""A frozen model and one batch for it, brought into the form in which a prefix fits in front."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bottega.errors import SettingError
from bottega.prefixing.kv import Geometry, KeyValues, decoder_config, hf

# Each can contradict the prefix without an error; they follow from the ids and the mask.
OURS = ("inputs_embeds", "past_key_values", "position_ids", "decoder_attention_mask", "labels")
NO_LOGITS = torch.arange(0)  # to keep; 0 would keep all


class Batch:
    """A processor's inputs beside their model. Raises `SettingError` for what a prefix would go
    wrong with in silence."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        self.model: Any = model
        self.config = decoder_config(model)
        self.geometry = Geometry.of(model)
        self._check(inputs)
        self.inputs = dict(inputs)
        self.ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.door: Any = model
        if self.model.main_input_name == "pixel_values" and "pixel_values" not in inputs:
            # BLIP's wrappers take no text without an image; their language models do.
            self.door = self.model.language_model
            self.inputs = {name: self.inputs[name] for name in ("input_ids", "attention_mask")}

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    def output(self, **arguments: Any) -> Any:
        """That of the language model, which BLIP's wrappers wrap once more."""
        output = self.door(**arguments)
        return getattr(output, "language_model_outputs", output)

    def fitted(self, prefix: KeyValues) -> KeyValues:
        """In the model's dtype: fp32 keys would make a half-precision model's attention fp32."""
        if prefix.geometry != self.geometry:
            raise SettingError(
                f"a prefix of {prefix.geometry} does not fit {self.geometry}",
                hint="make it with Geometry.of(model) of the model that it is put in front of",
            )
        if prefix.batch != len(self.ids):
            raise SettingError(
                f"{prefix.batch} prefixes for {len(self.ids)} prompts",
                hint="give one a prompt; KeyValues.repeat(n) copies it",
            )
        weights = self.model.get_input_embeddings().weight
        return prefix.to(weights.device, weights.dtype)

    def cache(self, prefix: KeyValues) -> Any:
        if not self.is_encoder_decoder:
            return prefix.cache()
        # A cross-attention cache that is not empty passes for the encoder's: the prompt would
        # never be read.
        return hf.EncoderDecoderCache(prefix.cache(), hf.DynamicCache())

    def behind(self, length: int) -> dict[str, Tensor]:
        """Inputs of a pass behind `length` cached tokens."""
        if self.is_encoder_decoder:
            return self.inputs
        longer = self._grown(length, 0)
        return {
            **self.inputs,
            "attention_mask": longer["attention_mask"],
            "position_ids": self._positions(longer)[..., length:],
        }

    def followed(self, length: int) -> tuple[Tensor, Tensor]:
        """The mask of each prompt with `length` tokens behind it, and the positions of these, in a
        decoder-only model."""
        longer = self._grown(0, length)
        return longer["attention_mask"], self._positions(longer)[..., -length:]

    def with_dummies(self, length: int) -> dict[str, Any]:
        """Inputs for `generate`, which drops as many tokens as the cache holds: the first `length`
        stand for the prefix, and are never embedded."""
        if self.is_encoder_decoder:
            return {**self.inputs, **self._opening(length)}
        return self._grown(length, 0)

    def _check(self, inputs: Mapping[str, Tensor]) -> None:
        if foreign := [name for name in OURS if name in inputs]:
            raise SettingError(
                f"the inputs hold {', '.join(foreign)}",
                hint="give what the processor makes: input_ids, attention_mask, pixel_values ...",
            )
        if missing := [name for name in ("input_ids", "attention_mask") if name not in inputs]:
            raise SettingError(
                f"the inputs hold no {' and no '.join(missing)}",
                hint="give all that the processor makes",
            )
        if inputs["attention_mask"].shape != inputs["input_ids"].shape:
            raise SettingError(
                f"the mask is {tuple(inputs['attention_mask'].shape)}, "
                f"the ids are {tuple(inputs['input_ids'].shape)}",
                hint="give the prompt's own mask: the prefix's is added here",
            )
        if "image_grid_thw" in inputs and "mm_token_type_ids" not in inputs:
            raise SettingError(
                "the inputs hold images and no mm_token_type_ids, which place them",
                hint="call the processor with return_mm_token_type_ids=True",
            )
        if any(getattr(part, "gradient_checkpointing", False) for part in self.model.modules()):
            raise SettingError(
                "gradient checkpointing makes a model drop its cache, and with it the prefix",
                hint="switch it off in this model, and use smaller batches to save memory",
            )

    def _grown(self, before: int, behind: int) -> dict[str, Tensor]:
        """With so many dummies around each prompt."""
        values = {"input_ids": self._dummy(), "attention_mask": 1, "mm_token_type_ids": 0}
        grown = {
            name: nn.functional.pad(self.inputs[name], (before, behind), value=value)
            for name, value in values.items()
            if name in self.inputs
        }
        return {**self.inputs, **grown}

    def _positions(self, longer: Mapping[str, Tensor]) -> Tensor:
        """Of what `_grown` returned."""
        ids, mask = longer["input_ids"], longer["attention_mask"]
        place = getattr(getattr(self.model, "model", None), "get_rope_index", None)
        if place is None:
            return mask.cumsum(-1) - 1
        # Qwen's positions have three axes, (3, batch, length), and an image takes fewer of them
        # than it has tokens.
        positions: Tensor = place(
            ids,
            mm_token_type_ids=longer.get("mm_token_type_ids", torch.zeros_like(ids)),
            attention_mask=mask,
            **{name: longer.get(name) for name in ("image_grid_thw", "video_grid_thw")},
        )[0]
        return positions

    def _opening(self, length: int) -> dict[str, Any]:
        start = getattr(self.model.config.get_text_config(), "decoder_start_token_id", None)
        if start is None:
            raise SettingError(
                "the model's config has no decoder_start_token_id",
                hint="set it to what the model was trained with; T5's is its pad token",
            )
        own = self.inputs.get("decoder_input_ids", torch.full_like(self.ids[:, :1], start))
        # `generate` puts a start in front of whatever begins otherwise: the dummies are starts.
        ids = nn.functional.pad(own, (length, 0), value=start)
        return {
            "decoder_input_ids": ids,
            # Without a mask of their length it would read the dummies behind the prefix.
            "decoder_attention_mask": torch.ones_like(ids),
            "decoder_start_token_id": start,
        }

    def _dummy(self) -> int:
        """A token that stands for no image, and that a penalty on repetition can spare best."""
        names = ("pad_token_id", "bos_token_id", "eos_token_id")
        known = [getattr(self.config, name, None) for name in names]
        return next((one for one in known if isinstance(one, int)), 0)


@contextmanager
def own_offsets(model: nn.Module) -> Iterator[None]:
    """Qwen's models keep the positions' offsets of the last call and use them in the next one that
    brings a cache, whosever it is."""
    holder: Any = getattr(model, "model", None)
    if not hasattr(holder, "rope_deltas"):
        yield
        return
    kept, holder.rope_deltas = holder.rope_deltas, None
    try:
        yield
    finally:
        holder.rope_deltas = kept
