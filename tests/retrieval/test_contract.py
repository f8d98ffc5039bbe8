"""Contract of all retrievers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase, LateInteractionIndex
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Retriever
from bottega.retrieval import (
    BalancedSampler,
    BM25Retriever,
    CrossModalRetriever,
    DenseRetriever,
    HashtagRetriever,
    HashtagTree,
    KeywordRetriever,
    LeaveOneOutGroupCount,
    RankFusionRetriever,
    ResponseProbeRetriever,
    StaticExamples,
    TfidfKeywordExtractor,
    UniformSampler,
)
from bottega.types import Prompt, Query
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder
from tests.retrieval.doubles import Memory, Words, WordTokens, about, labelled_text

Make = Callable[[Memory], Retriever]
TOPICS = ("colour", "shape", "sum")


def repeat_question(prompt: Prompt) -> str:
    """Return the question as the apprentice's answer."""
    return str(prompt.messages[-1].parts[-1])


def hashtags(memory: Memory, tree: HashtagTree) -> HashtagRetriever:
    return HashtagRetriever(memory.changes, memory.vectors, memory.embed, memory.search, tree)


def fitted(memory: Memory, tree: HashtagTree) -> HashtagRetriever:
    retrieve = hashtags(memory, tree)
    if memory.examples:
        retrieve.build()
    return retrieve


RETRIEVERS: dict[str, Make] = {
    "dense": lambda m: DenseRetriever(m.search),
    "crossed": lambda m: CrossModalRetriever(m.embed, m.nearest),
    "hybrid": lambda m: DenseRetriever(LateInteractionIndex(m, WordTokens()).search),
    "uniform": lambda m: UniformSampler(m, seed=0),
    "balanced": lambda m: BalancedSampler(m, seed=0),
    "keywords": lambda m: KeywordRetriever(DenseRetriever(m.search), TfidfKeywordExtractor()),
    "probe": lambda m: ResponseProbeRetriever(
        DenseRetriever(m.search),
        ScriptedGenerator(repeat_question),
        InterleavedPrompter(show_choices=False),
        TfidfKeywordExtractor(),
    ),
    "bm25": BM25Retriever,
    "fusion": lambda m: RankFusionRetriever([DenseRetriever(m.search), BM25Retriever(m)], depth=1),
    "hashtags, cold": lambda m: hashtags(m, HashtagTree(3)),
    "hashtags, fixed": lambda m: fitted(m, HashtagTree(3, adapt=False)),
    "hashtags, many": lambda m: fitted(m, HashtagTree(1000)),
    "hashtags, adaptive": lambda m: fitted(
        m, HashtagTree(LeaveOneOutGroupCount(m.vectors, m.vectors))
    ),
}


@pytest.fixture
def memory() -> Memory:
    return Memory([e for i, topic in enumerate(TOPICS) for e in about(topic, 7, start=10 * i)])


@pytest.fixture(params=RETRIEVERS)
def make(request: pytest.FixtureRequest) -> Make:
    return RETRIEVERS[request.param]


@pytest.mark.parametrize("k", [1, 5, 21, 40])
async def test_the_best_k_examples_come_first(make: Make, memory: Memory, k: int) -> None:
    found = await make(memory)(Query("which colour", (solid_image(999),)), k)
    assert len({candidate.example.id for candidate in found}) == len(found) == min(k, 21)
    scores = [candidate.score for candidate in found]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("k", [3, 40])
async def test_the_query_itself_is_never_found(make: Make, memory: Memory, k: int) -> None:
    retrieve = make(memory)
    same_id = Query("colour number 3", (solid_image(999),), id="entry-0003")
    same_image = Query("colour number 3", (solid_image(3),))
    for query in (same_id, same_image):
        found = [candidate.example.id for candidate in await retrieve(query, k)]
        assert "entry-0003" not in found
        assert len(found) == min(k, 20)


async def test_the_same_query_finds_the_same_examples(make: Make, memory: Memory) -> None:
    retrieve, query = make(memory), Query("which shape", (solid_image(999),))
    assert await retrieve(query, 6) == await retrieve(query, 6)


