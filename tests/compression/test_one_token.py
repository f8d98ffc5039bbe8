from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from bottega.compression.passage_store import PassageStore, StoreManifest
from bottega.compression.prefixes import OneTokenCompressor
from bottega.kv_prefix import forward
from bottega.types import Example, Query
from tests.compression.tiny_models import hyper, model, passages, texts

QUERY = Query("where is the home of number 2")


def one_token() -> OneTokenCompressor:
    torch.manual_seed(0)
    return OneTokenCompressor(32)


def vectors(compressor: OneTokenCompressor, count: int = 3) -> Tensor:
    return compressor.passage_vectors(hyper(), texts().passages(passages(count)))


def test_vector_is_the_mean_of_its_own_tokens() -> None:
    short, long = passages(1)[0], Example(Query("a much longer text " * 4), "")
    compressor, states = one_token(), hyper().read(texts().passages([short]))

    alone = compressor.passage_vectors(hyper(), texts().passages([short]))
    padded = compressor.passage_vectors(hyper(), texts().passages([short, long]))

    torch.testing.assert_close(alone, states.hidden.mean(1, keepdim=True))
    torch.testing.assert_close(padded[:1], alone, atol=1e-5, rtol=1e-5)


def test_calibration_equalizes_dimensions() -> None:
    compressor = one_token()
    seen = torch.randn(50, 1, 32) * torch.logspace(-1, 2, 32) + 5

    compressor.calibrate(seen)

    scaled = (seen - compressor.centre) / compressor.spread
    torch.testing.assert_close(scaled.mean((0, 1)), torch.zeros(32), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaled.flatten(0, 1).std(0), torch.ones(32), atol=1e-4, rtol=0)


def test_one_token_per_passage_precedes_the_question() -> None:
    compressor = one_token()
    rows = vectors(compressor).transpose(0, 1)
    prefix = compressor(model().model, rows)

    inputs = texts().questions([QUERY])
    logits = forward(model().model, prefix, inputs).logits

    assert prefix.length == 3
    words = model().model.get_input_embeddings()(inputs["input_ids"])
    joined = torch.cat([compressor.embed(rows), words], 1)
    expected = model().model(inputs_embeds=joined).logits[:, 3:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_only_the_bridge_gets_gradients() -> None:
    compressor, frozen = one_token(), model().model
    rows = vectors(compressor).transpose(0, 1)
    inputs = texts().questions([QUERY])

    loss = forward(frozen, compressor(frozen, rows), inputs, inputs["input_ids"]).loss
    assert loss is not None
    torch.autograd.backward(loss)

    assert {name for name, _ in compressor.named_parameters()} == {
        f"bridge.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")
    }
    for part in compressor.parameters():
        assert part.grad is not None and part.grad.abs().sum() > 0
    assert all(part.grad is None for part in frozen.parameters())
    assert not rows.requires_grad


def test_stored_vectors_equal_the_passages(tmp_path: Path) -> None:
    compressor, store = one_token(), PassageStore(tmp_path, StoreManifest("one", 1, 32))
    named = [(f"p{i}", one) for i, one in enumerate(passages(3))]

    store.add(named, lambda queries: compressor.passage_vectors(hyper(), texts().passages(queries)))

    torch.testing.assert_close(store.get(named), vectors(compressor), atol=1e-2, rtol=1e-2)
