"""What is timed computes what it is said to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.racc_methods import Case, OneToken, ReadAhead, candidates
from bottega.compression import Condenser, Manifest, PassageStore
from bottega.compression.texts import rows
from bottega.prefixing.injecting import forward
from bottega.types import Candidate, Example, Query
from tests.compression import spoken
from tests.compression.spoken import hyper, model, passages, texts

QUERY = Query("where is the home of number 2")


def case(count: int = 3, scores: tuple[float, ...] = (0.2, 0.1, 0.0), tokens: int = 5) -> Case:
    shown = [
        Candidate(Example(one, "", id=f"p{i}"), scores[i]) for i, one in enumerate(passages(count))
    ]
    return Case(model().model, texts(), QUERY, shown, tokens)


def behind(ahead: ReadAhead, asked: Case) -> Tensor:
    return forward(asked.model, ahead.prefix(), ahead.rest(asked)).logits


def test_one_passage_read_ahead_is_concatenation(tmp_path: Path) -> None:
    asked = case(1)
    whole = asked.model(**texts().reading([QUERY], [asked.passages])).logits
    ahead = ReadAhead(asked, tmp_path, np.float32)

    logits = behind(ahead, asked)

    torch.testing.assert_close(logits, whole[:, -logits.shape[1] :], atol=1e-4, rtol=1e-4)
    assert ahead(asked).tolist() == asked.concatenated().tolist()


def test_several_are_concatenation_in_which_no_passage_sees_another(tmp_path: Path) -> None:
    asked = case(3)
    logits = behind(ReadAhead(asked, tmp_path, np.float32), asked)

    ids = texts().reading([QUERY], [asked.passages])["input_ids"]
    blind, whole = (asked.model(input_ids=ids, attention_mask=one) for one in masks(asked, ids))
    count = logits.shape[1]
    torch.testing.assert_close(logits, blind.logits[:, -count:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits, whole.logits[:, -count:], atol=1e-2)


def masks(asked: Case, ids: Tensor) -> tuple[Tensor, Tensor]:
    """To be added to attention, without and with sight of the passages before."""
    length = ids.shape[1]
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    every = sees.clone()
    start = 1  # <s>
    for span in rows(texts().passages(asked.passages)):
        sees[start : start + len(span), 1:start] = False
        start += len(span)
    blind, whole = (
        torch.zeros(1, 1, length, length).masked_fill(~one, -torch.inf) for one in (sees, every)
    )
    return blind, whole


def test_what_was_read_ahead_takes_two_bytes_a_number(tmp_path: Path) -> None:
    asked = case(2)
    length = len(rows(texts().passages(asked.passages))[0])
    header = 128  # of a .npy file

    size = 3 * 2 * 4 * length * 8 * 2  # layers, keys and values, heads, places, dimensions
    assert ReadAhead(asked, tmp_path).bytes_a_passage == size + header


@pytest.mark.parametrize("first", range(3))
def test_the_likeliest_of_passage_and_answer_together_is_picked(first: int) -> None:
    sure: tuple[float, ...] = tuple(50.0 * (place == first) for place in range(3))
    asked = case(3, sure)
    alone = Case(asked.model, asked.texts, QUERY, asked.shown[first : first + 1], asked.tokens)

    picked = candidates(asked)

    assert int(picked.joint.argmax()) == first
    assert picked.tokens.tolist() == alone.concatenated().tolist()


def test_the_joint_probability_is_that_of_the_answer_read_again() -> None:
    asked = case(3)
    joint = candidates(asked).joint

    retrieved = torch.tensor([0.2, 0.1, 0.0]).log_softmax(0)
    for place, one in enumerate(asked.shown):
        alone = Case(asked.model, asked.texts, QUERY, [one], asked.tokens)
        said = alone.concatenated()
        prompt = texts().reading([QUERY], [alone.passages])["input_ids"]
        logits = asked.model(input_ids=torch.cat([prompt, said], 1)).logits
        told = logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1).gather(-1, said[..., None])
        torch.testing.assert_close(joint[place], retrieved[place] + told.sum(), atol=1e-3, rtol=0)


def test_one_token_a_passage_stands_before_the_question(tmp_path: Path) -> None:
    asked = case(3)
    store = PassageStore(tmp_path, Manifest("a", 1, 32))
    vectors = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(3))
    store.add(asked.named, lambda queries: vectors)
    torch.manual_seed(0)
    method = OneToken(store, 32)

    said = method(asked)

    embedded = method.embedded(asked)
    assert embedded.shape == (1, 3, 32)
    ids = texts().questions([QUERY])["input_ids"]
    words = asked.model.get_input_embeddings()
    for _ in range(asked.tokens):
        joined = torch.cat([embedded, words(ids)], 1)
        best = asked.model(inputs_embeds=joined).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], 1)
    assert said.tolist() == ids[:, -asked.tokens :].tolist()


def test_stored_passages_answer_as_those_compressed_in_the_request(tmp_path: Path) -> None:
    asked, racc = case(3, tokens=4), spoken.racc(start="random")
    online = Condenser(racc, hyper(), texts())
    store = PassageStore(tmp_path, Manifest("a", 4, 32))
    store.add(asked.named, online.compressed)
    stored = Condenser(racc, hyper(), texts(), store)

    prefixes: list[Any] = [one.prefix(QUERY, asked.shown) for one in (online, stored)]
    for one, other in zip(prefixes[0].layers, prefixes[1].layers, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=0.02)
    assert asked.condensed(online).tolist() == asked.condensed(stored).tolist()
    assert asked.condensed(online).tolist() != asked.alone().tolist()
