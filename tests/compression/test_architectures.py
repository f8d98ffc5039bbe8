"""Training steps for every family of models and for mixed pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.compression.hyper_model import HyperModel, InputBuilder, sentence_prompts
from bottega.compression.model import CompressorConfig, RaccModel
from bottega.compression.objective import TrainingConfig, TrainingExample, TrainingObjective
from bottega.compression.persistence import load, save
from bottega.compression.training import TrainingProgress, train
from bottega.errors import LoadError, SettingError
from bottega.image import Image
from bottega.kv_prefix import Geometry
from bottega.types import Query
from tests.builders import solid_image
from tests.compression.tiny_models import passage, word, word_encoder
from tests.kv_prefix.tiny_models import ALL, END, PAD, hf, tiny

UNLIKE = [
    ("instructblip_t5", "instructblip_llama"),
    ("instructblip_t5", "llava"),
    ("blip2_t5", "blip2_opt"),
    ("qwen2_vl", "instructblip_t5"),
    ("fast_vlm", "qwen2_5_vl"),
    ("smolvlm", "fast_vlm"),
]
PAIRS = [
    *((name, name) for name in ALL),
    *(pytest.param(*pair, marks=pytest.mark.slow) for pair in UNLIKE[2:]),
    *UNLIKE[:2],
]
SENTENCE = torch.tensor([20, 21, 22])


def make_objective(hyper: str, base: str) -> TrainingObjective:
    one, other = tiny(hyper), tiny(base)
    texts = [InputBuilder(word_encoder(each), frozenset({END})) for each in (one, other)]
    return TrainingObjective(
        HyperModel(one.model), texts[0], other.model, texts[1], END, most_answer_tokens=4
    )


def racc(objective: TrainingObjective) -> RaccModel:
    hyper, base = objective.hyper, Geometry.of(objective.base)
    shape = CompressorConfig(
        hyper.width, base, document_prompts=4, query_prompts=3, prompting="both"
    )
    torch.manual_seed(0)
    return RaccModel(
        shape, (sentence_prompts(hyper, SENTENCE, 4), sentence_prompts(hyper, SENTENCE, 3))
    )


def training_examples(step: int = 0, *, shown: bool = True) -> Sequence[TrainingExample]:
    """Return two examples with images in the questions or, in odd steps, in the passages."""
    images: tuple[Image, ...] = (solid_image(1),) if shown else ()
    query, shown_there = ((), images) if step % 2 else (images, ())
    return [
        TrainingExample(
            Query(f"where is number {n}", query),
            tuple(passage(f"number {one} is {index}", *shown_there) for one in (n, 7)),
            (1.0, 0.3),
            (True, False),
            index,
        )
        for n, index in ((step, "red"), (step + 1, "light blue"))
    ]


def config_of(**changes: Any) -> TrainingConfig:
    return TrainingConfig(**{"steps": 2, "warmup_steps": 0, "learning_rate": 1e-2, **changes})


SCORES = torch.tensor([[1.0, 0.3], [1.0, 0.3]])


@pytest.mark.parametrize(("hyper", "base"), PAIRS)
def test_training_step_reaches_all_layers_and_prompts(hyper: str, base: str) -> None:
    objective = make_objective(hyper, base)
    made = racc(objective)
    objective.calibrate(made, [*training_examples(0), *training_examples(2)])
    torch.autograd.backward(objective.loss(made, training_examples(), config_of(), SCORES))
    parts = [one.weight for one in made.modulation.linear]
    for part in [*parts, made.documents.prompts, made.queries.prompts]:
        assert isinstance(part, torch.nn.Parameter) and part.grad is not None
        assert (part.grad.abs().amax(-1) > 0).any()
    frozen = [*objective.hyper.model.parameters(), *objective.base.parameters()]
    assert all(one.grad is None for one in frozen)

    before = {name: one.detach().clone() for name, one in made.named_parameters()}
    seen: list[TrainingProgress] = []
    train(made, objective, training_examples, config_of(), report=seen.append)
    assert len(seen) == 2 and all(0 < one.loss < 20 for one in seen)
    after = dict(made.named_parameters())
    assert all(bool(torch.isfinite(one).all()) for one in after.values())
    assert any(not torch.equal(after[name], one) for name, one in before.items())


@pytest.mark.parametrize("name", ["instructblip_t5", "blip2_t5"])
@pytest.mark.parametrize("shown", [True, False])
def test_encoder_decoder_learns_to_decode_after_the_prefix(name: str, shown: bool) -> None:
    objective, batch = make_objective(name, name), training_examples(shown=shown)
    made = racc(objective)
    loss = objective.loss(made, batch, config_of(), SCORES)

    prefix = made.modulation(objective.prompts(made, batch, SCORES))
    inputs = objective.base_inputs.questions([one.query for one in batch])
    red, light, blue = word("red"), word("light"), word("blue")
    whole = objective.base if shown else objective.base.language_model
    logits = whole(
        **inputs,
        decoder_input_ids=torch.tensor([[PAD, red, END], [PAD, light, blue]]),
        past_key_values=hf.EncoderDecoderCache(prefix.cache(), hf.DynamicCache()),
    ).logits.log_softmax(-1)
    expected = [logits[0, 0, red], logits[0, 1, END]]
    expected += [logits[1, 0, light], logits[1, 1, blue], logits[1, 2, END]]
    torch.testing.assert_close(loss, -torch.stack(expected).mean())


@pytest.mark.parametrize("name", ALL)
def test_distillation_works_for_every_base_model(name: str) -> None:
    objective = make_objective("llava", name)
    made = racc(objective)
    found = [
        objective.loss(made, training_examples(shown=False), config_of(distill=own), SCORES)
        for own in (True, False)
    ]
    assert torch.isfinite(torch.stack(found)).all()
    assert found[0] != found[1]


@pytest.mark.parametrize("name", ["instructblip_t5", "instructblip_opt"])
def test_cache_loss_needs_rotary_positions(name: str) -> None:
    objective = make_objective("llava", name)
    with pytest.raises(SettingError, match="needs rotary positions, got") as caught:
        objective.loss(racc(objective), training_examples(), config_of(cache_weight=1.0), SCORES)
    assert "cache_weight to 0" in caught.value.hint


@pytest.mark.parametrize("name", ["qwen2_vl", "instructblip_llama", "smolvlm"])
@pytest.mark.parametrize("shown", [True, False])
def test_base_prefix_positions_end_at_the_prefix(name: str, shown: bool) -> None:
    """First-layer keys depend only on tokens and positions: compare with the last tokens alone."""
    objective = make_objective(name, name)
    passages = [one.passages[0] for one in training_examples(int(shown), shown=shown)]
    keys = objective.base_prefix(racc(objective), passages).layers[0][0]
    last = objective.base_inputs.passages(passages)["input_ids"][:, -3:]
    base = objective.base if name != "instructblip_llama" else objective.base.language_model
    alone = base(input_ids=last, attention_mask=torch.ones_like(last), use_cache=True)
    torch.testing.assert_close(keys, alone.past_key_values.layers[0].keys, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_image_token_types_survive_edits(name: str) -> None:
    objective = make_objective(name, name)
    inputs = objective.inputs.passages([one.passages[0] for one in training_examples(1)])
    assert inputs["mm_token_type_ids"].sum() == 2 * tiny(name).tokens
    assert ((inputs["input_ids"] == 3) == inputs["mm_token_type_ids"].bool()).all()


@pytest.mark.parametrize(("hyper", "base"), UNLIKE)
def test_compressor_identifies_both_models(tmp_path: Path, hyper: str, base: str) -> None:
    objective = replace(make_objective(hyper, base), hyper=HyperModel(tiny(hyper).model, layer=1))
    save(racc(objective), tmp_path, hyper=objective.hyper, base=objective.base)
    saved = load(tmp_path)
    assert saved.open(objective.hyper.model, objective.base).layer == 1
    assert saved.racc.modulation.geometry == Geometry.of(objective.base)
    for pair in [(objective.base, objective.base), (objective.hyper.model, objective.hyper.model)]:
        with pytest.raises(LoadError, match="trained with another"):
            saved.open(*pair)
