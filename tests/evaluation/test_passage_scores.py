"""A benchmark's own retrieval scores reach the methods that read passages, and training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, fingerprint
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.methods.retrieval import ExamplePool, ScoredPassageRetriever
from bottega.evaluation.methods.searchers import GOLD_SCORE, equal_scores, gold_scores
from bottega.evaluation.methods.training_data import GoldPassageSampler
from bottega.generation import ScriptedGenerator, bundled
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classifier
from bottega.types import Candidate, Query, Sampling
from tests.evaluation.builders import passage_benchmark


def scored_homes() -> Benchmark:
    """Return homes in which each item's own and the next passage have scores; the latter is
    higher."""
    data = passage_benchmark()
    scores = {}
    for item in data.items:
        _, episode, number = str(item.query.id).split("-")
        scores[str(item.query.id)] = {
            f"p-{episode}-{number}": 0.3,
            f"p-{episode}-{(int(number) + 1) % 6}": 0.7,
        }
    return replace(data, passage_scores=scores)


def by_id(found: list[Candidate]) -> dict[str, float]:
    return {str(one.example.query.id): one.score for one in found}


async def test_scored_passages_are_retrieved_with_their_scores() -> None:
    data = scored_homes()
    retrieve = ScoredPassageRetriever(ExamplePool(data.knowledge), data.passage_scores, seed=0)
    query = Query("What is its home?", id="q-0-2")

    assert by_id(await retrieve(query, 2)) == {"p-0-2": 0.3, "p-0-3": 0.7}
    assert by_id(await retrieve(query, 1)) == {"p-0-3": 0.7}
    assert await retrieve(query, 2) == await retrieve(query, 2)
    more = by_id(await retrieve(query, 4))
    assert more.items() > {"p-0-2": 0.3, "p-0-3": 0.7}.items()
    assert sorted(more.values()) == [0.0, 0.0, 0.3, 0.7]


async def test_order_reveals_nothing_about_the_scores() -> None:
    pool = ExamplePool(passage_benchmark().knowledge)
    scores = {f"{n}": {"p-0-0": 0.9, "p-0-1": 0.1} for n in range(300)}
    retrieve = ScoredPassageRetriever(pool, scores, seed=0)
    found = [await retrieve(Query("?", id=id), 2) for id in scores]
    assert 110 < sum(one[0].score == 0.9 for one in found) < 190
    other = ScoredPassageRetriever(pool, scores, seed=1)
    assert [await other(Query("?", id=id), 2) for id in scores] != found


async def test_methods_read_the_scores_of_the_benchmark() -> None:
    data = scored_homes()
    settings = Classifier(ScriptedGenerator(["h00"] * 3), ())
    with KnowledgeBase.open(":memory:", embed=None) as empty:
        [two] = plan(RunConfig(methods=["concat"], shots=(2,)), data, empty, settings)
        [one] = plan(RunConfig(methods=["concat"], shots=(1,)), data, empty, settings)
    shown = (await two.answer(data.items[7].query)).trace
    highest = (await one.answer(data.items[7].query)).trace
    assert shown is not None and highest is not None
    assert by_id(list(shown.candidates)) == {"p-1-1": 0.3, "p-1-2": 0.7}
    assert by_id(list(highest.candidates)) == {"p-1-2": 0.7}

    retrieve = ScoredPassageRetriever(ExamplePool(data.knowledge), data.passage_scores, seed=0)
    query = data.items[0].query
    assert by_id(await equal_scores(retrieve, data)(query, 2)) == {"p-0-0": 0.0, "p-0-1": 0.0}
    assert by_id(await gold_scores(retrieve, data)(query, 2)) == {
        "p-0-0": GOLD_SCORE,
        "p-0-1": 0.0,
    }


async def test_compressors_get_the_scores() -> None:
    data = load_benchmark("contradictions:queries=1,episodes=1", seed=0)
    [item] = data.items
    scores = data.passage_scores[str(item.query.id)]
    names = ["racc", "racc-flat", "racc-oracle"]
    settings = Classifier(bundled(), (), sampling=Sampling(max_tokens=16))
    with KnowledgeBase.open(":memory:", embed=None) as empty:
        methods = plan(RunConfig(methods=names, shots=(2,)), data, empty, settings)
        traces = [(await method.answer(item.query)).trace for method in methods]
    racc, flat, oracle = (by_id(list(one.candidates)) for one in traces if one)
    assert racc == scores
    assert flat == dict.fromkeys(scores, 0.0)
    assert oracle == {id: GOLD_SCORE * (id == item.tags["passage"]) for id in scores}


class NoEmbedder:
    """Token embedder that must not be used."""

    fingerprint, dimension = "none", 1

    def embed_queries(self, queries: list[Query]) -> list[object]:
        raise AssertionError("the benchmark has its own scores")

    embed_documents = embed_queries


def sampler_of(data: Benchmark, **changes: object) -> GoldPassageSampler:
    usual = {"seed": 3, "shots": 3, "batch": 4, "hard": 0.0, "tokens": NoEmbedder()}
    settings = {**usual, "scores": data.passage_scores, **changes}
    return GoldPassageSampler(data.items, data.knowledge, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("hard", [0.0, 1.0])
def test_training_examples_have_the_scores_of_evaluation(hard: float) -> None:
    data = load_benchmark("contradictions:queries=5,episodes=2", seed=1)
    positions = set()
    for example in sampler_of(data, hard=hard).sample(40, 0):
        scores = data.passage_scores[str(example.query.id)]
        shown = [str(one.query.id) for one in example.passages]
        assert len(set(shown)) == 3 > len(scores) == 2
        assert set(scores) < set(shown)
        assert example.scores == tuple(scores.get(id, 0.0) for id in shown)
        right = example.passages[example.relevant.index(True)]
        assert sum(example.relevant) == 1
        assert example.answer in right.query.text.split()
        positions.add(example.relevant.index(True))
    assert positions == {0, 1, 2}


def test_training_needs_room_for_all_scored_passages() -> None:
    with pytest.raises(SettingError, match=r"number of scored passages \(2\), got 1"):
        sampler_of(scored_homes(), shots=1)


def test_fingerprint_covers_the_scores_of_items() -> None:
    data = scored_homes()
    other = {**data.passage_scores, "q-0-0": {"p-0-0": 0.4, "p-0-1": 0.7}}
    assert fingerprint(replace(data, passage_scores=other)) != fingerprint(data)
    assert fingerprint(replace(data, passage_scores={**other, "q-0-0": {}})) != fingerprint(data)
    # Data without scores keep the fingerprints of earlier runs.
    assert fingerprint(replace(data, passage_scores={})) == fingerprint(passage_benchmark())


def test_options_with_decimals_are_read() -> None:
    data = load_benchmark("contradictions:queries=2,episodes=1,reliability=0.25", seed=0)
    assert len(data.items) == 2
    with pytest.raises(SettingError, match=r"reliability must be a number, got '\.5e1'"):
        load_benchmark("contradictions:reliability=.5e1", seed=0)
    with pytest.raises(SettingError, match=r"queries must be a number, got '0\.5'"):
        load_benchmark("contradictions:queries=0.5", seed=0)
