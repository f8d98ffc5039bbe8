from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import EmptyKnowledgeBaseError
from bottega.retrieval import BalancedSampler, DenseRetriever, UniformSampler
from bottega.types import Candidate, Example, Query
from tests.builders import QUESTION, ListPool, candidates, example, solid_image
from tests.retrieval.doubles import Memory, about

QUERY = Query(QUESTION, (solid_image(9999),))


def pool_of(sizes: dict[str, int]) -> ListPool:
    labelled = [(label, i) for label, size in sizes.items() for i in range(size)]
    return ListPool([example(label, shade) for shade, (label, _) in enumerate(labelled)])


async def test_dense_returns_what_the_search_found() -> None:
    found = candidates("a", "b", "c")
    calls: list[tuple[Query, int]] = []

    def search(query: Query, k: int) -> list[Candidate]:
        calls.append((query, k))
        return found[:k]

    assert await DenseRetriever(search)(QUERY, 2) == found[:2]
    assert calls == [(QUERY, 2)]


@pytest.mark.parametrize("retriever", [UniformSampler, BalancedSampler])
def test_an_empty_pool_is_an_error_with_a_hint(
    retriever: type[UniformSampler | BalancedSampler],
) -> None:
    with pytest.raises(EmptyKnowledgeBaseError) as caught:
        retriever(ListPool([]), seed=0)
    assert "bottega add" in caught.value.hint


@given(k=st.integers(0, 12), seed=st.integers(0, 5))
async def test_uniform_samples_k_different_examples(k: int, seed: int) -> None:
    found = await UniformSampler(pool_of({"a": 3, "b": 4}), seed=seed)(QUERY, k)
    assert len({c.example.id for c in found}) == len(found) == min(k, 7)


async def test_uniform_is_repeatable_and_depends_on_seed_and_query() -> None:
    pool = pool_of({"a": 30})
    other = Query(QUESTION, (solid_image(8888),))
    first = await UniformSampler(pool, seed=1)(QUERY, 10)
    assert first == await UniformSampler(pool, seed=1)(QUERY, 10)
    assert first != await UniformSampler(pool, seed=2)(QUERY, 10)
    assert first != await UniformSampler(pool, seed=1)(other, 10)


async def test_uniform_reaches_every_example() -> None:
    pool = pool_of({"a": 5, "b": 5})
    seen: Counter[str | None] = Counter()
    for shade in range(200):
        found = await UniformSampler(pool, seed=0)(Query("q", (solid_image(20_000 + shade),)), 2)
        seen.update(c.example.id for c in found)
    assert len(seen) == 10
    assert min(seen.values()) > 15  # 40 expected; a biased sampler would starve some


@pytest.mark.parametrize("retriever", [UniformSampler, BalancedSampler])
async def test_the_query_itself_is_never_sampled(
    retriever: type[UniformSampler | BalancedSampler],
) -> None:
    pool = pool_of({"a": 4})
    same_image = Query("another question", (solid_image(2),))
    same_id = Query(QUESTION, (solid_image(7777),), id="a-1")
    retrieve = retriever(pool, seed=0)
    assert {c.example.id for c in await retrieve(same_image, 9)} == {"a-0", "a-1", "a-3"}
    assert {c.example.id for c in await retrieve(same_id, 9)} == {"a-0", "a-2", "a-3"}


@given(k=st.integers(0, 15), seed=st.integers(0, 5))
async def test_balanced_samples_have_equal_label_counts(k: int, seed: int) -> None:
    found = await BalancedSampler(pool_of({"a": 9, "b": 5, "c": 5}), seed=seed)(QUERY, k)
    counts = Counter(c.example.answer for c in found)
    assert len(found) == k
    assert max(counts.values(), default=0) - min((counts[x] for x in "abc"), default=0) <= 1


async def test_balanced_continues_after_a_label_runs_out() -> None:
    found = await BalancedSampler(pool_of({"rare": 1, "common": 20}), seed=0)(QUERY, 8)
    assert Counter(c.example.answer for c in found) == {"rare": 1, "common": 7}


@pytest.mark.parametrize("retriever", [UniformSampler, BalancedSampler])
@pytest.mark.parametrize("k", [3, 40])
async def test_deleted_examples_are_left_out(
    retriever: type[UniformSampler | BalancedSampler], k: int
) -> None:
    memory = Memory(about("colour", 7) + about("shape", 7, start=20))
    retrieve = retriever(memory, seed=0)
    memory.delete(list(memory.examples)[2:10])
    found = [candidate.example.id for candidate in await retrieve(QUERY, k)]
    assert len(set(found)) == len(found) == min(k, 6)
    assert set(found) <= set(memory.examples)


class CountingPool(ListPool):
    """Pool that counts the fetched examples."""

    def __init__(self, examples: Sequence[Example]) -> None:
        super().__init__(examples)
        self.fetched = 0

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        self.fetched += len(ids)
        return super().get_many(ids)


@pytest.mark.parametrize("retriever", [UniformSampler, BalancedSampler])
@pytest.mark.parametrize("k", [0, 1, 3])
async def test_only_the_shown_examples_are_fetched(
    retriever: type[UniformSampler | BalancedSampler], k: int
) -> None:
    pool = CountingPool(list(pool_of({"a": 10, "b": 10}).examples.values()))
    assert len(await retriever(pool, seed=0)(QUERY, k)) == pool.fetched == k


@pytest.mark.parametrize(
    ("retriever", "ids"),
    [
        (UniformSampler, ["b-3", "a-2", "a-6", "a-0"]),
        (BalancedSampler, ["a-0", "b-3", "b-7", "a-4"]),
    ],
)
async def test_published_samples_for_text_queries_do_not_change(
    retriever: type[UniformSampler | BalancedSampler], ids: list[str]
) -> None:
    examples = [
        Example(Query(f"{i} + 1"), label, id=f"{label}-{i}") for i, label in enumerate("abababab")
    ]
    found = await retriever(ListPool(examples), seed=1)(Query("3 + 5"), 4)
    assert [candidate.example.id for candidate in found] == ids
