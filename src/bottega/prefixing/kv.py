"""Keys and values that stand in front of a prompt, and the shape that a model asks of them."""

from __future__ import annotations

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
