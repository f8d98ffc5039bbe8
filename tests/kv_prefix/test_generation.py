from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.kv_prefix import Geometry, KeyValues, forward, generate, read
from tests.kv_prefix.tiny_models import (
    ALL,
    BEFORE,
    DECODERS,
    ENCODER_DECODERS,
    PAD,
    PROMPTS,
    TEXT_ONLY,
    Tiny,
    hf,
    random_prefix,
    tiny,
)

NEW = 4


class Recorder:
    """The logits that `generate` chooses its tokens by."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def __call__(self, _: Tensor, logits: Tensor) -> Tensor:
        self.steps.append(logits.clone())
        return logits


def recorded(model: Tiny, prefix: KeyValues, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    recorder = Recorder()
    processors = hf.LogitsProcessorList([recorder])
    tokens = generate(
        model.model,
        prefix,
        inputs,
        max_new_tokens=NEW,
        logits_processor=processors,
        **TEXT_ONLY,
    )
    return tokens, torch.stack(recorder.steps, dim=1)


def stepwise(model: Tiny, prefix: KeyValues, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Greedy tokens and their logits with one whole `forward` a token and no cache between."""
    inputs, steps, new_tokens = dict(inputs), [], []
    grown = "decoder_input_ids" if model.is_encoder_decoder else "input_ids"
    if model.is_encoder_decoder:
        inputs[grown] = torch.full((prefix.batch, 1), PAD)
    for _ in range(NEW):
        logits = forward(model.model, prefix, inputs).logits[:, -1]
        logits[:, TEXT_ONLY["suppress_tokens"]] = -torch.inf
        steps.append(logits)
        new_tokens.append(logits.argmax(-1, keepdim=True))
        inputs[grown] = torch.cat([inputs[grown], new_tokens[-1]], dim=1)
        if not model.is_encoder_decoder:
            for name in {"attention_mask", "mm_token_type_ids"} & inputs.keys():
                value = int(name == "attention_mask")
                inputs[name] = torch.nn.functional.pad(inputs[name], (0, 1), value=value)
    return torch.cat(new_tokens, dim=1), torch.stack(steps, dim=1)


def real_tokens(model: Tiny, prompt: Sequence[int], first: int, **settings: Any) -> Tensor:
    """Return the model's answer to the text BEFORE followed by the prompt."""
    inputs = model.inputs([*BEFORE, *prompt], first=first)
    tokens: Tensor = model.model.generate(**inputs, max_new_tokens=NEW, **TEXT_ONLY, **settings)
    return tokens[:, -NEW:]


@pytest.mark.parametrize("name", ALL)
def test_padded_batch_equals_single_steps(name: str) -> None:
    model = tiny(name)
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    tokens, logits = recorded(model, prefix, inputs)
    expected_tokens, expected_logits = stepwise(model, prefix, inputs)
    assert tokens.tolist() == expected_tokens.tolist()
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)
    assert len(set(map(str, tokens.tolist()))) == 2  # the rows are unlike, or padding could hide


@pytest.mark.parametrize("name", ALL)
def test_empty_prefix_changes_no_answer(name: str) -> None:
    model = tiny(name)
    inputs, nothing = model.inputs(*PROMPTS), KeyValues.none(Geometry.of(model.model), 2)
    ours = generate(model.model, nothing, inputs, max_new_tokens=NEW, **TEXT_ONLY)
    start = {"decoder_start_token_id": PAD} if model.is_encoder_decoder else {}
    real = model.model.generate(**inputs, max_new_tokens=NEW, **TEXT_ONLY, **start)
    assert ours.tolist() == real[:, -NEW:].tolist()


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", DECODERS)
def test_read_prefix_answers_like_its_text(name: str, settings: dict[str, Any]) -> None:
    model = tiny(name)
    prefix = read(model.model, model.inputs(BEFORE)).repeat(2)
    inputs = model.inputs(*PROMPTS)
    ours = generate(model.model, prefix, inputs, max_new_tokens=NEW, **TEXT_ONLY, **settings)
    real = [real_tokens(model, prompt, row, **settings) for row, prompt in enumerate(PROMPTS)]
    assert ours.tolist() == torch.cat(real).tolist()


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_decoder_prefix_answers_like_its_text(name: str, settings: dict[str, Any]) -> None:
    model = tiny(name)
    inputs = model.inputs(*PROMPTS)
    text = torch.tensor([[PAD, 50, 51, 52], [PAD, 55, 56, 57]])
    prefix = read(model.model, {**inputs, "decoder_input_ids": text})
    ours = generate(model.model, prefix, inputs, max_new_tokens=NEW, **TEXT_ONLY, **settings)
    begun = torch.cat([text, torch.full((2, 1), PAD)], dim=1)
    more = {
        "decoder_input_ids": begun,
        "decoder_start_token_id": PAD,
        **TEXT_ONLY,
        **settings,
    }
    real = model.model.generate(**inputs, max_new_tokens=NEW, **more)
    assert ours.tolist() == real[:, begun.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["qwen2_vl", "instructblip_opt", "instructblip_t5"])
def test_several_answers_per_prompt_share_its_prefix(name: str) -> None:
    model = tiny(name)
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    three = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": NEW, **TEXT_ONLY}
    both = generate(model.model, prefix, inputs, **three)
    assert both.shape == (4, NEW)
    best = generate(model.model, prefix, inputs, **{**three, "num_return_sequences": 1})
    assert both[::2].tolist() == best.tolist()
    sampled = generate(
        model.model,
        prefix,
        inputs,
        do_sample=True,
        **{**three, "num_beams": 1, "num_return_sequences": 5},
    )
    assert sampled.shape == (10, NEW)
    assert len(set(map(str, sampled.tolist()))) > 2


def test_answer_ends_at_its_end_token() -> None:
    model = tiny("smolvlm")
    prefix, inputs = random_prefix(model.model, 2), model.inputs(*PROMPTS)
    whole = generate(model.model, prefix, inputs, max_new_tokens=NEW, **TEXT_ONLY)
    end = int(whole[0, 0])
    assert end not in whole[1]
    cut = generate(model.model, prefix, inputs, max_new_tokens=NEW, eos_token_id=end, **TEXT_ONLY)
    assert cut.tolist() == [[end, *[PAD] * (NEW - 1)], whole[1].tolist()]
