from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from bottega.kv_prefix import forward, read
from tests.kv_prefix.tiny_models import (
    ALL,
    BEFORE,
    DECODERS,
    ENCODER_DECODERS,
    IMAGE,
    PAD,
    PROMPTS,
    Tiny,
    random_prefix,
    tiny,
)

ANSWER = torch.tensor([[60, 61, 62], [63, 64, -100]])


def labels_for(model: Tiny, inputs: dict[str, Tensor]) -> Tensor:
    """An encoder-decoder's answers, or the last two tokens of each prompt."""
    if model.is_encoder_decoder:
        return ANSWER
    labels = inputs["input_ids"].clone()
    labels[:, :-2] = -100
    return labels


def real_logits(model: Tiny, prompt: Sequence[int], first: int) -> Tensor:
    """Return the logits (length, vocabulary) of the prompt after the text BEFORE."""
    logits: Tensor = model.model(**model.inputs([*BEFORE, *prompt], first=first)).logits
    return logits[0, len(BEFORE) :]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_read_prefix_scores_like_its_text(name: str, side: str) -> None:
    model = tiny(name)
    inputs = model.inputs(*PROMPTS, side=side)
    prefix = read(model.model, model.inputs(BEFORE)).repeat(2)
    scores = forward(model.model, prefix, inputs)
    assert scores.loss is None
    for row, prompt in enumerate(PROMPTS):
        ours = scores.logits[row][inputs["attention_mask"][row].bool()]
        torch.testing.assert_close(ours, real_logits(model, prompt, row), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_decoder_prefix_scores_like_its_text(name: str) -> None:
    model = tiny(name)
    inputs = model.inputs(*PROMPTS)
    text = torch.tensor([[PAD, 50, 51, 52, 53, 54], [PAD, 55, 56, 57, 58, 59]])
    real = model.model(**inputs, decoder_input_ids=text).logits
    prefix = read(model.model, {**inputs, "decoder_input_ids": text[:, :4]})
    scores = forward(model.model, prefix, {**inputs, "decoder_input_ids": text[:, 4:]})
    torch.testing.assert_close(scores.logits, real[:, 4:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_scores_depend_on_prefix_image_and_prompt(name: str) -> None:
    """A prefix in the cross-attention's cache would take the place of the prompt."""
    model = tiny(name)
    inputs = model.inputs(PROMPTS[0])
    if model.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[PAD]])
    prefix, other = (random_prefix(model.model, 1, seed=seed) for seed in (0, 1))
    image = {**inputs, "pixel_values": inputs["pixel_values"] + 1.0}
    prompt = {
        **inputs,
        "input_ids": torch.where(inputs["input_ids"] == 20, 77, inputs["input_ids"]),
    }
    pairs = [(prefix, inputs), (other, inputs), (prefix, image), (prefix, prompt)]
    first, *others = [forward(model.model, kv, shown).logits for kv, shown in pairs]
    assert all((first - one).abs().max() > 1e-3 for one in others)


@pytest.mark.parametrize("name", ALL)
def test_gradients_of_the_loss_reach_every_layer_of_the_prefix(name: str) -> None:
    model = tiny(name)
    inputs = model.inputs(*PROMPTS)
    prefix = random_prefix(model.model, 2)
    loss = forward(model.model, prefix, inputs, labels_for(model, inputs)).loss
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    for part in [part for layer in prefix.layers for part in layer]:
        assert part.grad is not None
        assert (part.grad.abs().amax(dim=(1, 3)) > 0).all()  # each row's every token
    assert all(weights.grad is None for weights in model.model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_loss_is_the_mean_over_the_labels(name: str) -> None:
    model = tiny(name)
    inputs = model.inputs(*PROMPTS)
    labels = labels_for(model, inputs)
    scores = forward(model.model, random_prefix(model.model, 2), inputs, labels)
    guesses = scores.logits.log_softmax(-1)
    if not model.is_encoder_decoder:  # a token's logits are for the next one
        guesses, labels = guesses[:, :-1], labels[:, 1:]
    real = labels != -100
    by_hand = -guesses[real].gather(-1, labels[real][:, None]).mean()
    torch.testing.assert_close(scores.loss, by_hand)


def test_text_without_an_image_goes_to_the_language_model() -> None:
    """BLIP's wrappers ask for pixels."""
    model = tiny("instructblip_llama")
    prefix = read(model.model, model.inputs(BEFORE))
    whole = model.model.language_model(**model.inputs([*BEFORE, 20, 21])).logits
    scores = forward(model.model, prefix, model.inputs([20, 21]))
    torch.testing.assert_close(scores.logits, whole[:, len(BEFORE) :], atol=1e-4, rtol=1e-4)


def test_prefix_may_contain_an_image() -> None:
    model = tiny("llava")
    prefix = read(model.model, model.inputs([1, IMAGE, 40]))
    whole = model.model(**model.inputs([1, IMAGE, 40, IMAGE, 20])).logits
    scores = forward(model.model, prefix, model.inputs([IMAGE, 20], first=1))
    torch.testing.assert_close(scores.logits, whole[:, prefix.length :], atol=1e-4, rtol=1e-4)
