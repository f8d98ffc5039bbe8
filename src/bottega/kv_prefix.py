"""KV prefixes: keys and values in front of a frozen vision-language model (needs torch)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from bottega.errors import SettingError

hf: Any = transformers  # partly annotated
# Each of these could silently contradict the prefix; they are computed from the ids and the mask.
RESERVED_INPUTS = (
    "inputs_embeds",
    "past_key_values",
    "position_ids",
    "decoder_attention_mask",
    "labels",
)
KEEP_NO_LOGITS = torch.arange(0)  # as `logits_to_keep`; the number 0 would keep all
RESERVED_SETTINGS = (
    "generation_config",
    "past_key_values",
    "max_length",
    "return_dict_in_generate",
    "decoder_start_token_id",
)


@dataclass(frozen=True)
class Geometry:
    """Shape of a decoder's self-attention. One token of a prefix is 2 x layers x kv_heads x
    head_dim numbers."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: nn.Module) -> Geometry:
        """Return the geometry of a transformers model. Raises `SettingError` for a model whose
        cache holds more than keys and values of every token, all of one size: it cannot take a
        prefix."""
        config = decoder_config(model)
        _refuse_other_caches(model, config)
        heads: int = config.num_attention_heads
        return cls(
            # T5 counts its encoder's layers as `num_hidden_layers`.
            layers=getattr(config, "num_decoder_layers", None) or config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )


@dataclass(frozen=True, eq=False)
class KeyValues:
    """KV prefix: keys and values per layer, each (batch, kv_heads, length, head_dim). This is the
    modulation Theta of RACC, section "Modulating the baseMLLM with aggregated prompts" (P-Tuning
    v2). Keys are stored after RoPE, as in the cache: a learned prefix needs no rotation, and a
    prefix read from text keeps the positions 0 to length - 1."""

    layers: tuple[tuple[Tensor, Tensor], ...]

    def __post_init__(self) -> None:
        shapes = {tuple(part.shape) for pair in self.layers for part in pair}
        if len(shapes) != 1 or len(next(iter(shapes))) != 4:
            raise SettingError(
                f"keys and values of a prefix must have one 4-D shape, got {sorted(shapes)}",
                hint="pass each layer's as (batch, kv_heads, length, head_dim)",
            )

    @classmethod
    def none(cls, geometry: Geometry, batch: int) -> KeyValues:
        """Return a prefix of length 0, which does not change the model."""
        empty = torch.zeros(batch, geometry.kv_heads, 0, geometry.head_dim)
        return cls(((empty, empty),) * geometry.layers)

    @property
    def batch(self) -> int:
        return self.layers[0][0].shape[0]

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2]

    @property
    def geometry(self) -> Geometry:
        _, kv_heads, _, head_dim = self.layers[0][0].shape
        return Geometry(len(self.layers), kv_heads, head_dim)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> KeyValues:
        return KeyValues(tuple((k.to(device, dtype), v.to(device, dtype)) for k, v in self.layers))

    def repeat(self, times: int) -> KeyValues:
        """Repeat each row `times` times in a row, the order of beams and samples in a batch."""
        rows = torch.arange(self.batch).repeat_interleave(times)
        return KeyValues(tuple((k[rows], v[rows]) for k, v in self.layers))

    def cache(self) -> Any:
        """Return a new `transformers.DynamicCache`, to which a model appends."""
        cache = hf.DynamicCache()
        for index, (keys, values) in enumerate(self.layers):
            cache.update(keys, values, index)
        return cache


