from __future__ import annotations

from pathlib import Path

import pytest

from bottega.compression import passage_store as store
from bottega.compression import persistence
from bottega.errors import LoadError, SettingError, StoreError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig, compressor_identity
from bottega.evaluation.methods.planning import (
    check_benchmark_fit,
    check_compressor,
    needs_search,
    passages_only,
    plan,
)
from bottega.evaluation.methods.retrieval import LateInteractionScorer, RescoredRetriever
from bottega.evaluation.methods.searchers import GOLD_SCORE
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import ScriptedGenerator, bundled
from bottega.knowledge import KnowledgeBase
from bottega.protocols import Generator
from bottega.recipes import Classifier
from bottega.recipes.racc import COMPRESSOR, STORE
from bottega.types import Candidate, Example, Query, Sampling

NAMES = ("zero-shot", "concat", "racc", "racc-oracle", "racc-flat", "racc-swapped")


@pytest.fixture(scope="module")
def facts() -> Benchmark:
    return load_benchmark("facts", seed=0, limit=4)


def settings(generator: Generator) -> Classifier:
    return Classifier(generator, (), sampling=Sampling(max_tokens=16))


async def accuracies(data: Benchmark, generator: Generator) -> dict[str, float]:
    with KnowledgeBase.open(":memory:", embed=None) as empty:
        methods = plan(RunConfig(methods=NAMES, shots=(5,)), data, empty, settings(generator))
        runs = [await evaluate(data, method) for method in methods]
    return {result.method: result.value or 0.0 for result, _ in runs}


async def test_bundled_compressor_uses_passages_beyond_their_scores(
    facts: Benchmark,
) -> None:
    found = await accuracies(facts, bundled())

    assert found["zero-shot"] == 0.0
    assert found["racc-swapped"] <= 0.1
    assert min(found[name] for name in ("racc", "racc-oracle", "racc-flat")) >= 0.7


def test_bundled_compressor_requires_the_bundled_model(facts: Benchmark) -> None:
    with (
        KnowledgeBase.open(":memory:", embed=None) as empty,
        pytest.raises(SettingError, match="no bundled compressor"),
    ):
        plan(
            RunConfig(methods=["racc"], shots=(5,)),
            facts,
            empty,
            settings(ScriptedGenerator("said")),
        )


def test_model_without_compression_is_rejected(facts: Benchmark) -> None:
    with (
        KnowledgeBase.open(":memory:", embed=None) as empty,
        pytest.raises(SettingError, match="--hyper needs a method that compresses"),
    ):
        plan(
            RunConfig(methods=["concat"], shots=(5,)),
            facts,
            empty,
            settings(bundled()),
            hyper=bundled("master"),
        )


def test_gold_passages_need_no_knowledge_base(facts: Benchmark) -> None:
    assert not needs_search(NAMES, facts)


def test_compression_requires_passages() -> None:
    digits = load_benchmark("digits", seed=0, limit=5)

    with pytest.raises(SettingError, match="concat, racc need passages"):
        check_benchmark_fit(RunConfig(methods=["concat", "racc"]), digits)


def test_labelled_examples_are_not_passages() -> None:
    passage, labelled = Example(Query("p"), ""), Example(Query("Who?"), "Ann")
    mixed = Benchmark("both", (labelled, passage), (Example(Query("?", id="q"), "Bob"),))

    assert passages_only(mixed, ["zero-shot", "concat", "racc"]).knowledge == (passage,)
    for names in (["zero-shot"], ["top-k"], ["top-k", "racc"]):
        assert passages_only(mixed, names) == mixed
    with pytest.raises(SettingError, match="got labelled questions of both"):
        check_benchmark_fit(RunConfig(methods=["top-k", "racc"]), mixed)
    names = ["concat", "racc"]
    check_benchmark_fit(RunConfig(methods=names), passages_only(mixed, names))


class QueryPassages:
    """Retriever of passages named after the query."""

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        examples = [Example(Query(f"{query.id} {i}", id=f"{query.id}{i}"), "") for i in range(k)]
        return [Candidate(one, float(i)) for i, one in enumerate(examples)]


async def test_controls_change_only_scores() -> None:
    found = RescoredRetriever(
        QueryPassages(), lambda query, one: GOLD_SCORE * (one.example.query.id == "q01")
    )

    shown = await found(Query("?", id="q0"), 3)

    assert [one.score for one in shown] == [0.0, GOLD_SCORE, 0.0]
    assert [one.example.query.id for one in shown] == ["q00", "q01", "q02"]


async def test_late_interaction_ranks_the_matching_passage_first() -> None:
    class TwoPassages:
        async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
            texts = ("The home of babra is lavim", "The food of babra is trebral")
            return [Candidate(Example(Query(text), ""), 0.0) for text in texts]

    home, food = await LateInteractionScorer(TwoPassages())(Query("What is its home?"), 2)

    assert home.score > food.score


def test_empty_folder_is_rejected_before_loading(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no compressor in .*: compressor.json is missing"):
        check_compressor(RunConfig(methods=["racc"], compressor=tmp_path))
    with pytest.raises(StoreError, match="no compressed passages"):
        check_compressor(RunConfig(methods=["racc"], store=tmp_path))
    with pytest.raises(SettingError, match="--compressor needs a method that compresses"):
        check_compressor(RunConfig(methods=["concat"], compressor=tmp_path))


def test_fingerprint_changes_with_the_compressor_and_the_store(tmp_path: Path) -> None:
    assert (*COMPRESSOR, STORE) == (persistence.SETTINGS, persistence.WEIGHTS, store.MANIFEST)
    for name in (*COMPRESSOR, STORE):
        (tmp_path / name).write_text("one")
    before = compressor_identity(tmp_path, tmp_path)
    (tmp_path / "losses.jsonl").write_text("not its own")
    assert compressor_identity(tmp_path, tmp_path) == before
    assert compressor_identity(None, None) == {}
    for name, changed_key in zip(
        (*COMPRESSOR, STORE),
        ("compressor_digest", "compressor_digest", "store_manifest"),
        strict=True,
    ):
        (tmp_path / name).write_text("other")
        after = compressor_identity(tmp_path, tmp_path)
        assert [key for key in before if after[key] != before[key]] == [changed_key]
        before = after
