"""Every family of models as the one that compresses."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.compression.hyper_model import HyperModel, sentence_prompts
from tests.kv_prefix.tiny_models import ALL, DECODERS, ENCODER_DECODERS, PICTURE, Tiny, tiny

PROMPTS = ([10, PICTURE, 20, 21, 22, 23], [PICTURE, 30, 31])
TEXTS = ([10, 20, 21, 22, 23], [30, 31])
BEHIND = [50, 51, 52]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def hyper(name: str, layer: int = -1) -> HyperModel:
    return HyperModel(tiny(name).model, layer=layer)


def behind(name: str) -> Tensor:
    return hyper(name).embed(torch.tensor(BEHIND))


def prompted(name: str, inputs: dict[str, Tensor], prompts: Tensor | None = None) -> Tensor:
    states = hyper(name).read(inputs, behind(name) if prompts is None else prompts)
    assert states.prompted is not None
    return states.prompted


def own_output(model: Tiny, inputs: dict[str, Tensor], **more: Any) -> Any:
    """Of the model as it is, its positions and masks its own. BLIP's wrappers ask for pixels."""
    blip = model.model.main_input_name == "pixel_values"
    door = model.model.language_model if blip and "pixel_values" not in inputs else model.model
    output = door(**inputs, output_hidden_states=True, **more)
    return getattr(output, "language_model_outputs", output)


@pytest.mark.parametrize("rows", [PROMPTS, TEXTS], ids=["pictures", "texts"])
@pytest.mark.parametrize("name", DECODERS)
def test_prompts_behind_a_padded_batch_are_as_in_one_pass_over_text_and_prompts(
    name: str, rows: tuple[list[int], ...]
) -> None:
    model = tiny(name)
    ours = prompted(name, model.inputs(*rows))
    for place, row in enumerate(rows):
        inputs = model.inputs([*row, *BEHIND], first=place)
        whole = own_output(model, inputs).hidden_states[-1]
        assert_close(ours[place], whole[0, -len(BEHIND) :])