async def test_concurrent_queries_find_the_same_as_single_ones(make: Make, memory: Memory) -> None:
    queries = [Query(f"{topic} number {i}") for topic in TOPICS for i in range(4)]
    retrieve = make(memory)
    together = await asyncio.gather(*(retrieve(query, 5) for query in queries))
    assert together == [await retrieve(query, 5) for query in queries]


async def test_a_text_of_any_kind_is_a_query(make: Make, memory: Memory) -> None:
    for text in ("?", "\N{SNOWMAN} und 猫", "a" * 5000, "{text} %s \\x00"):
        assert len(await make(memory)(Query(text, (solid_image(999),)), 4)) == 4


@pytest.mark.parametrize(
    "name", ["dense", "crossed", "hybrid", "bm25", "fusion", "hashtags, fixed"]
)
async def test_added_examples_are_found_and_deleted_ones_are_not(name: str, memory: Memory) -> None:
    retrieve, query = RETRIEVERS[name](memory), Query("rare zebra")
    assert len(await retrieve(query, 40)) == 21
    memory.add([labelled_text("rare zebra sighted", "zebra", 500)])
    assert (await retrieve(query, 1))[0].example.id == "entry-0500"
    memory.delete(["entry-0500", "entry-0001"])
    left = {candidate.example.id for candidate in await retrieve(query, 40)}
    assert left == set(memory.examples)
    memory.add([labelled_text("rare zebra again", "zebra", 500)])
    assert (await retrieve(query, 1))[0].example.query.text == "rare zebra again"


@pytest.mark.parametrize("name", ["dense", "hybrid", "uniform", "balanced", "bm25", "hashtags"])
async def test_a_knowledge_base_gives_equal_results(name: str) -> None:
    embed = SeededEmbedder()
    with KnowledgeBase.open(":memory:", embed=embed) as knowledge:
        knowledge.add(about("colour", 9) + about("shape", 9, start=20))
        own = knowledge.get_many(knowledge.ids())[4]
        make: dict[str, Callable[[], Retriever]] = {
            "dense": lambda: DenseRetriever(knowledge.search),
            "hybrid": lambda: DenseRetriever(LateInteractionIndex(knowledge, WordTokens()).search),
            "uniform": lambda: UniformSampler(knowledge, seed=0),
            "balanced": lambda: BalancedSampler(knowledge, seed=0),
            "bm25": lambda: BM25Retriever(StaticExamples(knowledge)),
            "hashtags": lambda: HashtagRetriever(
                StaticExamples(knowledge).changes,
                lambda ids: embed.embed([e.query for e in knowledge.get_many(ids)]),
                embed,
                knowledge.search,
                HashtagTree(4, cold_start=1),
            ),
        }
        retrieve = make[name]()
        for k in (2, 40):
            found = [c.example.id for c in await retrieve(own.query, k)]
            assert own.id not in found
            assert len(set(found)) == len(found) == min(k, 17)


@pytest.mark.skipif(not hasattr(KnowledgeBase, "changes"), reason="no change log by id yet")
async def test_changes_of_a_knowledge_base_are_followed() -> None:
    embed = Words()
    with KnowledgeBase.open(":memory:", embed=embed) as knowledge:
        kb: Any = knowledge
        kb.add(about("colour", 20) + about("shape", 20, start=50))
        tree = HashtagTree(LeaveOneOutGroupCount(kb.vectors, kb.vectors), cold_start=10)
        hashtags = HashtagRetriever(kb.changes, kb.vectors, embed, kb.search, tree)
        crossed, query = CrossModalRetriever(embed, kb.nearest), Query("rare zebra")
        late = DenseRetriever(LateInteractionIndex(kb, WordTokens()).search)
        for retrieve in (hashtags, BM25Retriever(kb), crossed, late):
            assert len(await retrieve(query, 99)) == len(kb.ids())
        await hashtags.settled()
        kb.delete(kb.ids()[:3])
        kb.add([labelled_text("rare zebra sighted", "zebra", 99)])
        for retrieve in (hashtags, BM25Retriever(kb), crossed, late):
            found = await retrieve(query, 99)
            assert found[0].example.answer == "zebra"
            assert sorted(str(c.example.id) for c in found) == sorted(kb.ids())
        await hashtags.settled()
