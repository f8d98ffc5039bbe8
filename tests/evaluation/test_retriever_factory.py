"""Tests of the retrievers that evaluation methods use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.methods.retrieval import (
    EXCLUDE,
    CachingTokenEmbedder,
    bundled_token_embedder,
    retriever_factory,
)
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase, PixelEmbedder, TokenEmbedder
from bottega.prompting import InterleavedPrompter
from bottega.recipes.cache_retrieval import (
    BY_IMAGE,
    RETRIEVE,
    CacheRetrieval,
    DraftModel,
    RetrievalName,
)
from bottega.retrieval import HashtagRetriever, tag_keywords
from bottega.types import Example, Prompt, Query
from tests.builders import solid_image
from tests.evaluation.builders import episodic_benchmark, passage_benchmark


def draft(prompt: Prompt) -> str:
    return "a shade of a home"


TEXT = cache(TokenEmbedder.bundled)
TOKENS = cache(bundled_token_embedder)


def retrieval_of(name: RetrievalName, progress: list[int] | None = None) -> CacheRetrieval:
    generator = ScriptedGenerator(draft)
    steps = [] if progress is None else progress
    return CacheRetrieval(
        name,
        image=PixelEmbedder(),
        text=TEXT(),
        tokens=CachingTokenEmbedder(TOKENS(), steps.append),
        draft=DraftModel(generator, InterleavedPrompter()),
        exclude=EXCLUDE,
    )


def filled(data: Benchmark, retrieval: CacheRetrieval) -> Iterator[KnowledgeBase]:
    with KnowledgeBase.open(":memory:", embed=retrieval.views()) as knowledge:
        knowledge.add(data.knowledge)
        yield knowledge


def test_each_retrieval_method_has_properties() -> None:
    assert get_args(RetrievalName) == RETRIEVE


@pytest.mark.parametrize("retrieve", RETRIEVE)
@pytest.mark.parametrize(
    "data", [episodic_benchmark(), passage_benchmark()], ids=["shades", "homes"]
)
async def test_examples_come_from_the_same_episode(
    data: Benchmark, retrieve: RetrievalName
) -> None:
    if retrieve in BY_IMAGE and data.name == "homes":
        return  # passages without images
    retrieval = retrieval_of(retrieve)
    for knowledge in filled(data, retrieval):
        retriever = retriever_factory(retrieval)(data, knowledge)
        for item in data.items:
            found = await retriever(item.query, 50)
            own = knowledge.ids(tags={"episode": item.tags["episode"]})
            assert sorted(str(c.example.id) for c in found) == sorted(own)


@pytest.mark.parametrize("retrieve", RETRIEVE)
def test_progress_counts_reembedded_examples(retrieve: RetrievalName) -> None:
    data, steps = episodic_benchmark(), list[int]()
    retrieval = retrieval_of(retrieve, steps)
    for knowledge in filled(data, retrieval):
        search = retriever_factory(retrieval)
        for _ in range(2):  # one index for all methods
            search(data, knowledge)
    assert sum(steps) == (len(data.knowledge) if retrieve == "hybrid" else 0)


@pytest.mark.parametrize("retrieve", RETRIEVE)
async def test_item_itself_is_never_shown(retrieve: RetrievalName) -> None:
    data = replace(episodic_benchmark(), episode_of={})
    retrieval = retrieval_of(retrieve)
    for knowledge in filled(data, retrieval):
        retriever = retriever_factory(retrieval)(data, knowledge)
        for own in knowledge:
            same_image = Query("Which shade?", own.query.images)
            same_id = Query("Which shade?", (solid_image(7777),), id=own.id)
            for query in (same_image, same_id):
                found = [c.example.id for c in await retriever(query, 50)]
                assert own.id not in found
                assert len(set(found)) == len(found) == len(knowledge) - 1


async def test_keyword_tags_are_searchable() -> None:
    retrieval = retrieval_of("keywords")
    image, other_image = solid_image(5), solid_image(6)
    plain = Example(Query("Which shade is it?", (image,)), "one")
    tagged = Example(Query("Tell me more.", (image,)), "two", tags={"keywords": "shape, size"})
    data = Benchmark("two", (plain, tagged), (), ())
    for query, answer in (("What shape, which size?", "two"), ("Which shade?", "one")):
        for knowledge in filled(data, retrieval):
            retriever = retriever_factory(retrieval)(data, knowledge)
            [best] = await retriever(Query(query, (other_image,)), 1)
            assert best.example.answer == answer


@pytest.mark.parametrize("retrieve", ["crossed", "probe", "keyword-hashtag"])
async def test_drafts_retrieve_responses(retrieve: RetrievalName) -> None:
    """The draft names a shade; only the examples' responses do so too."""
    image = solid_image(5)
    examples = [
        Example(Query("Which?", (solid_image(n),)), answer)
        for n, answer in enumerate(("tall", "ochre", "wide"), start=50)
    ]
    retrieval = retrieval_of(retrieve)
    assert retrieval.draft is not None
    generator = ScriptedGenerator(lambda prompt: "It is ochre.")
    retrieval = replace(retrieval, draft=replace(retrieval.draft, generator=generator))
    tagged = await tag_keywords(examples, retrieval.extract)
    for knowledge in filled(Benchmark("shades", tuple(tagged), (), ()), retrieval):
        found = await retrieval.retriever(knowledge)(Query("Which?", (image,)), 3)
    assert len(generator.calls) == 1 and len(found) == 3
    if retrieve != "crossed":  # it compares the images alone
        assert found[0].example.answer == "ochre"


async def test_hashtags_group_images_of_equal_questions() -> None:
    """Two groups of shades: the retriever searches the group of the query's image."""
    examples = [
        Example(Query("Which?", (solid_image(shade),)), str(shade))
        for shade in (*range(8), *range(50000, 50008))
    ]
    retrieval = replace(retrieval_of("hashtag"), groups=2, group_images=True)
    for knowledge in filled(Benchmark("shades", tuple(examples), (), ()), retrieval):
        retrieve = retrieval.retriever(knowledge)
        found = await retrieve(Query("Which?", (solid_image(20),)), 4)
        assert isinstance(retrieve, HashtagRetriever)
        groups = [{one.answer for one in knowledge.get_many(ids)} for ids in retrieve.tree.groups]
    assert sorted(map(len, groups)) == [8, 8]
    assert {one.example.answer for one in found} <= {str(shade) for shade in range(8)}


def test_missing_parts_raise() -> None:
    with pytest.raises(SettingError, match="retrieval by probe needs image and text and draft"):
        CacheRetrieval("probe")
    with pytest.raises(SettingError, match="retrieval by hybrid needs text and tokens"):
        CacheRetrieval("hybrid")