@pytest.mark.parametrize("rows", [PROMPTS, TEXTS], ids=["pictures", "texts"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_prompts_in_a_decoder_are_as_in_a_pass_of_the_whole_model(
    name: str, rows: tuple[list[int], ...]
) -> None:
    model = tiny(name)
    ours = prompted(name, model.inputs(*rows))
    for place, row in enumerate(rows):
        whole = own_output(
            model, model.inputs(row, first=place), decoder_inputs_embeds=behind(name)[None]
        )
        assert_close(ours[place], whole.decoder_hidden_states[-1][0])


@pytest.mark.parametrize("layer", [-1, 1, 0])
@pytest.mark.parametrize("name", ALL)
def test_the_states_of_a_text_are_those_of_the_layer_that_was_named(name: str, layer: int) -> None:
    model = tiny(name)
    states = hyper(name, layer).read(model.inputs(*PROMPTS))
    start = {"decoder_input_ids": torch.tensor([[0]])} if model.is_encoder_decoder else {}
    assert states.prompted is None
    for place, row in enumerate(PROMPTS):
        own = own_output(model, model.inputs(row, first=place), **start)
        kept = own.encoder_hidden_states if model.is_encoder_decoder else own.hidden_states
        ours = states.hidden[place][states.mask[place].bool()]
        assert_close(ours, kept[layer][0])


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("name", DECODERS)
def test_layers_behind_the_one_that_is_read_are_not_run(name: str, layer: int) -> None:
    model, ran = tiny(name), list[int]()
    layers = model.model.get_decoder().get_decoder().layers
    hooks = [
        one.register_forward_hook(lambda *_, place=place: ran.append(place))
        for place, one in enumerate(layers)
    ]
    hidden = hyper(name, layer).read(model.inputs(*PROMPTS)).hidden
    for hook in hooks:
        hook.remove()
    assert ran == list(range(len(layers)))[: None if layer == -1 else layer]
    # Nothing stays behind: the next pass goes through all layers.
    whole = own_output(model, model.inputs(*PROMPTS)).hidden_states
    real = model.inputs(*PROMPTS)["attention_mask"].bool()
    assert len(whole) == len(layers) + 1
    assert_close(hidden[real], whole[layer][real])


@pytest.mark.parametrize("name", ALL)
def test_prompts_depend_on_each_other_the_picture_and_the_text(name: str) -> None:
    model = tiny(name)
    inputs, prompts = model.inputs(PROMPTS[0]), behind(name)
    told = torch.where(inputs["input_ids"] == 20, 77, inputs["input_ids"])
    drawn = inputs["pixel_values"] + 1.0
    first = prompted(name, inputs)[:, -1]
    others = [
        prompted(name, inputs | {"input_ids": told}),
        prompted(name, inputs | {"pixel_values": drawn}),
        prompted(name, inputs, torch.cat([prompts[1:2], prompts[1:]])),
    ]
    assert all((first - one[:, -1]).abs().max() > 1e-3 for one in others)


@pytest.mark.parametrize("name", ALL)
def test_gradients_reach_the_prompts_and_nothing_else(name: str) -> None:
    prompts = behind(name).requires_grad_()
    states = hyper(name).read(tiny(name).inputs(*PROMPTS), prompts)
    assert states.prompted is not None and not states.hidden.requires_grad
    torch.autograd.backward(states.prompted.square().sum())
    assert prompts.grad is not None
    assert (prompts.grad.abs().amax(dim=1) > 0).all()
    assert all(weights.grad is None for weights in tiny(name).model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_no_logits_are_made_and_a_cache_only_for_prompts(name: str) -> None:
    model = tiny(name).model
    logits, caches = [], []
    hooks = [
        model.get_output_embeddings().register_forward_hook(
            lambda part, given, made: logits.append(made.numel())
        ),
        model.get_decoder()
        .get_decoder()
        .register_forward_hook(lambda part, given, made: caches.append(made.past_key_values)),
    ]
    try:
        hyper(name).read(tiny(name).inputs(*PROMPTS))
        assert not any(caches)
        prompted(name, tiny(name).inputs(*PROMPTS))
    finally:
        for hook in hooks:
            hook.remove()
    assert not any(logits)
    assert caches


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_the_offsets_of_another_call_move_no_prompt(name: str) -> None:
    model = tiny(name)
    for rows in (PROMPTS, TEXTS):
        found = []
        for stale in (None, torch.tensor([[50], [60]])):
            model.model.model.rope_deltas = stale
            found.append(prompted(name, model.inputs(*rows)))
            assert model.model.model.rope_deltas is stale
        assert (found[0] == found[1]).all()
    model.model.model.rope_deltas = None


@pytest.mark.parametrize("name", ["llava", "instructblip_t5", "instructblip_opt"])
def test_prompts_stay_in_full_precision_beside_a_half_precision_model(name: str) -> None:
    model = deepcopy(tiny(name).model).to(torch.bfloat16)
    prompts = sentence_prompts(HyperModel(model), torch.tensor([20, 21, 22]), 4).requires_grad_()
    inputs = tiny(name).inputs(*PROMPTS)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    states = HyperModel(model).read(inputs, prompts)
    assert states.prompted is not None
    torch.autograd.backward(states.prompted.float().square().sum())
    assert prompts.grad is not None
    assert (states.prompted.dtype, prompts.grad.dtype) == (torch.bfloat16, torch.float32)
    whole = prompted(name, tiny(name).inputs(*PROMPTS), prompts)
    assert torch.cosine_similarity(states.prompted.float().flatten(), whole.flatten(), 0) > 0.99


@pytest.mark.parametrize("name", [next(iter(DECODERS))])
def test_layers_are_counted_from_the_embeddings_or_from_the_end(name: str) -> None:
    depth = hyper(name).depth
    layers = range(-depth - 2, depth + 2)
    assert [layer for layer in layers if hyper(name, layer).has_layer] == [*layers][1:-1]
