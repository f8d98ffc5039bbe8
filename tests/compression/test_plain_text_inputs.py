"""Passages, answers and initial prompts of BLIP-2 and InstructBLIP."""

from __future__ import annotations

import pytest
import torch

from bottega.compression import CompressorConfig, HyperModel, InputBuilder, sentence_prompts
from bottega.compression.hyper_model import rows
from bottega.errors import SettingError
from bottega.generation.loaded import LoadedModel
from bottega.kv_prefix import Geometry
from bottega.recipes.racc_training import (
    HARD_PROMPTS,
    check_answers,
    new_compressor,
    training_objective,
)
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.generation import tiny_blip
from tests.generation.tiny_blip import QUERIES

QUESTION = Query("What is it?", (solid_image(3),))


@pytest.fixture(scope="module", params=["blip2_opt", "instructblip_t5", "instructblip_llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = getattr(tiny_blip, request.param)(tmp_path_factory.mktemp("blip") / "model")
    return LoadedModel.load(str(folder), "cpu", "auto")


@pytest.fixture(scope="module")
def inputs(model: LoadedModel) -> InputBuilder:
    return InputBuilder(model.encode, model.ends)


def storable_text(model: LoadedModel, ids: list[int]) -> str:
    return str(model.processor.tokenizer.decode(ids)).strip()


def test_passage_is_read_without_the_question(model: LoadedModel, inputs: InputBuilder) -> None:
    both = [Example(Query(text), "") for text in ("A passage.", "The other one.")]
    assert [storable_text(model, ids) for ids in rows(inputs.passages(both))] == [
        "A passage.",
        "The other one.",
    ]


def test_image_of_a_passage_is_read_whole(model: LoadedModel, inputs: InputBuilder) -> None:
    [ids] = rows(inputs.passages([Example(Query("A passage.", (solid_image(1),)), "")]))
    image = model.processor.tokenizer.convert_tokens_to_ids("<image>")
    assert [one == image for one in ids] == [i < QUERIES for i in range(len(ids))]
    assert storable_text(model, ids[QUERIES:]).removeprefix("</s>").strip() == "A passage."


def test_answers_have_one_tokenization(model: LoadedModel, inputs: InputBuilder) -> None:
    begun, copied = inputs.answers([QUESTION], ["dog"]), inputs.answers_in_text(["dog"])
    assert begun == copied
    assert storable_text(model, begun[0]) == "dog"
    assert not model.ends.intersection(begun[0])


def test_tokenizer_digest_depends_on_the_tokens(model: LoadedModel, inputs: InputBuilder) -> None:
    assert InputBuilder(model.encode, frozenset()).tokenizer == inputs.tokenizer

    def reversed_ids(*given: object) -> dict[str, torch.Tensor]:
        found = model.encode(*given)  # type: ignore[arg-type]
        return {**found, "input_ids": 319 - found["input_ids"]}

    assert InputBuilder(reversed_ids, model.ends).tokenizer != inputs.tokenizer


def test_pipe_starts_prompts_as_the_sentence(model: LoadedModel) -> None:
    objective = training_objective(model)
    config = CompressorConfig(16, Geometry.of(model.model), 5, 4, start="random")
    ids = rows(objective.inputs.passages([Example(Query(HARD_PROMPTS[0]), "")]))[0]
    sentence = sentence_prompts(HyperModel(model.model), torch.tensor(ids), 5)
    with_pipe = new_compressor(config, objective, seed=1).documents.prompts
    assert with_pipe is not None and torch.equal(with_pipe, sentence)
    random, same, other = (
        new_compressor(config, objective, seed=seed, pipe=False).documents.prompts
        for seed in (1, 1, 2)
    )
    assert random is not None and same is not None and other is not None
    assert torch.equal(random, same) and not torch.equal(random, other)
    assert not torch.equal(random, sentence)


def test_answers_above_the_limit_are_refused(model: LoadedModel) -> None:
    objective = training_objective(model, answer_tokens=6)
    check_answers(objective, [Example(QUESTION, "five"), Example(QUESTION, "")])
    with pytest.raises(SettingError, match="at most 6 tokens, got 13: 'eleven words'") as caught:
        texts = ("five", "at most nine", "eleven words", "a long one")
        check_answers(objective, [Example(QUESTION, text) for text in texts])
    assert "answer_tokens = 13" in caught.value.hint
