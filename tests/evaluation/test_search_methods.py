from __future__ import annotations

from functools import partial

import pytest

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.methods.retrieval import EXCLUDE, bundled_token_embedder, retriever_factory
from bottega.evaluation.methods.searchers import MethodContext
from bottega.evaluation.methods.specifications import METHODS, SEARCH_METHODS
from bottega.evaluation.outcomes import Method
from bottega.evaluation.runs.runner import MethodResult, evaluate
from bottega.evaluation.search_config import SearchConfig, SearchOptions
from bottega.generation import ScriptedGenerator
from bottega.knowledge import (
    KnowledgeBase,
    LateInteractionIndex,
    PixelEmbedder,
    TokenEmbedder,
    TowerEmbedder,
    TowerTokenEmbedder,
)
from bottega.prompting import InterleavedPrompter
from bottega.protocols import Retriever
from bottega.recipes import Classifier, visual_rag
from bottega.recipes.cache_retrieval import CacheRetrieval, RetrievalName
from bottega.types import Candidate, Prompt, Query
from tests.builders import example

SEARCH = SearchConfig(rollouts=4)
ANIMALS = ("cat", "dog", "cow")
EXAMPLES = tuple(example(ANIMALS[i % 3], 40 * i) for i in range(12))
QUERIES = tuple(example(ANIMALS[i % 3], 7 + 300 * i) for i in range(3))
DATA = Benchmark("animals", EXAMPLES, QUERIES, ANIMALS)


class TurnsOnlyGenerator(ScriptedGenerator):
    turns_only = True


def repeat_last_answer(prompt: Prompt) -> str:
    answers = [message.parts[-1] for message in prompt.messages if message.role == "assistant"]
    return str(answers[-1]) if answers else "unknown"


async def run(
    name: str, script: ScriptedGenerator, samples: int | None = None
) -> tuple[Method, MethodResult]:
    settings = Classifier(script, ANIMALS, prompt=InterleavedPrompter())
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        knowledge.add(DATA.knowledge)
        names = ["rcts", name] if name == "majority" else [name]
        planned = plan(
            RunConfig(methods=names, shots=[2], samples=samples, search=SEARCH),
            DATA,
            knowledge,
            settings,
        )
        result, _ = await evaluate(DATA, planned[-1], RunConfig(concurrency=1))
    return planned[-1], result


@pytest.mark.parametrize("name", SEARCH_METHODS)
async def test_search_calls_are_counted_and_limited(name: str) -> None:
    script = TurnsOnlyGenerator(repeat_last_answer)
    method, result = await run(name, script)
    assert (method.name, result.n, result.shots) == (name, 3, 2)
    sampled = sum(call.sampling.n for call in script.calls)
    assert result.calls == sampled > 3
    assert sampled <= 3 * SEARCH.max_calls(script)
    assert result.prompt_tokens > 0
    everything = sum(len(words(call.prompt)) for call in script.calls)
    assert result.prompt_tokens >= everything


def words(prompt: Prompt) -> list[str]:
    texts = [part for m in prompt.messages for part in m.parts if isinstance(part, str)]
    return " ".join(texts).split()


async def test_majority_uses_the_search_budget_by_default() -> None:
    script = TurnsOnlyGenerator(repeat_last_answer)
    await run("majority", script)
    assert script.calls[-1].sampling.n == SEARCH.max_calls(script) == 1 + 4 + 15
    await run("majority", script, samples=3)
    assert script.calls[-1].sampling.n == 3


class RecordingRetriever:
    """Retriever wrapper that records candidates and checks k."""

    def __init__(self, retrieve: Retriever) -> None:
        self.retrieve = retrieve
        self.found: dict[Query, list[Candidate]] = {}

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        self.found[query] = await self.retrieve(query, k)
        assert k == 20
        return self.found[query]


@pytest.mark.parametrize("retrieve", ["hybrid", "image"])
async def test_search_selects_from_the_twenty_nearest_candidates(
    retrieve: RetrievalName,
) -> None:
    examples = tuple(example(ANIMALS[i % 3], 40 * i) for i in range(30))
    data = Benchmark("animals", examples, QUERIES, ANIMALS)
    settings = Classifier(
        TurnsOnlyGenerator(repeat_last_answer), ANIMALS, prompt=InterleavedPrompter()
    )
    pixels = PixelEmbedder()
    retrieval = CacheRetrieval(
        retrieve, image=pixels, text=pixels, tokens=bundled_token_embedder(), exclude=EXCLUDE
    )
    with KnowledgeBase.open(":memory:", embed=pixels) as knowledge:
        knowledge.add(data.knowledge)
        recorder = RecordingRetriever(retriever_factory(retrieval)(data, knowledge))
        [method] = plan(
            RunConfig(methods=["rcts"], shots=[3], search=SearchConfig(rollouts=2)),
            data,
            knowledge,
            settings,
            search=lambda *_: recorder,
        )
        tokens = TowerTokenEmbedder(TowerEmbedder.bundled(threads=1), TokenEmbedder.bundled())
        late = LateInteractionIndex(knowledge, tokens)
        nearest = partial(late.search, exact=True) if retrieve == "hybrid" else knowledge.search
        for item in QUERIES:
            trace = (await method.answer(item.query)).trace
            assert trace is not None and trace.tree is not None
            [matching] = [query for query in recorder.found if query.images == item.query.images]
            found = [one.example.id for one in recorder.found[matching]]
            assert found == [one.example.id for one in nearest(item.query, 20)]
            assert {one.example.id for one in trace.candidates} <= set(found)


def test_reasoning_model_needs_more_search_calls() -> None:
    assert SearchConfig().max_calls(ScriptedGenerator([])) == 111
    assert SearchConfig().max_calls(TurnsOnlyGenerator([])) == 26
    assert SearchConfig(reward="both").max_calls(TurnsOnlyGenerator([])) == 111
    assert SearchConfig(reward="mutual", rollouts=2).max_calls(ScriptedGenerator([])) == 13


def test_the_released_preset_is_that_of_the_benchmark() -> None:
    released = SearchOptions("released", rollouts=3, alpha=None).config("mmmu:folder")
    assert (released.variant, released.alpha, released.rollouts) == ("released", 0.5, 3)
    assert SearchOptions("released").config("scienceqa:folder").alpha == 0.2
    assert SearchOptions("released").config("vsr-mc:folder").reward == "mutual"
    assert SearchOptions("released", alpha=0.8).config("mmmu:folder").alpha == 0.8
    assert SearchOptions("paper").config("vizwiz:folder") == SearchConfig()
    # One answer, and five samples of each of five questions.
    calls = SearchOptions("released").config("vizwiz:folder").max_calls(ScriptedGenerator([]))
    assert calls == 1 + 10 * 26


def test_records_name_only_settings_that_differ() -> None:
    assert SearchConfig(rollouts=7).record() == {"rollouts": 7}
    assert SearchConfig().record() == {"rollouts": 10}
    changed = SearchOptions("released").config("mmmu:folder").record()
    assert changed == {"rollouts": 10, "search": {"alpha": 0.5, "variant": "released"}}


@pytest.mark.parametrize("name", SEARCH_METHODS)
async def test_search_fetches_at_least_as_many_as_it_shows(name: str) -> None:
    model = TurnsOnlyGenerator(repeat_last_answer)
    build = METHODS[name].build
    assert build is not None
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        plain = visual_rag(knowledge, model, labels=ANIMALS)
    fetched = [
        build(plain, MethodContext(DATA, model, RunConfig(search=SEARCH), shots=shots)).fetch
        for shots in (2, 25)
    ]
    assert fetched == [20, 25]
