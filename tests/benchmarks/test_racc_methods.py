"""What is timed computes what it is said to compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.racc_methods import Case, candidates
from bottega.compression import (
    KVReuse,
    Manifest,
    OneTokenCompressor,
    PassageCompressor,
    PassageStore,
)
from bottega.prompting import InterleavedPrompter
from bottega.types import Candidate, Query
from tests.compression import spoken
from tests.compression.spoken import encode, hyper, model, passages, texts
from tests.kv_prefix.tiny_models import END

QUERY = Query("where is the home of number 2")


def case(count: int = 3, scores: tuple[float, ...] = (0.2, 0.1, 0.0), tokens: int = 5) -> Case:
    shown = [
        Candidate(replace(one, id=f"p{i}"), scores[i]) for i, one in enumerate(passages(count))
    ]
    return Case(model().model, texts(), QUERY, shown, tokens)


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
        prompt = texts().with_passages([QUERY], [alone.passages])["input_ids"]
        logits = asked.model(input_ids=torch.cat([prompt, said], 1)).logits
        told = logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1).gather(-1, said[..., None])
        torch.testing.assert_close(joint[place], retrieved[place] + told.sum(), atol=1e-3, rtol=0)


def test_a_passage_that_is_reused_says_what_concatenation_says() -> None:
    asked = case(1)
    reuse = KVReuse(asked.model, encode, frozenset({END}), InterleavedPrompter())

    assert asked.reused(reuse).tolist() == asked.concatenated().tolist()
    assert asked.reused(reuse).tolist() != asked.alone().tolist()


def test_one_token_a_passage_stands_before_the_question(tmp_path: Path) -> None:
    asked, store = case(3), PassageStore(tmp_path, Manifest("a", 1, 32))
    torch.manual_seed(0)
    method = OneTokenCompressor(32)
    store.add(
        asked.named, lambda queries: method.passage_vectors(hyper(), texts().passages(queries))
    )

    said = asked.one_token(method, store)

    ids = texts().questions([QUERY])["input_ids"]
    embedded = method.embed(store.get(asked.named).transpose(0, 1))
    words = asked.model.get_input_embeddings()
    for _ in range(asked.tokens):
        joined = torch.cat([embedded, words(ids)], 1)
        best = asked.model(inputs_embeds=joined).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], 1)
    assert said.tolist() == ids[:, -asked.tokens :].tolist()


def test_stored_passages_answer_as_those_compressed_in_the_request(tmp_path: Path) -> None:
    asked, racc = case(3, tokens=4), spoken.racc(start="random")
    online = PassageCompressor(racc, hyper(), texts())
    store = PassageStore(tmp_path, Manifest("a", 4, 32))
    store.add(asked.named, online.compress)
    stored = PassageCompressor(racc, hyper(), texts(), store)

    prefixes: list[Any] = [one.prefix(QUERY, asked.shown) for one in (online, stored)]
    for one, other in zip(prefixes[0].layers, prefixes[1].layers, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=0.02)
    assert asked.condensed(online).tolist() == asked.condensed(stored).tolist()
    assert asked.condensed(online).tolist() != asked.alone().tolist()
