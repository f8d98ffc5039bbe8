from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bottega.compression.baselines import OneTokenCompressor
from bottega.compression.store import Manifest, PassageStore
from bottega.kv_prefix import forward
from bottega.types import Example, Query
from tests.compression.tiny_models import hyper, model, passages, texts

QUERY = Query("where is the home of number 2")


def method() -> OneTokenCompressor:
    torch.manual_seed(0)
    return OneTokenCompressor(32)


def vectors(method: OneTokenCompressor, count: int = 3) -> Tensor:
    return method.passage_vectors(hyper(), texts().passages(passages(count)))


def test_vector_is_the_mean_of_its_own_tokens() -> None:
    short, long = passages(1)[0], Example(Query("a much longer text " * 4), "")
    made, states = method(), hyper().read(texts().passages([short]))

    alone = made.passage_vectors(hyper(), texts().passages([short]))
    padded = made.passage_vectors(hyper(), texts().passages([short, long]))

    torch.testing.assert_close(alone, states.hidden.mean(1, keepdim=True))
    torch.testing.assert_close(padded[:1], alone, atol=1e-5, rtol=1e-5)


def test_calibration_brings_every_dimension_to_one_scale() -> None:
    made = method()
    seen = torch.randn(50, 1, 32) * torch.logspace(-1, 2, 32) + 5

    made.calibrate(seen)

    scaled = (seen - made.centre) / made.spread
    torch.testing.assert_close(scaled.mean((0, 1)), torch.zeros(32), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaled.flatten(0, 1).std(0), torch.ones(32), atol=1e-4, rtol=0)


def test_one_token_a_passage_stands_before_the_question() -> None:
    made = method()
    rows = vectors(made).transpose(0, 1)
    prefix = made(model().model, rows)

    inputs = texts().questions([QUERY])
    logits = forward(model().model, prefix, inputs).logits

    assert prefix.length == 3
    words = model().model.get_input_embeddings()(inputs["input_ids"])
    joined = torch.cat([made.embed(rows), words], 1)
    expected = model().model(inputs_embeds=joined).logits[:, 3:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_gradients_of_the_answer_reach_the_bridge_and_nothing_else() -> None:
    made, frozen = method(), model().model
    rows = vectors(made).transpose(0, 1)
    inputs = texts().questions([QUERY])

    loss = forward(frozen, made(frozen, rows), inputs, inputs["input_ids"]).loss
    assert loss is not None
    torch.autograd.backward(loss)

    assert {name for name, _ in made.named_parameters()} == {
        f"bridge.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")
    }
    for part in made.parameters():
        assert part.grad is not None and part.grad.abs().sum() > 0
    assert all(part.grad is None for part in frozen.parameters())
    assert not rows.requires_grad


def test_stored_vectors_are_those_of_the_passages(tmp_path: Path) -> None:
    made, store = method(), PassageStore(tmp_path, Manifest("one", 1, 32))
    named = [(f"p{i}", one) for i, one in enumerate(passages(3))]

    store.add(named, lambda queries: made.passage_vectors(hyper(), texts().passages(queries)))

    torch.testing.assert_close(store.get(named), vectors(made), atol=1e-2, rtol=1e-2)
