from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bottega.evaluation.methods.retrieval import (
    EpisodeRetriever,
    ExamplePool,
    OracleRetriever,
    nearest_retriever,
    pools,
)
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.retrieval import BalancedSampler, UniformSampler
from tests.evaluation.builders import episodic_benchmark, passage_benchmark

DATA = episodic_benchmark()


@pytest.fixture(scope="module")
def knowledge() -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as filled:
        filled.add(DATA.knowledge)
        yield filled


async def test_neighbours_come_from_the_same_episode(knowledge: KnowledgeBase) -> None:
    retrieve = nearest_retriever(DATA, knowledge)
    for item in DATA.items:
        found = await retrieve(item.query, 10)
        assert {c.example.tags["episode"] for c in found} == {item.tags["episode"]}
        assert len(found) == 4
        assert found[0].example.answer == item.answer


async def test_random_examples_come_from_the_same_episode(knowledge: KnowledgeBase) -> None:
    by_episode = pools(DATA, knowledge)
    for kind in (UniformSampler, BalancedSampler):
        retrieve = EpisodeRetriever(
            DATA.episode_of, {e: kind(p, seed=0) for e, p in by_episode.items()}
        )
        for item in DATA.items:
            found = await retrieve(item.query, 2)
            assert {c.example.tags["episode"] for c in found} == {item.tags["episode"]}
            if kind is BalancedSampler:
                assert len({c.example.answer for c in found}) == 2


def test_knowledge_base_is_the_pool_without_episodes(knowledge: KnowledgeBase) -> None:
    assert pools(replace(DATA, episode_of={}), knowledge) == {"": knowledge}


@pytest.mark.parametrize("k", [1, 3, 6, 50])
async def test_oracle_finds_the_gold_passage(k: int) -> None:
    data = passage_benchmark(episodes=1)
    passage_of = {str(item.query.id): item.tags["passage"] for item in data.items}
    oracle = OracleRetriever(ExamplePool(data.knowledge), passage_of, seed=0)
    positions = set()
    for item in data.items:
        found = [c.example.id for c in await oracle(item.query, k)]
        assert len(set(found)) == len(found) == min(k, 6)
        positions.add(found.index(item.tags["passage"]))
        assert found == [c.example.id for c in await oracle(item.query, k)]
    assert k == 1 or len(positions) > 1
