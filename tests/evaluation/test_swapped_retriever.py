from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import NotFoundError, SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import passages_only, plan
from bottega.evaluation.methods.retrieval import (
    EpisodeRetriever,
    OracleRetriever,
    SwappedRetriever,
    episode_pools,
)
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase
from bottega.recipes import Classifier
from bottega.types import Candidate, Example, Query
from tests.evaluation.builders import passage_benchmark


class QueryPassages:
    """Retriever of passages named after the query."""

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        examples = [Example(Query(f"{query.id} {i}", id=f"{query.id}{i}"), "") for i in range(k)]
        return [Candidate(one, float(i)) for i, one in enumerate(examples)]


class FixedPassages:
    """Retriever of the same passages for every query, in the given order."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return [Candidate(Example(Query(one), ""), 0.0) for one in self._texts[:k]]


def items(*answers: str, episodes: str = "") -> Benchmark:
    queries = [Example(Query("?", id=f"q{i}"), answer) for i, answer in enumerate(answers)]
    episode_of = {f"q{i}": episode for i, episode in enumerate(episodes)}
    return Benchmark("three", (Example(Query("p"), ""),), tuple(queries), episode_of=episode_of)


async def shown_texts(retriever: SwappedRetriever, data: Benchmark, k: int) -> list[list[str]]:
    return [[one.example.query.text for one in await retriever(i.query, k)] for i in data.items]


async def test_swapped_passages_come_from_the_next_item_with_another_answer() -> None:
    data = items("red", "red", "blue")

    assert await shown_texts(SwappedRetriever(QueryPassages(), data), data, 1) == [
        ["q2 0"],
        ["q2 0"],
        ["q0 0"],
    ]


async def test_swaps_prefer_items_of_another_episode() -> None:
    data = items("red", "blue", "green", episodes="aab")

    assert await shown_texts(SwappedRetriever(QueryPassages(), data), data, 1) == [
        ["q2 0"],
        ["q2 0"],
        ["q0 0"],
    ]


async def test_equal_answers_cannot_be_swapped() -> None:
    with pytest.raises(SettingError, match="no item has another answer"):
        await SwappedRetriever(QueryPassages(), items("red", "red"))(Query("?", id="q0"), 1)


async def test_passages_with_the_answer_are_skipped() -> None:
    """By the benchmark's rule, which also decides what is relevant in training."""
    data = items("red", "blue")
    passages = FixedPassages("It is red.", "Reddish.", "It is blue.", "Red!", "no")

    retriever = SwappedRetriever(passages, data)
    assert await shown_texts(retriever, data, 2) == [
        ["It is blue.", "no"],
        ["It is red.", "Reddish."],
    ]
    retriever = SwappedRetriever(passages, replace(data, relevance="words"))
    assert (await shown_texts(retriever, data, 5))[0] == ["Reddish.", "It is blue.", "no"]


async def test_passages_with_only_the_answer_cannot_be_swapped() -> None:
    data = items("red", "blue")
    with pytest.raises(SettingError, match="no item has another answer"):
        await SwappedRetriever(FixedPassages("red", "so red"), data)(data.items[0].query, 1)
    assert await SwappedRetriever(FixedPassages(), data)(data.items[0].query, 1) == []


@pytest.mark.parametrize("episodes", [1, 3])
async def test_swaps_never_show_the_gold_passage(episodes: int) -> None:
    data = passage_benchmark(episodes=episodes)
    right = {str(item.query.id): item.tags["passage"] for item in data.items}
    oracles = {
        one: OracleRetriever(pool, right, seed=0) for one, pool in episode_pools(data).items()
    }
    retriever = SwappedRetriever(EpisodeRetriever(data.episode_of, oracles), data)

    for item in data.items:
        ids = [one.example.query.id for one in await retriever(item.query, 5)]
        assert len(ids) == len(set(ids)) == 5
        assert right[str(item.query.id)] not in ids


NAMES = ("bell", "kite", "drum", "lamp")


@pytest.fixture
def own_questions(tmp_path: Path) -> Benchmark:
    """Return a benchmark from JSONL files without question ids."""
    tagged = [
        {"question": f"Where is {n}?", "answer": f"at {n}s", "tags": {"passage": f"p{n}"}}
        for n in NAMES
    ]
    passages = [{"text": f"The {n} is at {n}s.", "id": f"p{n}"} for n in NAMES]
    labelled = [{"question": "What is the sky?", "answer": "blue"}]
    for name, rows in (("examples", labelled), ("queries", tagged), ("passages", passages)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = f"jsonl:{tmp_path / 'examples.jsonl'},{tmp_path / 'queries.jsonl'}"
    data = with_passages(load_benchmark(spec, seed=0), tmp_path / "passages.jsonl")
    return passages_only(data, ["concat"])


async def test_questions_without_ids_get_unique_ids(own_questions: Benchmark) -> None:
    assert len({item.query.id for item in own_questions.items}) == 4
    swapped = await shown_texts(SwappedRetriever(QueryPassages(), own_questions), own_questions, 1)
    assert len({text for (text,) in swapped}) == 4


async def test_oracle_shows_the_named_passage(own_questions: Benchmark) -> None:
    model = ScriptedGenerator(lambda prompt: "answer")
    with KnowledgeBase.open(":memory:", embed=None) as empty:
        settings = Classifier(model, ())
        (oracle,) = plan(RunConfig(methods=["oracle"], shots=(1,)), own_questions, empty, settings)
    for item in own_questions.items:
        trace = (await oracle.answer(item.query)).trace
        assert trace is not None
        assert [one.example.query.id for one in trace.candidates] == [item.tags["passage"]]


def test_unknown_passage_is_named(own_questions: Benchmark) -> None:
    with pytest.raises(NotFoundError, match="passage p9 is unknown"):
        episode_pools(own_questions)[""].get_many(["p9"])


@pytest.mark.parametrize(("id", "message"), [(None, "has no id"), ("q", "is not unique")])
@pytest.mark.parametrize("name", ["oracle", "concat"])
def test_methods_that_use_ids_require_unique_ids(id: str | None, message: str, name: str) -> None:
    queries = [Example(Query(text, id=id), text, tags={"passage": "p"}) for text in ("a", "b")]
    data = Benchmark("two", (Example(Query("p", id="p"), ""),), tuple(queries))
    settings = Classifier(ScriptedGenerator(lambda prompt: "answer"), ())
    with (
        KnowledgeBase.open(":memory:", embed=None) as empty,
        pytest.raises(SettingError, match=message),
    ):
        plan(RunConfig(methods=[name], shots=(1,)), data, empty, settings)
    with pytest.raises(SettingError, match=message):
        SwappedRetriever(QueryPassages(), data)
