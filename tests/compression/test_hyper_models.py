"""Hidden states from every family of hyper models."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.compression.hyper_model import (
    HyperModel,
    image_groups,
    map_by_images,
    sentence_prompts,
)
from bottega.errors import SettingError
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.kv_prefix.tiny_models import ALL, DECODERS, ENCODER_DECODERS, IMAGE, Tiny, tiny

PROMPTS = ([10, IMAGE, 20, 21, 22, 23], [IMAGE, 30, 31])
TEXTS = ([10, 20, 21, 22, 23], [30, 31])
SUFFIX = [50, 51, 52]


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def hyper(name: str, layer: int = -1) -> HyperModel:
    return HyperModel(tiny(name).model, layer=layer)


def after_prefix(name: str) -> Tensor:
    return hyper(name).embed(torch.tensor(SUFFIX))


def prompted(name: str, inputs: dict[str, Tensor], prompts: Tensor | None = None) -> Tensor:
    states = hyper(name).read(inputs, after_prefix(name) if prompts is None else prompts)
    assert states.prompted is not None
    return states.prompted


def own_output(model: Tiny, inputs: dict[str, Tensor], **more: Any) -> Any:
    """Return the output of the unchanged model. BLIP's wrappers need pixels."""
    blip = model.model.main_input_name == "pixel_values"
    target = model.model.language_model if blip and "pixel_values" not in inputs else model.model
    output = target(**inputs, output_hidden_states=True, **more)
    return getattr(output, "language_model_outputs", output)


@pytest.mark.parametrize("rows", [PROMPTS, TEXTS], ids=["images", "texts"])
@pytest.mark.parametrize("name", DECODERS)
def test_prompts_after_padded_batch_equal_one_pass(name: str, rows: tuple[list[int], ...]) -> None:
    model = tiny(name)
    ours = prompted(name, model.inputs(*rows))
    for index, row in enumerate(rows):
        inputs = model.inputs([*row, *SUFFIX], first=index)
        whole = own_output(model, inputs).hidden_states[-1]
        assert_close(ours[index], whole[0, -len(SUFFIX) :])