def reading_model(model: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the model that accepts these inputs: BLIP's wrappers reject text without images, and
    their language models accept it."""
    needs_image = model.main_input_name == "pixel_values" and "pixel_values" not in inputs
    return model.language_model if needs_image else model


def decoder_config(model: Any) -> Any:
    """Return the config of the text decoder."""
    return model.config.get_text_config(decoder=True)


def _refuse_other_caches(model: Any, config: Any) -> None:
    try:
        kinds = {type(layer) for layer in hf.DynamicCache(config=config).layers}
    except (KeyError, AttributeError):  # a layer type without a cache class
        kinds = set()
    latent = getattr(config, "kv_lora_rank", None) is not None
    recurrent = any(getattr(part, "_is_stateful", False) for part in model.modules())
    if kinds == {DynamicLayer} and not latent and not recurrent:
        return
    raise SettingError(
        f"{type(model).__name__} over {config.model_type} caches more than plain keys and values "
        "of every token",
        hint="use a model without sliding windows, recurrent or convolutional layers, shared or "
        "latent keys",
    )


class ModelInputs:
    """Inputs of a processor with their model. Raises `SettingError` for inputs with which a prefix
    would silently give wrong results."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        self.model: Any = model
        self.config = decoder_config(model)
        self.geometry = Geometry.of(model)
        self._check(inputs)
        self.inputs = dict(inputs)
        self.ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.target = reading_model(model, inputs)
        if self.target is not model:
            self.inputs = {name: self.inputs[name] for name in ("input_ids", "attention_mask")}

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    def output(self, **arguments: Any) -> Any:
        """Return the output of the language model; BLIP's wrappers nest it."""
        output = self.target(**arguments)
        return getattr(output, "language_model_outputs", output)

    def fit(self, prefix: KeyValues) -> KeyValues:
        """Cast the prefix to the model's device and dtype. Raises `SettingError` on a mismatch.
        Keys in fp32 would turn the attention of a half-precision model to fp32."""
        if prefix.geometry != self.geometry:
            raise SettingError(
                f"a prefix for this model must have {self.geometry}, got {prefix.geometry}",
                hint="build the prefix with Geometry.of(model) of this model",
            )
        if prefix.batch != len(self.ids):
            raise SettingError(
                f"{len(self.ids)} prompts need as many prefixes, got {prefix.batch}",
                hint="pass one prefix per prompt; KeyValues.repeat(n) copies rows",
            )
        weights = self.model.get_input_embeddings().weight
        return prefix.to(weights.device, weights.dtype)

    def cache(self, prefix: KeyValues) -> Any:
        """Return a new cache that contains the prefix."""
        if not self.is_encoder_decoder:
            return prefix.cache()
        # A non-empty cross-attention cache counts as the encoder's output, and the encoder would
        # not read the prompt.
        return hf.EncoderDecoderCache(prefix.cache(), hf.DynamicCache())

    def inputs_after(self, length: int) -> dict[str, Tensor]:
        """Return the inputs of a forward pass after `length` cached tokens."""
        if self.is_encoder_decoder:
            return self.inputs
        longer = self._padded(length, 0)
        return {
            **self.inputs,
            "attention_mask": longer["attention_mask"],
            "position_ids": self._positions(longer)[..., length:],
        }

    def continuation(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the mask of prompts plus `length` more tokens, and the positions of the latter.
        Decoder-only models only."""
        longer = self._padded(0, length)
        # Not `-length:`, which selects all positions if `length` is 0.
        return longer["attention_mask"], self._positions(longer)[..., self.ids.shape[1] :]

    def with_dummies(self, length: int) -> dict[str, Any]:
        """Return inputs for `generate` with `length` dummy tokens in front of each prompt.
        `generate` drops as many tokens as the cache holds, so the dummies are never embedded."""
        if not self.is_encoder_decoder:
            return self._padded(length, 0)
        start = getattr(self.model.config.get_text_config(), "decoder_start_token_id", None)
        if start is None:
            raise SettingError(
                "the model's config has no decoder_start_token_id",
                hint="set it to the value used in training; for T5 it is the pad token",
            )
        own = self.inputs.get("decoder_input_ids", torch.full_like(self.ids[:, :1], start))
        # `generate` prepends a start token unless the ids begin with one: the dummies are starts.
        ids = nn.functional.pad(own, (length, 0), value=start)
        return {
            **self.inputs,
            "decoder_input_ids": ids,
            # Without a mask of this length, `generate` would read the dummies after the prefix.
            "decoder_attention_mask": torch.ones_like(ids),
            "decoder_start_token_id": start,
        }

    def _check(self, inputs: Mapping[str, Tensor]) -> None:
        if foreign := [name for name in RESERVED_INPUTS if name in inputs]:
            raise SettingError(
                f"the inputs must not contain {', '.join(foreign)}",
                hint="pass the processor's output: input_ids, attention_mask, pixel_values ...",
            )
        if missing := [name for name in ("input_ids", "attention_mask") if name not in inputs]:
            raise SettingError(
                f"the inputs must contain {' and '.join(missing)}",
                hint="pass the complete output of the processor",
            )
        if inputs["attention_mask"].shape != inputs["input_ids"].shape:
            raise SettingError(
                f"the mask must have the shape of the ids {tuple(inputs['input_ids'].shape)}, "
                f"got {tuple(inputs['attention_mask'].shape)}",
                hint="pass the mask of the prompt; the mask of the prefix is added here",
            )
        if "image_grid_thw" in inputs and "mm_token_type_ids" not in inputs:
            raise SettingError(
                "inputs with images must contain mm_token_type_ids, which mark the image tokens",
                hint="call the processor with return_mm_token_type_ids=True",
            )
        if any(getattr(part, "gradient_checkpointing", False) for part in self.model.modules()):
            raise SettingError(
                "gradient checkpointing drops the cache, and with it the prefix",
                hint="disable it in this model, and use smaller batches to save memory",
            )

    def _padded(self, before: int, after: int) -> dict[str, Tensor]:
        """Return the inputs with dummy tokens before and after each prompt."""
        # These tokens mark no image and are least affected by a repetition penalty.
        names = ("pad_token_id", "bos_token_id", "eos_token_id")
        ids = [getattr(self.config, name, None) for name in names]
        dummy = next((one for one in ids if isinstance(one, int)), 0)
        values = {"input_ids": dummy, "attention_mask": 1, "mm_token_type_ids": 0}
        padded = {
            name: nn.functional.pad(self.inputs[name], (before, after), value=value)
            for name, value in values.items()
            if name in self.inputs
        }
        return {**self.inputs, **padded}

    def _positions(self, longer: Mapping[str, Tensor]) -> Tensor:
        """Return the position ids for the output of `_padded`."""
        ids, mask = longer["input_ids"], longer["attention_mask"]
        rope_index = getattr(getattr(self.model, "model", None), "get_rope_index", None)
        if rope_index is None:
            return mask.cumsum(-1) - 1  # left padding gets -1, and is masked
        # Qwen's positions have three axes, (3, batch, length); an image spans fewer positions than
        # it has tokens.
        positions: Tensor = rope_index(
            ids,
            mm_token_type_ids=longer.get("mm_token_type_ids", torch.zeros_like(ids)),
            attention_mask=mask,
            **{name: longer.get(name) for name in ("image_grid_thw", "video_grid_thw")},
        )[0]
        return positions


@contextmanager
def fresh_rope_offsets(model: nn.Module) -> Iterator[None]:
    """Reset the position offsets of a Qwen model during the block, then restore them. Qwen keeps
    the offsets of the last call and would apply them to any later call with a cache."""
    holder: Any = getattr(model, "model", None)
    if not hasattr(holder, "rope_deltas"):
        yield
        return
    saved, holder.rope_deltas = holder.rope_deltas, None
    try:
        yield
    finally:
        holder.rope_deltas = saved


@dataclass(frozen=True, eq=False)
class ForwardScores:
    """Logits and loss of a forward pass. `logits` (batch, length, vocabulary) cover the prompt, or
    the answer in an encoder-decoder. `loss` is the mean over all labels except -100."""

    logits: Tensor
    loss: Tensor | None


def forward(
    model: nn.Module,
    prefix: KeyValues,
    inputs: Mapping[str, Tensor],
    labels: Tensor | None = None,
) -> ForwardScores:
    """Run one forward pass; gradients flow to the prefix. `inputs` come from a processor, padded on
    either side; their mask (batch, length) excludes the prefix. `labels` are (batch, length),
    aligned with the ids, or the answers (batch, answer) of an encoder-decoder; -100 is ignored. The
    prefix is cast to the model's dtype. Raises `SettingError`."""
    batch = ModelInputs(model, inputs)
    output = batch.target(
        **batch.inputs_after(prefix.length),
        past_key_values=batch.cache(batch.fit(prefix)),
        labels=labels,
        use_cache=True,
    )
    return ForwardScores(output.logits, output.loss)


def generate(
    model: nn.Module,
    prefix: KeyValues,
    inputs: Mapping[str, Tensor],
    *,
    max_new_tokens: int,
    num_beams: int = 1,
    num_return_sequences: int = 1,
    **settings: object,
) -> Tensor:
    """Generate after a prefix; return new tokens (batch x num_return_sequences, max_new_tokens).
    `inputs` are padded on the left, else as for `forward`. `settings` are the parameters of
    transformers' `generate`; their defaults come from the model's generation config. Logits
    processors and stopping criteria see `prefix.length` dummy tokens in front of the prompt. Raises
    `SettingError`."""
    if wrong := [name for name in RESERVED_SETTINGS if name in settings]:
        raise SettingError(
            f"generation after a prefix does not accept {', '.join(wrong)}",
            hint="pass settings one by one, and the length as max_new_tokens",
        )
    batch = ModelInputs(model, inputs)
    if not (batch.is_encoder_decoder or bool(batch.mask[:, -1].all())):
        raise SettingError(
            "prompts must be padded on the left, got padding on the right",
            hint='set the tokenizer\'s padding_side to "left"',
        )
    # `generate` repeats the inputs for beams and samples, but not a given cache.
    rows = batch.fit(prefix).repeat(max(num_beams, num_return_sequences))
    arguments = batch.with_dummies(prefix.length)
    with fresh_rope_offsets(model):
        tokens: Tensor = batch.target.generate(
            **settings,
            **arguments,
            past_key_values=batch.cache(rows),
            max_new_tokens=max_new_tokens,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
        )
    shown = arguments["decoder_input_ids" if batch.is_encoder_decoder else "input_ids"]
    return tokens[:, shown.shape[1] :]


def read(model: nn.Module, inputs: Mapping[str, Tensor]) -> KeyValues:
    """Read a text and return its keys and values (batch, kv_heads, length, head_dim).

    Positions start at 0; there are no gradients. Use the result to initialize a learned prefix or
    to read a text ahead. Rows must not be padded, because a prefix has no mask. With an encoder and
    a decoder, the result belongs to the decoder's `decoder_input_ids`. With Qwen, images take fewer
    positions than tokens: a prompt after the prefix has later positions than in the full text.
    Raises `SettingError`.
    """
    batch = ModelInputs(model, inputs)
    if not (batch.is_encoder_decoder or bool(batch.mask.all())):
        raise SettingError(
            "texts for a prefix must not be padded",
            hint="read texts of equal length in one batch, or each text separately",
        )
    with torch.no_grad(), fresh_rope_offsets(model):
        cache = batch.output(**batch.inputs, use_cache=True).past_key_values
    # An encoder-decoder also caches cross-attention, which is no part of a prefix.
    own = getattr(cache, "self_attention_cache", cache)
    return KeyValues(tuple((layer.keys, layer.values) for layer in own.layers))
