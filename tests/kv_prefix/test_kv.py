from __future__ import annotations

from typing import Any

import pytest
import torch

from bottega.errors import SettingError
from bottega.kv_prefix import Geometry, KeyValues
from tests.kv_prefix.tiny_models import hf, llava_config, random_prefix, tiny

OTHER_CACHES: dict[str, dict[str, Any]] = {
    "a sliding window": {"model_type": "mistral", "sliding_window": 8},
    "convolutions": {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
    "recurrent layers": {"model_type": "recurrent_gemma"},
    "a recurrent state beside the cache": {"model_type": "rwkv"},
    "latent keys": {"model_type": "deepseek_v3", "first_k_dense_replace": 3, "kv_lora_rank": 8},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("instructblip_opt", Geometry(layers=3, kv_heads=4, head_dim=8)),
        ("instructblip_llama", Geometry(layers=3, kv_heads=2, head_dim=8)),
        ("blip2_t5", Geometry(layers=3, kv_heads=4, head_dim=6)),  # its encoder has 4 layers
        ("fast_vlm", Geometry(layers=2, kv_heads=1, head_dim=192)),  # not hidden_size / heads
    ],
)
def test_geometry_of_each_model(name: str, expected: Geometry) -> None:
    assert Geometry.of(tiny(name).model) == expected


@pytest.mark.parametrize("kind", OTHER_CACHES)
def test_cache_of_more_than_keys_and_values_is_an_error(kind: str) -> None:
    text = OTHER_CACHES[kind]
    with torch.device("meta"):
        model = hf.LlavaForConditionalGeneration(llava_config(**text))
    with pytest.raises(SettingError, match=f"over {text['model_type']} caches more") as caught:
        Geometry.of(model)
    assert "sliding windows" in caught.value.hint


def test_unused_window_is_accepted() -> None:
    with torch.device("meta"):
        config = llava_config(model_type="mistral", sliding_window=None)
        model = hf.LlavaForConditionalGeneration(config)
    assert Geometry.of(model) == Geometry(layers=3, kv_heads=4, head_dim=8)


@pytest.mark.parametrize(
    "shapes",
    [
        [],
        [((2, 4, 5, 8), (2, 4, 6, 8))],
        [((2, 4, 5, 8), (2, 4, 5, 8)), ((2, 4, 6, 8), (2, 4, 6, 8))],
        [((2, 5, 32), (2, 5, 32))],
    ],
)
def test_layers_of_different_shapes_are_an_error(shapes: list[tuple[tuple[int, ...], ...]]) -> None:
    with pytest.raises(SettingError, match="must have one 4-D shape"):
        KeyValues(tuple((torch.zeros(keys), torch.zeros(values)) for keys, values in shapes))


def test_rows_repeat_in_the_order_of_beams() -> None:
    prefix = random_prefix(tiny("llava").model, 2)
    repeated = prefix.repeat(3)
    assert (repeated.batch, repeated.length) == (6, prefix.length)
    for (keys, values), (k, v) in zip(repeated.layers, prefix.layers, strict=True):
        assert [bool((keys[i] == k[i // 3]).all()) for i in range(6)] == [True] * 6
        assert [bool((values[i] == v[i // 3]).all()) for i in range(6)] == [True] * 6


def test_casting_keeps_the_gradients() -> None:
    prefix = random_prefix(tiny("llava").model, 1)
    cast = prefix.repeat(2).to(dtype=torch.bfloat16)
    assert {part.dtype for layer in cast.layers for part in layer} == {torch.bfloat16}
    keys = prefix.layers[1][0]
    cast.layers[1][0].sum().backward()  # type: ignore[no-untyped-call]
    assert keys.grad is not None
    assert (keys.grad == 2).all()


def test_each_cache_is_new() -> None:
    prefix = random_prefix(tiny("llava").model, 1)
    cache = prefix.cache()
    more = torch.ones_like(prefix.layers[0][0])
    for layer in range(3):
        cache.update(more, more, layer)
    assert cache.get_seq_length() == 2 * prefix.length
    assert prefix.cache().get_seq_length() == prefix.length
    for (keys, values), layer in zip(prefix.layers, prefix.cache().layers, strict=True):
        assert (layer.keys == keys).all()
        assert (layer.values == values).all()
