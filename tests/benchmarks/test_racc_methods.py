"""Timed methods compute the documented results."""

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
    OneTokenCompressor,
    PassageCompressor,
    PassageStore,
    StoreManifest,
)
from bottega.prompting import InterleavedPrompter
from bottega.types import Candidate, Query
from tests.compression import tiny_models
from tests.compression.tiny_models import encode, hyper, model, passages, texts
from tests.kv_prefix.tiny_models import END

QUERY = Query("where is the home of number 2")


def case(count: int = 3, scores: tuple[float, ...] = (0.2, 0.1, 0.0), tokens: int = 5) -> Case:
    shown = [
        Candidate(replace(one, id=f"p{i}"), scores[i]) for i, one in enumerate(passages(count))
    ]
    return Case(model().model, texts(), QUERY, shown, tokens)


@pytest.mark.parametrize("first", range(3))
def test_highest_joint_probability_wins(first: int) -> None:
    sure: tuple[float, ...] = tuple(50.0 * (device == first) for device in range(3))
    query = case(3, sure)
    alone = Case(query.model, query.texts, QUERY, query.shown[first : first + 1], query.tokens)

    picked = candidates(query)

    assert int(picked.joint.argmax()) == first
    assert picked.tokens.tolist() == alone.concatenated().tolist()


def test_joint_probability_equals_a_second_pass() -> None:
    query = case(3)
    joint = candidates(query).joint

    retrieved = torch.tensor([0.2, 0.1, 0.0]).log_softmax(0)
    for device, one in enumerate(query.shown):
        alone = Case(query.model, query.texts, QUERY, [one], query.tokens)
        said = alone.concatenated()
        prompt = texts().with_passages([QUERY], [alone.passages])["input_ids"]
        logits = query.model(input_ids=torch.cat([prompt, said], 1)).logits
        labelled_passage = (
            logits[:, prompt.shape[1] - 1 : -1].log_softmax(-1).gather(-1, said[..., None])
        )
        torch.testing.assert_close(
            joint[device], retrieved[device] + labelled_passage.sum(), atol=1e-3, rtol=0
        )


def test_reused_passage_gives_the_concatenation_answer() -> None:
    query = case(1)
    reuse = KVReuse(query.model, encode, frozenset({END}), InterleavedPrompter())

    assert query.reused(reuse).tolist() == query.concatenated().tolist()
    assert query.reused(reuse).tolist() != query.alone().tolist()


def test_one_token_a_passage_precedes_the_question(tmp_path: Path) -> None:
    query, store = case(3), PassageStore(tmp_path, StoreManifest("a", 1, 32))
    torch.manual_seed(0)
    method = OneTokenCompressor(32)
    store.add(
        query.named, lambda queries: method.passage_vectors(hyper(), texts().passages(queries))
    )

    said = query.one_token(method, store)

    ids = texts().questions([QUERY])["input_ids"]
    embedded = method.embed(store.get(query.named).transpose(0, 1))
    words = query.model.get_input_embeddings()
    for _ in range(query.tokens):
        joined = torch.cat([embedded, words(ids)], 1)
        best = query.model(inputs_embeds=joined).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], 1)
    assert said.tolist() == ids[:, -query.tokens :].tolist()


def test_stored_and_fresh_passages_give_equal_answers(tmp_path: Path) -> None:
    query, racc = case(3, tokens=4), tiny_models.racc(start="random")
    online = PassageCompressor(racc, hyper(), texts())
    store = PassageStore(tmp_path, StoreManifest("a", 4, 32))
    store.add(query.named, online.compress)
    stored = PassageCompressor(racc, hyper(), texts(), store)

    prefixes: list[Any] = [one.prefix(QUERY, query.shown) for one in (online, stored)]
    for one, other in zip(prefixes[0].layers, prefixes[1].layers, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=0.02)
    assert query.condensed(online).tolist() == query.condensed(stored).tolist()
    assert query.condensed(online).tolist() != query.alone().tolist()
