"""What goes wrong without an error when keys and values are put in front of a model by hand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.errors import SettingError
from bottega.kv_prefix import KeyValues, ModelInputs, forward, generate, read
from tests.kv_prefix.tiny_models import (
    ALL,
    DECODERS,
    ENCODER_DECODERS,
    IMAGE,
    PAD,
    PROMPTS,
    TEXT_ONLY,
    Tiny,
    random_prefix,
    tiny,
)

QWENS = ["qwen2_vl", "qwen2_5_vl"]
WITHOUT: dict[str, Any] = {"max_new_tokens": 4, **TEXT_ONLY}


def scored(model: Tiny, prefix: KeyValues, inputs: dict[str, Tensor]) -> Tensor:
    labels = torch.tensor([[60, 61], [62, 63]]) if model.is_encoder_decoder else None
    return forward(model.model, prefix, inputs, labels).logits


@pytest.mark.parametrize("name", DECODERS)
def test_mask_that_counts_the_prefix_is_an_error(name: str) -> None:
    """By hand, a mask of the prompt's length covers the prefix instead of the prompt, and ids
    of the prompt's length beside the longer mask lose their first tokens in `generate`. The mask
    that is given here can only be the prompt's."""
    model = tiny(name)
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    mask = torch.cat([torch.ones(2, prefix.length), inputs["attention_mask"]], dim=1).long()
    for longer in ({"attention_mask": mask}, {"input_ids": mask}):
        with pytest.raises(SettingError, match="the mask must have") as caught:
            forward(model.model, prefix, inputs | longer)
        assert "added here" in caught.value.hint
        with pytest.raises(SettingError, match="the mask must have"):
            generate(model.model, prefix, inputs | longer, **WITHOUT)


@pytest.mark.parametrize("name", ["instructblip_opt", "instructblip_llama", "blip2_opt"])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_generate_reads_the_prompt_from_its_first_token(name: str, position: int) -> None:
    """BLIP's wrappers cut as many of the prompt's embeddings as the cache holds tokens."""
    model = tiny(name)
    prefix = random_prefix(model.model, 1, length=4)
    prompt = [10, 11, 12, 13, IMAGE, 20]
    other = [77 if index == position else token for index, token in enumerate(prompt)]
    logits = [first_logits(model, prefix, model.inputs(ids)) for ids in (prompt, other)]
    assert (logits[0] - logits[1]).abs().max() > 1e-4


def first_logits(model: Tiny, prefix: KeyValues, inputs: dict[str, Tensor]) -> Tensor:
    seen: list[Tensor] = []

    def keep(_: Tensor, logits: Tensor) -> Tensor:
        seen.append(logits.clone())
        return logits

    generate(model.model, prefix, inputs, max_new_tokens=1, logits_processor=[keep])
    return seen[0]


