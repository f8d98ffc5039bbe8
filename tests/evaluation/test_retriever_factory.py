"""Tests of the retrievers that evaluation methods use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.retriever_factory import RETRIEVE, knowledge_views, retriever_factory
from bottega.knowledge import DualEmbedder, KnowledgeBase, PixelEmbedder, TokenEmbedder
from bottega.protocols import Embedder
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.evaluation.builders import episodic_benchmark, passage_benchmark


@pytest.fixture(scope="module")
def dual_embedder() -> Embedder:
    return DualEmbedder(PixelEmbedder(), TokenEmbedder.bundled())


def filled(data: Benchmark, retrieve: str, embed: Embedder) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", embed=knowledge_views(retrieve, embed)) as knowledge:
        knowledge.add(data.knowledge)
        yield knowledge


@pytest.mark.parametrize("retrieve", RETRIEVE)
@pytest.mark.parametrize(
    "data", [episodic_benchmark(), passage_benchmark()], ids=["shades", "homes"]
)
async def test_examples_come_from_the_same_episode(
    data: Benchmark, retrieve: str, dual_embedder: Embedder
) -> None:
    for knowledge in filled(data, retrieve, dual_embedder):
        retriever = retriever_factory(retrieve, dual_embedder)(data, knowledge)
        for item in data.items:
            found = await retriever(item.query, 50)
            own = knowledge.ids(tags={"episode": item.tags["episode"]})
            assert sorted(str(c.example.id) for c in found) == sorted(own)


@pytest.mark.parametrize("retrieve", RETRIEVE)
def test_progress_counts_reembedded_examples(retrieve: str, dual_embedder: Embedder) -> None:
    data, steps = episodic_benchmark(), list[int]()
    for knowledge in filled(data, retrieve, dual_embedder):
        search = retriever_factory(retrieve, dual_embedder, progress=steps.append)
        for _ in range(2):  # one index for all methods
            search(data, knowledge)
    assert sum(steps) == (len(data.knowledge) if retrieve == "hybrid" else 0)


@pytest.mark.parametrize("retrieve", RETRIEVE)
async def test_item_itself_is_never_shown(retrieve: str, dual_embedder: Embedder) -> None:
    data = replace(episodic_benchmark(), episode_of={})
    for knowledge in filled(data, retrieve, dual_embedder):
        retriever = retriever_factory(retrieve, dual_embedder)(data, knowledge)
        for own in knowledge:
            same_image = Query("Which shade?", own.query.images)
            same_id = Query("Which shade?", (solid_image(7777),), id=own.id)
            for query in (same_image, same_id):
                found = [c.example.id for c in await retriever(query, 50)]
                assert own.id not in found
                assert len(set(found)) == len(found) == len(knowledge) - 1


async def test_keyword_tags_are_searchable(dual_embedder: Embedder) -> None:
    image, other_image = solid_image(5), solid_image(6)
    plain = Example(Query("Which shade is it?", (image,)), "one")
    tagged = Example(Query("Tell me more.", (image,)), "two", tags={"keywords": "shape, size"})
    data = Benchmark("two", (plain, tagged), (), ())
    for query, answer in (("What shape, which size?", "two"), ("Which shade?", "one")):
        for knowledge in filled(data, "keywords", dual_embedder):
            retriever = retriever_factory("keywords", dual_embedder)(data, knowledge)
            [best] = await retriever(Query(query, (other_image,)), 1)
            assert best.example.answer == answer


def test_unknown_retriever_raises() -> None:
    with pytest.raises(SettingError) as raised:
        retriever_factory("sound")
    assert "hybrid" in raised.value.hint
