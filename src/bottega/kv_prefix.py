"""Keys and values in front of a frozen vision-language model. Needs torch."""

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

hf: Any = transformers  # half annotated


@dataclass(frozen=True)
class Geometry:
    """A decoder's self-attention: one token of a prefix is 2 x layers x kv_heads x head_dim
    numbers."""

    layers: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: nn.Module) -> Geometry:
        """That of a transformers model. Raises `SettingError` if the model's cache holds anything
        but the keys and values of every token, all of one size: there is no place for a prefix."""
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
    """A prefix: keys and values a layer, each (batch, kv_heads, length, head_dim).

    The modulation Theta of RACC's section "Modulating the baseMLLM with aggregated prompts"
    (P-Tuning v2). Keys are as the cache has them, after RoPE: a learned prefix needs no rotation,
    and one that was read stands at the positions 0 to length - 1 for good.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]

    def __post_init__(self) -> None:
        shapes = {tuple(part.shape) for pair in self.layers for part in pair}
        if len(shapes) != 1 or len(next(iter(shapes))) != 4:
            raise SettingError(
                f"keys and values of the shapes {sorted(shapes)} are no prefix",
                hint="give each layer's as (batch, kv_heads, length, head_dim), all alike",
            )

    @classmethod
    def none(cls, geometry: Geometry, batch: int) -> KeyValues:
        """Of length 0: behind it a model is as it is."""
        nothing = torch.zeros(batch, geometry.kv_heads, 0, geometry.head_dim)
        return cls(((nothing, nothing),) * geometry.layers)

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
        """Each row `times` times, one after the other, as beams and samples lie in a batch."""
        return KeyValues(
            tuple(
                (k.repeat_interleave(times, dim=0), v.repeat_interleave(times, dim=0))
                for k, v in self.layers
            )
        )

    def cache(self) -> Any:
        """A new `transformers.DynamicCache` at every call, as a model writes into the one it
        gets. Gradients flow through it."""
        cache = hf.DynamicCache()
        for index, (keys, values) in enumerate(self.layers):
            cache.update(keys, values, index)
        return cache


def decoder_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def _refuse_other_caches(model: Any, config: Any) -> None:
    try:
        kinds = {type(layer) for layer in hf.DynamicCache(config=config).layers}
    except (KeyError, AttributeError):  # a kind of layer that the library has no cache for
        kinds = set()
    latent = getattr(config, "kv_lora_rank", None) is not None
    recurrent = any(getattr(part, "_is_stateful", False) for part in model.modules())
    if kinds == {DynamicLayer} and not latent and not recurrent:
        return
    raise SettingError(
        f"{type(model).__name__} over {config.model_type} keeps more than plain keys and values "
        "of every token",
        hint="use a model without sliding windows, recurrent or convolutional layers, shared or "
        "latent keys",
    )


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


FIXED = (
    "generation_config",
    "past_key_values",
    "max_length",
    "return_dict_in_generate",
    "decoder_start_token_id",
)


@dataclass(frozen=True, eq=False)
class Scores:
    """`logits` are (batch, length, vocabulary) for the prompt's tokens, or for the answer's in an
    encoder-decoder; `loss` is the mean over the labels that count."""

    logits: Tensor
    loss: Tensor | None


def forward(
    model: nn.Module,
    prefix: KeyValues,
    inputs: Mapping[str, Tensor],
    labels: Tensor | None = None,
) -> Scores:
    """One pass that carries gradients to the prefix.

    `inputs` are a processor's, padded on either side; their mask is (batch, length), without the
    prefix. `labels` are (batch, length), beside the ids, or the answers (batch, answer) of an
    encoder-decoder, -100 where nothing is to be learned. The prefix is cast to the model's dtype.
    Raises `SettingError`.
    """
    batch = Batch(model, inputs)
    output = batch.door(
        **batch.behind(prefix.length),
        past_key_values=batch.cache(batch.fitted(prefix)),
        labels=labels,
        use_cache=True,
    )
    return Scores(output.logits, output.loss)


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
    """The new tokens alone, (batch x num_return_sequences, at most max_new_tokens).

    `inputs` as in `forward`, padded on the left. `settings` are those of transformers' `generate`;
    what the model's own generation config says holds where they are silent. Logits processors and
    stopping criteria see `prefix.length` dummy tokens in front of the prompt. Raises
    `SettingError`.
    """
    if wrong := [name for name in FIXED if name in settings]:
        raise SettingError(
            f"generate behind a prefix takes no {', '.join(wrong)}",
            hint="give the settings one by one, the length as max_new_tokens",
        )
    batch = Batch(model, inputs)
    if not (batch.is_encoder_decoder or bool(batch.mask[:, -1].all())):
        raise SettingError(
            "the prompts are padded on the right: the answer would follow the padding",
            hint='set the tokenizer\'s padding_side to "left"',
        )
    rows = batch.fitted(prefix).repeat(max(num_beams, num_return_sequences))
    arguments = batch.with_dummies(prefix.length)
    with own_offsets(model):
        tokens: Tensor = batch.door.generate(
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
    """The keys and values of a real text, (batch, kv_heads, length, head_dim), at the positions
    from 0, without gradients: a start for a learned prefix, or a text read ahead.

    Every row fills its length, as a prefix has no mask. In an encoder-decoder they are the
    decoder's own, of `decoder_input_ids`. Behind pictures, which take fewer positions than tokens
    in Qwen's models, a prompt of theirs stands later than in the real text. Raises `SettingError`.
    """
    batch = Batch(model, inputs)
    if not (batch.is_encoder_decoder or bool(batch.mask.all())):
        raise SettingError(
            "the texts are padded, and a prefix has no mask",
            hint="read texts of one length together, or each alone",
        )
    with torch.no_grad(), own_offsets(model):
        cache = batch.output(**batch.inputs, use_cache=True).past_key_values
    own = getattr(cache, "self_attention_cache", cache)
    return KeyValues(tuple((layer.keys, layer.values) for layer in own.layers))
