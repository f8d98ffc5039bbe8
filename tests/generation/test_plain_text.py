"""BLIP-2 and InstructBLIP by folder: plain text after one image, equal in every batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from bottega.errors import GenerationError, ModelLoadError
from bottega.generation.loaded import LoadedModel
from bottega.generation.plain_text import plain_text
from bottega.kv_prefix import Geometry, KeyValues, generate
from bottega.types import Completion, Message, Prefix, Prompt, Sampling
from tests.builders import solid_image
from tests.generation import tiny_blip
from tests.generation.prompts import ask, user
from tests.generation.tiny_blip import QUERIES

KINDS = ("blip2_opt", "instructblip_t5", "instructblip_llama")
SHORT = Sampling(max_tokens=4)


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = getattr(tiny_blip, request.param)
    path: Path = build(tmp_path_factory.mktemp("blip") / request.param)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[LoadedModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield LoadedModel.load(str(folder), "cpu", "auto")
    torch.set_num_threads(before)


def shown(shade: int, text: str) -> Prompt:
    return Prompt((Message("user", (solid_image(shade), text)),))


def answers(
    model: LoadedModel,
    prompts: list[Prompt],
    prefix: Prefix | None = None,
    sampling: Sampling = SHORT,
) -> list[Completion]:
    rendered = [model.decode(model.render(one, sampling, prefix)) for one in prompts]
    return [completions[0] for completions, _ in model.answer(rendered)]


def test_passages_questions_and_answers_are_lines() -> None:
    assert plain_text([("user", "What?")]) == "Question: What? Short answer:"
    turns = [("system", "Be brief."), ("user", "A passage."), ("user", "What?")]
    assert plain_text(turns) == "Be brief.\nA passage.\nQuestion: What? Short answer:"
    turns = [("user", "Who?"), ("assistant", "Ann"), ("user", "What?"), ("assistant", "It")]
    assert plain_text(turns) == (
        "Question: Who? Short answer: Ann\nQuestion: What? Short answer: It"
    )
    assert plain_text([("user", "")]) == ""  # an image alone


def test_inputs_equal_those_of_the_published_processor(folder: Path, model: LoadedModel) -> None:
    published = transformers.AutoProcessor.from_pretrained(folder)
    image = solid_image(7)
    expected = published(
        images=image.decode_for_model(),
        text="Question: what is it? Short answer:",
        return_tensors="pt",
    )
    found = model.encode([shown(7, "what is it?")])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


def test_answers_do_not_depend_on_the_batch(model: LoadedModel) -> None:
    for prompts in (
        [shown(1, "what?"), shown(200, "a far longer question about it?"), shown(90, "")],
        [ask("what?"), ask("a far longer question about nothing at all?")],
    ):
        together = answers(model, prompts)
        alone = [answers(model, [one])[0] for one in prompts]
        assert [one.text for one in together] == [one.text for one in alone]
        for one, other in zip(together, alone, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert len({round(one.logprob or 0, 4) for one in together}) == len(prompts)


def test_image_changes_the_answer(model: LoadedModel) -> None:
    one, other = answers(model, [shown(1, "what?"), shown(200, "what?")])
    assert one.logprob != pytest.approx(other.logprob, abs=1e-3)


def test_samples_are_drawn_after_one_reading(model: LoadedModel) -> None:
    several = Sampling(max_tokens=4, n=3, temperature=1.0, seed=1)
    for prompt in (shown(1, "what?"), ask("what?")):
        rendered = model.decode(model.render(prompt, several))
        [(completions, usage)] = model.answer([rendered])
        assert (len(completions), usage.completion_tokens) == (3, 12)
        # A sample's log-probability is that of the model, whatever the temperature.
        greedy = Sampling(max_tokens=1, temperature=1.0, seed=1)
        assert completions[0].text.startswith(answers(model, [prompt], None, greedy)[0].text)


@pytest.mark.parametrize("prompt", [shown(1, "what?"), ask("what?")])
def test_prefix_precedes_the_prompt(model: LoadedModel, prompt: Prompt) -> None:
    shape = Geometry.of(model.model)
    torch.manual_seed(0)
    sizes = (1, shape.kv_heads, 3, shape.head_dim)
    layers = tuple((torch.randn(sizes), torch.randn(sizes)) for _ in range(shape.layers))
    prefix = Prefix(tuple((keys[0].numpy(), values[0].numpy()) for keys, values in layers))
    found = answers(model, [prompt, prompt], prefix)
    tokens = generate(
        model.model, KeyValues(layers), model.encode([prompt]), max_new_tokens=4, do_sample=False
    )
    expected = model.processor.tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert [one.text for one in found] == [expected.strip()] * 2
    assert found[0].logprob != pytest.approx(answers(model, [prompt])[0].logprob, abs=1e-3)


def test_second_image_is_refused(model: LoadedModel) -> None:
    with pytest.raises(
        GenerationError, match="the model reads at most 1 image per prompt, got 2"
    ) as caught:
        model.render(Prompt((user(solid_image(1)), user(solid_image(2)))), SHORT)
    assert "racc" in caught.value.hint


def test_image_limits_have_a_plural(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.processor, "max_images", 2)
    prompt = Prompt(tuple(user(solid_image(shade)) for shade in range(3)))
    with pytest.raises(GenerationError, match="reads at most 2 images per prompt, got 3"):
        model.render(prompt, SHORT)


def test_qformer_reads_the_end_of_a_long_text(model: LoadedModel) -> None:
    inputs = model.encode([shown(1, "passage " * 200 + "what?")])
    if "qformer_input_ids" in inputs:
        ids = inputs["qformer_input_ids"][0]
        words = model.processor._qformer_tokenizer.decode(ids)
        assert (len(ids), words.endswith("short answer : [SEP]")) == (512, True)
    assert inputs["input_ids"].shape[1] > 1600 + QUERIES


def test_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            target = tmp_path / file.relative_to(folder)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["image_token_index"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="image_token_index must be the id of <image>"):
        LoadedModel.load(str(tmp_path), "cpu", "auto")
