from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bottega.compression.passage_store import PassageStore, StoreManifest
from bottega.compression.prefixes import PassageCompressor, PrefixSearcher
from bottega.errors import SettingError, StoreError
from bottega.parsing import LabelParser
from bottega.prompting import InterleavedPrompter
from bottega.types import Candidate, Completion, Prefix, Prompt, Query, Reply, Sampling
from tests.compression import tiny_models
from tests.compression.tiny_models import hyper, passage, passages, texts

QUERY = Query("where is number 2")


class Base:
    """Generator that replies with the length of its prefix."""

    name = "base"

    def __init__(self, prefix: Prefix | None = None, seen: list[Prefix] | None = None) -> None:
        self._prefix, self.seen = prefix, [] if seen is None else seen

    def with_prefix(self, prefix: Prefix, /) -> Base:
        self.seen.append(prefix)
        return Base(prefix, self.seen)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        shown = "no prefix" if self._prefix is None else f"prefix {self._prefix.length}"
        return Reply(self.name, (Completion(shown),))

    async def aclose(self) -> None: ...


def candidates(count: int, scores: tuple[float, ...] | None = None) -> list[Candidate]:
    scores = scores or tuple(float(count - i) for i in range(count))
    return [
        Candidate(replace(one, id=f"p{i}"), score)
        for i, (one, score) in enumerate(zip(passages(count), scores, strict=True))
    ]


def compressor_of(store: PassageStore | None = None) -> PassageCompressor:
    return PassageCompressor(tiny_models.racc(), hyper(), texts(), store)


def make_searcher(base: Base, store: PassageStore | None = None) -> PrefixSearcher:
    made = compressor_of(store)

    async def condense(query: Query, shown: Sequence[Candidate]) -> Prefix:
        return await asyncio.to_thread(made.prefix, query, shown)

    return PrefixSearcher(condense, base, prompt=InterleavedPrompter(), parse=LabelParser())


async def test_model_reads_the_prefix_and_no_passage_text() -> None:
    base = Base()

    answer = await make_searcher(base).search(QUERY, candidates(5), 3)

    assert answer.answer.text == "prefix 3"  # query prompts, whatever the number of passages
    assert [one.example.id for one in answer.shown] == ["p0", "p1", "p2"]
    assert len(answer.prompt.messages) == 1


async def test_without_candidates_the_model_has_no_prefix() -> None:
    assert (await make_searcher(Base()).search(QUERY, [], 3)).answer.text == "no prefix"


async def test_prefix_depends_on_scores_and_passages() -> None:
    base = Base()
    searcher = make_searcher(base)
    await searcher.search(QUERY, candidates(3), 3)
    await searcher.search(QUERY, candidates(3, (0.0, 0.0, 9.0)), 3)
    await searcher.search(QUERY, candidates(5)[2:], 3)
    await searcher.search(QUERY, candidates(3), 3)

    first = [prefix.layers[0][0] for prefix in base.seen]
    assert not np.allclose(first[0], first[1])
    assert not np.allclose(first[0], first[2])
    np.testing.assert_array_equal(first[0], first[3])


async def test_concurrent_queries_do_not_mix() -> None:
    base = Base()
    searcher, queries = make_searcher(base), [Query(f"where is number {i}") for i in range(8)]
    await asyncio.gather(*(searcher.search(one, candidates(3), 3) for one in queries))
    together = {prefix.layers[0][0].tobytes() for prefix in base.seen}
    alone = {compressor_of().prefix(one, candidates(3)).layers[0][0].tobytes() for one in queries}

    assert together == alone and len(alone) == 8


async def test_stored_passages_give_the_same_answers(tmp_path: Path) -> None:
    store = PassageStore(tmp_path, StoreManifest("a", 4, 32))
    store.add(
        [(str(one.example.id), one.example) for one in candidates(3)], compressor_of().compress
    )
    fresh, stored = Base(), Base()

    await make_searcher(fresh).search(QUERY, candidates(3), 3)
    await make_searcher(stored, store).search(QUERY, candidates(3), 3)

    one, other = fresh.seen[0].layers[1], stored.seen[0].layers[1]
    np.testing.assert_allclose(one[0], other[0], atol=0.02)
    np.testing.assert_allclose(one[1], other[1], atol=0.02)


async def test_changed_passage_is_an_error(tmp_path: Path) -> None:
    store = PassageStore(tmp_path, StoreManifest("a", 4, 32))
    store.add([("p0", passage("old"))], lambda old: torch.zeros(len(old), 4, 32))

    with pytest.raises(StoreError, match="p0 has changed"):
        await make_searcher(Base(), store).search(QUERY, candidates(1), 1)


@pytest.mark.parametrize("k", [0, -1])
async def test_k_below_1_is_an_error(k: int) -> None:
    with pytest.raises(SettingError, match=f"at least 1, got {k}"):
        await make_searcher(Base()).search(QUERY, candidates(3), k)


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
async def test_nan_scores_are_an_error(score: float) -> None:
    with pytest.raises(SettingError, match="not a finite number"):
        await make_searcher(Base()).search(QUERY, candidates(2, (score, 1.0)), 2)


@pytest.mark.parametrize("offset", [0.0, -7.5, 2.0**40])
def test_only_score_differences_matter(offset: float) -> None:
    """Also far from zero: single precision rounds 2 ** 40 and 2 ** 40 + 1 to one number."""
    made = compressor_of()
    original, moved = (
        made.prefix(QUERY, candidates(2, (1.0 + by, 0.0 + by))).layers[0][0] for by in (0.0, offset)
    )
    np.testing.assert_allclose(original, moved, atol=1e-6)


@pytest.mark.parametrize("scores", [(1e308, -1e308), (1e39, 0.0)])
def test_scores_beyond_single_precision_stay_finite(scores: tuple[float, ...]) -> None:
    layers = compressor_of().prefix(QUERY, candidates(2, scores)).layers
    assert all(np.isfinite(one).all() for layer in layers for one in layer)
