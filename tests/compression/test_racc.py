from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bottega.compression.hyper_model import (
    HiddenStates,
    HyperModel,
    ProcessorInputs,
    sentence_prompts,
)
from bottega.compression.model import AttentionPooling, PromptMode, RaccModel
from bottega.kv_prefix import KeyValues, generate
from bottega.types import Query
from tests.compression import tiny_models
from tests.compression.tiny_models import hyper, model, passages, texts

QUERIES = [Query("what is the home of number 1"), Query("where is number 2")]


def prefix(racc: RaccModel, scores: Tensor | None = None, count: int = 3) -> KeyValues:
    read = texts().passages([one for about in ("a", "b") for one in passages(count, about)])
    documents = racc.documents(hyper(), read).unflatten(0, (2, count))
    query = racc.compress_query(hyper(), texts().query_inputs(QUERIES))
    made: KeyValues = racc(documents, query, torch.zeros(2, count) if scores is None else scores)
    return made


@pytest.mark.parametrize("prompting", ["appended", "reading", "both"])
def test_output_is_a_valid_prefix_of_the_base_model(prompting: PromptMode) -> None:
    made = prefix(tiny_models.racc(prompting=prompting))

    assert (made.batch, made.length) == (2, 3)
    said = generate(model().model, made, texts().questions(QUERIES), max_new_tokens=3)
    assert said.shape == (2, 3)


@pytest.mark.parametrize("prompting", ["appended", "reading", "both"])
def test_gradients_reach_all_trained_weights(prompting: PromptMode) -> None:
    racc = tiny_models.racc(prompting=prompting, start="random")
    for one in racc.modulation.second.parameters():
        torch.nn.init.normal_(one)  # zero at first: nothing passes

    made = prefix(racc, torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 1.0]]))
    squares = [part.square().sum() for pair in made.layers for part in pair]
    torch.autograd.backward(torch.stack(squares).sum())

    without = {name for name, one in racc.named_parameters() if not _reached(one.grad)}
    assert without <= {"documents.reader.query", "queries.reader.query"} | {
        # A reader that asks for nothing yet has keys without influence.
        "documents.reader.key.weight",
        "queries.reader.key.weight",
        # A bias of the keys shifts all scores equally.
        *(f"aggregator.blocks.{i}.key.bias" for i in range(3)),
        "aggregator.enhance.key.bias",
    }


def _reached(grad: torch.Tensor | None) -> bool:
    return grad is not None and bool(grad.abs().max() > 1e-7)


def test_frozen_models_get_no_gradient() -> None:
    racc = tiny_models.racc(prompting="both")
    torch.autograd.backward(torch.stack([keys.sum() for keys, _ in prefix(racc).layers]).sum())

    assert all(one.grad is None for one in model().model.parameters())


def test_each_switch_of_table_4_changes_the_model() -> None:
    built = {}
    for dcvq, rgca in itertools.product([True, False], repeat=2):
        racc = tiny_models.racc(dcvq=dcvq, rgca=rgca)
        scores = torch.tensor([[0.0, 5.0, 1.0], [2.0, 0.0, 9.0]])
        if racc.aggregator.enhance is not None:
            torch.nn.init.eye_(racc.aggregator.enhance.out.weight)  # it is quiet at first
        built[dcvq, rgca] = prefix(racc, scores).layers[0][0]

    for one, other in itertools.combinations(built.values(), 2):
        assert not torch.allclose(one, other)


def test_pipe_starts_from_a_sentence_repeated_or_cut() -> None:
    ids = torch.tensor([20, 30, 40])

    torch.testing.assert_close(
        sentence_prompts(hyper(), ids, 4), hyper().embed(torch.tensor([20, 30, 40, 20]))
    )
    torch.testing.assert_close(sentence_prompts(hyper(), ids, 2), hyper().embed(ids[:2]))


@pytest.mark.parametrize("prompting", ["appended", "reading", "both"])
def test_the_scale_of_hidden_states_does_not_matter(prompting: PromptMode) -> None:
    class Scaled(HyperModel):
        def read(self, inputs: ProcessorInputs, prompts: Tensor | None = None) -> HiddenStates:
            states, scale = super().read(inputs, prompts), torch.linspace(1, 1000, 32)
            prompted = None if states.prompted is None else states.prompted * scale
            return replace(states, hidden=states.hidden * scale, prompted=prompted)

    compressor = tiny_models.racc(prompting=prompting).documents
    read = texts().passages(passages(3))
    made = []
    for one in (hyper(), Scaled(model().model, layer=-1)):
        compressor.calibrate(one, [read], least=1e-6)
        made.append(compressor(one, read))

    torch.testing.assert_close(*made, atol=1e-3, rtol=1e-3)


def test_prompts_attend_to_their_own_text_only() -> None:
    prompts = hyper().embed(torch.tensor([20, 30]))
    both = hyper().read(texts().passages(passages(2)), prompts).prompted
    alone = hyper().read(texts().passages(passages(1)), prompts).prompted
    assert both is not None and alone is not None

    torch.testing.assert_close(both[:1], alone, atol=1e-4, rtol=0)
    assert not torch.allclose(both[0], both[1], atol=1e-2)


def test_prompts_after_text_equal_one_pass() -> None:
    """On the cache of the text, and in one pass."""
    ids = torch.tensor([[20, 31, 44, 52, 61]])
    on_cache = hyper().read(
        {"input_ids": ids[:, :3], "attention_mask": torch.ones(1, 3, dtype=torch.long)},
        hyper().embed(ids[0, 3:]),
    )
    whole = hyper().read({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert on_cache.prompted is not None

    torch.testing.assert_close(on_cache.prompted, whole.hidden[:, 3:], atol=1e-4, rtol=1e-4)


def test_untrained_prompts_read_their_positions_from_the_end() -> None:
    states = torch.randn(2, 6, 8)
    read = AttentionPooling([2, 1, 0], 8)(states, torch.ones(2, 6, dtype=torch.long))

    torch.testing.assert_close(read, states[:, -3:], atol=2e-3, rtol=0)


def test_padding_is_not_read() -> None:
    states, reader = torch.randn(1, 5, 8), AttentionPooling([0, 4], 8)
    padded = torch.cat([torch.full((1, 3, 8), 1e4), states], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 5])

    torch.testing.assert_close(
        reader(padded, mask), reader(states, torch.ones(1, 5, dtype=torch.long))
    )


def test_stride_sets_the_number_of_tokens() -> None:
    states = torch.randn(1, 6, 8)
    read = AttentionPooling([3, 0], 8, stride=3)(states, torch.ones(1, 6, dtype=torch.long))

    wanted = torch.stack([states[0, :3].mean(0), states[0, 3:].mean(0)])
    torch.testing.assert_close(read[0], wanted, atol=2e-3, rtol=0)


def test_text_beyond_reach_is_read_by_content() -> None:
    reader = AttentionPooling([0], 8, reach=4)
    # Of equal lengths: each state is most similar to itself.
    states = torch.nn.functional.normalize(torch.randn(1, 40, 8), dim=-1)
    before = reader(states, torch.ones(1, 40, dtype=torch.long))
    with torch.no_grad():
        reader.query.copy_(1e3 * states[0, :1])

    far = reader(states, torch.ones(1, 40, dtype=torch.long))

    torch.testing.assert_close(far[0, 0], states[0, 0])
    assert not torch.allclose(before, far)