@pytest.mark.parametrize("name", ALL)
def test_prefix_can_be_used_repeatedly(name: str) -> None:
    """A cache would have grown by each prompt and each answer."""
    model = tiny(name)
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    before = [part.detach().clone() for layer in prefix.layers for part in layer]
    scores, answer = scored(model, prefix, inputs), generate(model.model, prefix, inputs, **WITHOUT)
    assert (scored(model, prefix, inputs) == scores).all()
    assert (generate(model.model, prefix, inputs, **WITHOUT) == answer).all()
    after = [part for layer in prefix.layers for part in layer]
    assert all((old == new).all() for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_prefix_leaves_cross_attention_to_the_encoder(name: str) -> None:
    """A non-empty cross-attention cache would replace the prompt."""
    model = tiny(name)
    cache = ModelInputs(model.model, model.inputs(PROMPTS[0])).cache(random_prefix(model.model, 1))
    assert cache.self_attention_cache.get_seq_length() == 4
    assert cache.cross_attention_cache.get_seq_length() == 0


@pytest.mark.parametrize("name", QWENS)
def test_offsets_of_another_call_do_not_shift_the_prompt(name: str) -> None:
    model = tiny(name)
    prefix = random_prefix(model.model, 2)
    prompts = (model.inputs(*PROMPTS), model.inputs([10, 20, 21, 22], [30, 31]))
    for inputs in prompts:
        found = []
        for stale in (None, torch.tensor([[50], [60]])):
            model.model.model.rope_deltas = stale
            found.append(
                [
                    scored(model, prefix, inputs),
                    generate(model.model, prefix, inputs, **WITHOUT),
                    read(model.model, model.inputs([1, 40, 41])).layers[0][0],
                ]
            )
            assert model.model.model.rope_deltas is stale  # another's call may still go on
        assert all((old == new).all() for old, new in zip(*found, strict=True))
    model.model.model.rope_deltas = None


@pytest.mark.parametrize("name", QWENS)
def test_images_need_token_types(name: str) -> None:
    model = tiny(name)
    inputs = model.inputs(*PROMPTS)
    del inputs["mm_token_type_ids"]
    with pytest.raises(SettingError, match="must contain mm_token_type_ids") as caught:
        forward(model.model, random_prefix(model.model, 2), inputs)
    assert "return_mm_token_type_ids" in caught.value.hint


@pytest.mark.parametrize(
    "name",
    ["inputs_embeds", "past_key_values", "position_ids", "decoder_attention_mask", "labels"],
)
def test_inputs_that_could_contradict_the_prefix_are_an_error(name: str) -> None:
    """For example, embeddings without ids leave Qwen's images without positions."""
    model = tiny("qwen2_vl")
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    for call in (forward, generate):
        with pytest.raises(SettingError, match=f"must not contain {name}"):
            call(model.model, prefix, inputs | {name: torch.zeros(2, 1)}, **settings(call))
    with pytest.raises(SettingError, match=f"must not contain {name}"):
        read(model.model, model.inputs([1, 40]) | {name: torch.zeros(1, 1)})


def settings(call: object) -> dict[str, Any]:
    return WITHOUT if call is generate else {}


@pytest.mark.parametrize("missing", ["input_ids", "attention_mask"])
def test_inputs_without_ids_or_mask_are_an_error(missing: str) -> None:
    model = tiny("llava")
    inputs = model.inputs(*PROMPTS)
    del inputs[missing]
    with pytest.raises(SettingError, match=f"must contain {missing}"):
        forward(model.model, random_prefix(model.model, 2), inputs)


@pytest.mark.parametrize("name", ["llava", "instructblip_t5"])
def test_gradient_checkpointing_is_an_error(name: str) -> None:
    """A model in training would drop its cache, prefix and all, with a warning in the log."""
    model = tiny(name)
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    model.model.activation_checkpointing_enable()
    try:
        with pytest.raises(SettingError, match="gradient checkpointing") as caught:
            scored(model, prefix, inputs)
        assert "disable it" in caught.value.hint
    finally:
        model.model.activation_checkpointing_disable()
    scored(model, prefix, inputs)


@pytest.mark.parametrize("name", ["llava", "instructblip_t5", "qwen2_vl"])
def test_prefix_is_cast_to_the_models_dtype(name: str) -> None:
    whole = tiny(name)
    half = Tiny(deepcopy(whole.model).to(torch.bfloat16), whole.tokens, whole.show, whole.size)
    prefix = random_prefix(half.model, 2)
    inputs = half.inputs(*PROMPTS)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    logits = scored(half, prefix, inputs)
    assert logits.dtype == torch.bfloat16
    assert (logits == scored(half, prefix.to(dtype=torch.bfloat16), inputs)).all()
    logits.float().square().mean().backward()  # type: ignore[no-untyped-call]
    for part in [part for layer in prefix.layers for part in layer]:
        assert part.grad is not None
        assert part.grad.dtype == torch.float32
    assert generate(half.model, prefix, inputs, **WITHOUT).shape == (2, 4)


def test_prefix_of_another_model_is_an_error() -> None:
    """With a layer too few, the last one would see no prefix."""
    model = tiny("llava")
    prefix = random_prefix(model.model, 2)
    with pytest.raises(SettingError, match="a prefix for this model must have") as caught:
        forward(model.model, KeyValues(prefix.layers[:-1]), model.inputs(*PROMPTS))
    assert "Geometry.of(model)" in caught.value.hint
    with pytest.raises(SettingError, match="2 prompts need as many prefixes, got 3"):
        forward(model.model, random_prefix(model.model, 3), model.inputs(*PROMPTS))


def test_padding_on_the_wrong_side_is_an_error() -> None:
    model = tiny("llava")
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS, side="right")
    with pytest.raises(SettingError, match="padding on the right") as caught:
        generate(model.model, prefix, inputs, **WITHOUT)
    assert "padding_side" in caught.value.hint


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_text_is_an_error(side: str) -> None:
    model = tiny("llava")
    with pytest.raises(SettingError, match="must not be padded"):
        read(model.model, model.inputs([1, 40, 41], [1, 42], side=side))


@pytest.mark.parametrize("setting", ["generation_config", "max_length", "past_key_values"])
def test_settings_that_would_undo_the_prefix_are_an_error(setting: str) -> None:
    """A `generation_config` may hold beams, which the prefix has to be repeated for."""
    model = tiny("llava")
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    with pytest.raises(SettingError, match=f"does not accept {setting}"):
        generate(model.model, prefix, inputs, **{**WITHOUT, setting: None})


def test_encoder_decoder_without_a_start_is_an_error() -> None:
    model = tiny("blip2_t5")
    config = model.model.config.text_config
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    config.decoder_start_token_id = None
    try:
        with pytest.raises(SettingError, match="no decoder_start_token_id"):
            generate(model.model, prefix, inputs, **WITHOUT)
    finally:
        config.decoder_start_token_id = PAD