@pytest.mark.parametrize("rows", [PROMPTS, TEXTS], ids=["images", "texts"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_decoder_prompts_equal_a_full_pass(name: str, rows: tuple[list[int], ...]) -> None:
    model = tiny(name)
    ours = prompted(name, model.inputs(*rows))
    for index, row in enumerate(rows):
        whole = own_output(
            model, model.inputs(row, first=index), decoder_inputs_embeds=after_prefix(name)[None]
        )
        assert_close(ours[index], whole.decoder_hidden_states[-1][0])


@pytest.mark.parametrize("layer", [-1, 1, 0])
@pytest.mark.parametrize("name", ALL)
def test_states_come_from_the_given_layer(name: str, layer: int) -> None:
    model = tiny(name)
    states = hyper(name, layer).read(model.inputs(*PROMPTS))
    start = {"decoder_input_ids": torch.tensor([[0]])} if model.is_encoder_decoder else {}
    assert states.prompted is None
    for index, row in enumerate(PROMPTS):
        own = own_output(model, model.inputs(row, first=index), **start)
        expected = own.encoder_hidden_states if model.is_encoder_decoder else own.hidden_states
        ours = states.hidden[index][states.mask[index].bool()]
        assert_close(ours, expected[layer][0])


@pytest.mark.parametrize("layer", [0, 1, -1])
@pytest.mark.parametrize("name", DECODERS)
def test_layers_after_the_read_layer_are_not_run(name: str, layer: int) -> None:
    model, ran = tiny(name), list[int]()
    layers = model.model.get_decoder().get_decoder().layers
    hooks = [
        one.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, one in enumerate(layers)
    ]
    hidden = hyper(name, layer).read(model.inputs(*PROMPTS)).hidden
    for hook in hooks:
        hook.remove()
    assert ran == list(range(len(layers)))[: None if layer == -1 else layer]
    # The hook is removed: the next pass runs all layers.
    whole = own_output(model, model.inputs(*PROMPTS)).hidden_states
    real = model.inputs(*PROMPTS)["attention_mask"].bool()
    assert len(whole) == len(layers) + 1
    assert_close(hidden[real], whole[layer][real])


@pytest.mark.parametrize("name", ALL)
def test_prompts_depend_on_image_text_and_each_other(name: str) -> None:
    model = tiny(name)
    inputs, prompts = model.inputs(PROMPTS[0]), after_prefix(name)
    other_ids = torch.where(inputs["input_ids"] == 20, 77, inputs["input_ids"])
    other_pixels = inputs["pixel_values"] + 1.0
    first = prompted(name, inputs)[:, -1]
    others = [
        prompted(name, inputs | {"input_ids": other_ids}),
        prompted(name, inputs | {"pixel_values": other_pixels}),
        prompted(name, inputs, torch.cat([prompts[1:2], prompts[1:]])),
    ]
    assert all((first - one[:, -1]).abs().max() > 1e-3 for one in others)


@pytest.mark.parametrize("name", ALL)
def test_only_prompts_get_gradients(name: str) -> None:
    prompts = after_prefix(name).requires_grad_()
    states = hyper(name).read(tiny(name).inputs(*PROMPTS), prompts)
    assert states.prompted is not None and not states.hidden.requires_grad
    torch.autograd.backward(states.prompted.square().sum())
    assert prompts.grad is not None
    assert (prompts.grad.abs().amax(dim=1) > 0).all()
    assert all(weights.grad is None for weights in tiny(name).model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_no_logits_and_a_cache_only_for_prompts(name: str) -> None:
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
def test_offsets_of_another_call_do_not_move_prompts(name: str) -> None:
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
def test_prompts_of_a_half_precision_model_have_full_precision(name: str) -> None:
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
def test_layers_count_from_either_end(name: str) -> None:
    depth = hyper(name).depth
    layers = range(-depth - 2, depth + 2)
    assert [layer for layer in layers if hyper(name, layer).has_layer] == [*layers][1:-1]


BATCH_TEXTS = ([IMAGE, 20, 31], [IMAGE, 44, 52, 61, 70])


@pytest.mark.parametrize("layer", [-1, 1])
@pytest.mark.parametrize("with_images", [True, False])
@pytest.mark.parametrize("name", ["llava", "fast_vlm", "qwen2_vl"])
def test_joint_pass_without_gradients_equals_two_passes(
    name: str, with_images: bool, layer: int
) -> None:
    shown = tiny(name)
    hyper = HyperModel(shown.model, layer=layer)
    inputs = shown.inputs(*(text if with_images else text[1:] for text in BATCH_TEXTS))
    prompts = hyper.embed(torch.tensor([21, 22, 23]))

    apart = hyper.read(inputs, prompts)
    with torch.inference_mode(), Passes(shown.model) as passes:
        together = hyper.read(inputs, prompts)

    assert passes.count == 1
    assert apart.prompted is not None and together.prompted is not None
    torch.testing.assert_close(together.prompted, apart.prompted, atol=1e-4, rtol=1e-4)
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(together.hidden[real], apart.hidden[real], atol=1e-4, rtol=1e-4)


COMMON_PREFIXES = [[10, 20, 21, 30], [10, 20, 21, IMAGE, 30], [10, 20, IMAGE, 30], [10, IMAGE, 30]]


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("layer", [-1, 1])
@pytest.mark.parametrize("name", ["llava", "fast_vlm", "qwen2_vl", "qwen2_5_vl", "smolvlm"])
def test_packed_pass_equals_separate_passes(name: str, layer: int, prompted: bool) -> None:
    shown = tiny(name)
    # In double precision, because sharp attention amplifies rounding.
    model = HyperModel(deepcopy(shown.model).double(), layer=layer)
    inputs = [
        {key: one.double() if one.is_floating_point() else one for key, one in given.items()}
        for given in map(shown.inputs, COMMON_PREFIXES)
    ]
    prompts = model.embed(torch.tensor(SUFFIX)) if prompted else None

    with torch.inference_mode():
        separate = [model.read(one, prompts) for one in inputs]
        packed = model.read_packed(inputs, prompts)

    for ours, theirs in zip(packed, separate, strict=True):
        torch.testing.assert_close(ours.mask, theirs.mask)
        torch.testing.assert_close(ours.hidden, theirs.hidden, atol=1e-5, rtol=1e-5)
        assert (ours.prompted is None) == (theirs.prompted is None) == (not prompted)
        if ours.prompted is not None:
            torch.testing.assert_close(ours.prompted, theirs.prompted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llava", "fast_vlm"])
def test_common_prefixes_are_read_once(name: str) -> None:
    shown, lengths = tiny(name), list[int]()
    model = HyperModel(shown.model)
    inputs = [shown.inputs(row) for row in COMMON_PREFIXES]
    decoder = shown.model.get_decoder().get_decoder()
    hook = decoder.norm.register_forward_hook(lambda *given: lengths.append(given[1][0].shape[1]))
    with torch.inference_mode():
        model.read_packed(inputs, model.embed(torch.tensor(SUFFIX)))
    hook.remove()

    distinct = len([10, 20, 21, 30]) + 3 * len([IMAGE, 30]) + 3 * (shown.tokens - 1)
    assert lengths == [distinct + len(COMMON_PREFIXES) * len(SUFFIX)]


def test_packed_texts_have_one_row_and_no_padding() -> None:
    shown = tiny("llava")
    padded = {key: one[1:] for key, one in shown.inputs([10, 20, 30], [10, 20]).items()}
    for wrong in (padded, shown.inputs([10, 20], [10, 30])):
        with pytest.raises(SettingError, match="must have one row and no padding"):
            HyperModel(shown.model).read_packed([shown.inputs([10, 30]), wrong])


def test_models_with_text_dependent_images_do_not_support_packing() -> None:
    assert hyper("llava").supports_packing
    assert not hyper("instructblip_llama").supports_packing
    assert not hyper("blip2_t5").supports_packing


class Passes:
    """Counter of forward passes through a decoder."""

    def __init__(self, model: Any) -> None:
        self._decoder = model.model.language_model
        self.count = 0

    def __enter__(self) -> Passes:
        self._hook = self._decoder.register_forward_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _count(self, *_: object) -> None:
        self.count += 1


BARE = [Example(Query(str(i)), "") for i in range(3)]
SEEN = [Example(Query(str(i), (solid_image(i),)), "") for i in range(3, 6)]


def test_empty_groups_are_left_out() -> None:
    assert image_groups([False, True, False]) == [[1], [0, 2]]
    assert image_groups([True, True]) == [[0, 1]]
    assert image_groups([]) == []


def test_mixed_passages_keep_their_order() -> None:
    batches = list[set[bool]]()

    def read(part: Sequence[Example]) -> Tensor:
        batches.append({bool(one.query.images) for one in part})
        return torch.tensor([[float(one.query.text)] for one in part])

    for passages in (
        [*BARE, *SEEN],
        [SEEN[1], BARE[2], SEEN[0], BARE[0], BARE[1]],
        BARE,
        SEEN[:1],
    ):
        read_in_order = map_by_images(passages, read)
        assert read_in_order.flatten().tolist() == [float(one.query.text) for one in passages]
    assert batches == [{True}, {False}, {True}, {False}, {False}, {True}]
