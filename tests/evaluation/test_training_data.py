"""Tests of training examples from benchmarks with and without gold passages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, answers_of, contains_answer, is_relevant
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.benchmarks.passages import with_passages
from bottega.evaluation.config import Relevance
from bottega.evaluation.methods.retrieval import ExamplePool, LateInteractionScorer
from bottega.evaluation.methods.training_data import (
    GoldPassageSampler,
    RetrievedPassageSampler,
    names_gold_passages,
    passages_of,
    split_validation,
    training_items,
)
from bottega.protocols import Vectors
from bottega.types import Candidate, Example, Query
from tests.builders import solid_image
from tests.evaluation.benchmarks.test_okvqa import published
from tests.evaluation.builders import passage_benchmark


class LetterEmbedder:
    """Token embedder with a one-hot vector per letter."""

    fingerprint, dimension = "letters", 128

    def embed_queries(self, queries: list[Query]) -> list[Vectors]:
        rows = np.eye(128, dtype=np.float32)
        return [rows[[min(ord(letter), 127) for letter in query.text]] for query in queries]

    embed_documents = embed_queries


def sampler_of(data: Benchmark, **changes: object) -> GoldPassageSampler:
    usual = {"seed": 3, "shots": 3, "batch": 4, "tokens": LetterEmbedder()}
    return GoldPassageSampler(data.items, data.knowledge, **{**usual, **changes})  # type: ignore[arg-type]


class FirstPassages:
    """Retriever of the first passages of the benchmark."""

    def __init__(self, data: Benchmark, limit: int = 99) -> None:
        self.pool, self.queries, self.limit = ExamplePool(data.knowledge), list[str](), limit

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        self.queries.append(str(query.id))
        ids = self.pool.ids()[: min(k, self.limit)]
        return [Candidate(one, 9.0 - i) for i, one in enumerate(self.pool.get_many(ids))]


def test_gold_passage_is_among_passages_of_its_episode() -> None:
    data = passage_benchmark()
    right = {str(item.query.id): item.tags["passage"] for item in data.items}
    positions = set()
    for step in range(20):
        for example in sampler_of(data)(step):
            shown = [str(one.id) for one in example.passages]
            assert len(set(shown)) == 3
            assert len({data.episode_of[id] for id in (str(example.query.id), *shown)}) == 1
            assert [id == right[str(example.query.id)] for id in shown] == list(example.relevant)
            positions.add(example.relevant.index(True))
    assert positions == {0, 1, 2}


def test_examples_depend_only_on_step_and_seed() -> None:
    data = passage_benchmark()
    assert sampler_of(data)(5) == sampler_of(data)(5)
    assert sampler_of(data)(5) != sampler_of(data)(6)
    assert sampler_of(data)(5) != sampler_of(data, seed=4)(5)


async def test_training_scores_match_evaluation() -> None:
    data = passage_benchmark()
    (example, *_) = sampler_of(data)(0)

    class ExamplePassages:
        async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
            return [Candidate(one, 0.0) for one in example.passages]

    found = await LateInteractionScorer(ExamplePassages(), LetterEmbedder())(example.query, 3)  # type: ignore[arg-type]
    assert [one.score for one in found] == list(example.scores)


@pytest.mark.parametrize("hard", [0.0, 1.0])
def test_hard_examples_show_passages_about_the_same_subject(hard: float) -> None:
    data = load_benchmark("facts:queries=3,episodes=1", seed=1)
    tags = {str(one.query.id): one.tags for one in data.knowledge}
    shared = []
    for example in sampler_of(data, hard=hard).sample(40, 0):
        about = [tags[str(one.id)] for one in example.passages]
        right = about.pop(example.relevant.index(True))
        both = [sum(one[tag] == right[tag] for one in about) for tag in ("name", "relation")]
        shared.append(all(both))
    assert all(shared) if hard else sum(shared) < 10


def test_passages_with_the_answer_are_relevant() -> None:
    passages = ("the owl eats mice", "the fowl eats corn", "an OWL")
    knowledge = tuple(Example(Query(text, id=text), "") for text in passages)
    items = [Example(Query("which bird?", (solid_image(1),)), answer) for answer in ("Owl", "fowl")]
    data = Benchmark("birds", knowledge, tuple(items))
    retrieve = FirstPassages(data)
    sampler = RetrievedPassageSampler(data, data.items, retrieve, seed=0, shots=3, batch=20)

    made = {example.answer: example for example in sampler(0)}

    assert made["Owl"].relevant == (True, True, True)  # "fowl" contains "owl"
    assert made["fowl"].relevant == (False, True, False)
    assert made["Owl"].scores == (9.0, 8.0, 7.0)
    assert len(retrieve.queries) == 2  # retrieved once per item
    of_words = RetrievedPassageSampler(
        replace(data, relevance="words"), data.items, retrieve, seed=0, shots=3
    )
    assert of_words.of(items[:1])[0].relevant == (True, False, True)
    with pytest.raises(SettingError, match="needs 3 passages, got 2 for 'which bird\\?'"):
        RetrievedPassageSampler(data, data.items, FirstPassages(data, limit=2), seed=0, shots=3)(0)


def test_demonstrations_with_the_answer_are_relevant() -> None:
    """A question that contains the answer is not enough."""
    answers = ("Red", "green", "red", "dark red")
    shown = [
        Example(Query("is it red?", (solid_image(i),), id=f"shown{i}"), answer)
        for i, answer in enumerate(answers)
    ]
    item = Example(Query("which tint?", (solid_image(9),)), "red")
    data = Benchmark("tints", tuple(shown), (item,))

    (example,) = RetrievedPassageSampler(data, data.items, FirstPassages(data), seed=0, shots=4).of(
        [item]
    )

    assert example.relevant == (True, False, True, False)
    assert [one.answer for one in example.passages] == list(answers)
    with pytest.raises(SettingError, match=r"at most the number of passages \(4\), got 5"):
        RetrievedPassageSampler(data, data.items, FirstPassages(data), seed=0, shots=5)


@pytest.mark.parametrize(
    ("passage", "answers", "rules"),
    [
        ("where they start", ["art"], "contains stems"),
        ("SURFERS hang ten", ["surf"], "contains stems"),
        ("hot dogs", ["hot dog"], "contains stems"),
        ("the surfing  boards", ["surf board"], "stems"),
        ("surf the board", ["surf board"], ""),
        ("a piece of ART.", ["art"], "contains stems words"),
        ("New\nYork in snow", ["new york"], "contains stems words"),
        ("die STRASSE", ["straße"], "contains stems words"),
        ("C++ is fast", ["c++"], "contains stems words"),
        ("Cc is fast", ["c++"], ""),
        ("nothing", ["", "something"], ""),
        ("the second of two", ["first", "second"], "contains stems words"),
        ("the second of two", [], ""),
    ],
)
def test_rules_find_answers_in_any_case(passage: str, answers: list[str], rules: str) -> None:
    found = [rule for rule in get_args(Relevance) if contains_answer(passage, answers, rule)]
    assert found == rules.split()
    assert contains_answer(passage, answers) == ("contains" in found)


def test_training_items_have_all_annotator_answers(tmp_path: Path) -> None:
    """Query-set items are reserved for evaluation."""
    data = load_benchmark(f"okvqa:{published(tmp_path, train2014=[1, 2], val2014=[7])}", seed=0)
    (tmp_path / "passages.csv").write_text("kid,text\n1,They surf.\n2,They sleep.\n")
    data = with_passages(data, tmp_path / "passages.csv")

    items = training_items(data)

    assert {item.query.id for item in items} == {"15", "25"}
    assert set(answers_of(data, items[0])) == {"surf", "swim"}
    surfing = Example(Query("Surfboards are for surfing."), "")
    assert is_relevant(data, items[0], surfing)
    assert not is_relevant(replace(data, relevance="words"), items[0], surfing)
    assert len(passages_of(data)) == 2
    assert not names_gold_passages(items, passages_of(data))


def test_synthetic_tasks_train_on_their_items() -> None:
    data = passage_benchmark()
    assert training_items(data) == data.items
    assert names_gold_passages(data.items, data.knowledge)
    assert answers_of(data, data.items[0]) == ("h00",)


def test_validation_items_are_not_trained_on() -> None:
    items = passage_benchmark().items
    rest, aside = split_validation(items, 3, 0)
    assert len(aside) == 3
    assert {one.id for one in rest} | {one.id for one in aside} == {one.id for one in items}
    assert len(rest) + 3 == len(items)
    assert split_validation(items, 3, 0) == (rest, aside)
    assert split_validation(items, 0, 0) == (items, ())
    with pytest.raises(SettingError, match="must be below the number of questions"):
        split_validation(items, len(items), 0)


def test_batches_do_not_mix_queries_with_and_without_images() -> None:
    data = passage_benchmark()
    bare = [replace(one, query=replace(one.query, images=())) for one in data.items[::2]]
    sampler = sampler_of(replace(data, items=(*data.items[1::2], *bare)))
    kinds = [{bool(one.query.images) for one in sampler(step)} for step in range(20)]
    assert all(len(kind) == 1 for kind in kinds)
    assert {True} in kinds and {False} in kinds


def test_examples_can_mix_passages_with_and_without_images() -> None:
    data = passage_benchmark()
    seen = Example(Query("seen", (solid_image(1),), id="seen"), "", tags={"episode": "0"})
    sampler = sampler_of(replace(data, knowledge=(*data.knowledge, seen)))
    shown = [
        {bool(passage.query.images) for passage in one.passages} for one in sampler.sample(40, 0)
    ]
    assert {True, False} in shown


def test_missing_passages_raise() -> None:
    data = passage_benchmark()
    with pytest.raises(SettingError, match=r"at most the number of passages \(6\), got 7"):
        sampler_of(data, shots=7)
    with pytest.raises(SettingError, match="no passages"):
        passages_of(replace(data, knowledge=data.items))
