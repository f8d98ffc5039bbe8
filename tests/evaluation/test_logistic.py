"""Tests of logistic regression on stored vectors: agreement with scikit-learn, exclusion, scope."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from bottega.errors import SettingError
from bottega.evaluation.benchmark import labelled_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods import logistic
from bottega.evaluation.methods.logistic import (
    ALL_LABELS,
    C_VALUES,
    DEFAULT_C,
    ClassIndices,
    KnowledgeBaseLogistic,
    LabelledVectors,
    LogisticClassifier,
    LogisticModel,
    _folds,
    check_labelled,
    select_c,
)
from bottega.evaluation.methods.planning import check_benchmark_fit, default_methods, plan
from bottega.evaluation.outcomes import Method
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.protocols import Vectors
from bottega.recipes import Classifier
from bottega.types import Example, Query
from tests.builders import example, solid_image
from tests.evaluation.builders import episodic_benchmark, passage_benchmark

SHADES, HOMES = episodic_benchmark(), passage_benchmark()
LABELS = st.lists(st.sampled_from("abc"), min_size=1, max_size=12)


def clouds(
    *labels: str, noise: float = 0.2, seed: int = 0, dimension: int = 6
) -> tuple[Vectors, tuple[tuple[str, ...], ...]]:
    """Return a unit vector near the axis of each label."""
    rng = np.random.default_rng(seed)
    axes = {label: np.eye(dimension)[index] for index, label in enumerate(sorted(set(labels)))}
    rows = np.stack([axes[label] + noise * rng.normal(size=dimension) for label in labels])
    unit = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit, tuple((label,) for label in labels)


def labelled(vectors: Vectors, labels: Sequence[tuple[str, ...]]) -> LabelledVectors:
    return LabelledVectors(tuple(map(str, range(len(labels)))), vectors, tuple(labels))


def test_probabilities_are_those_of_scikit_learn() -> None:
    vectors, labels = clouds(*"aabbbccccab", noise=0.5)
    queries, _ = clouds(*"abcabc", noise=0.5, seed=1)
    peer = LogisticRegression(C=10.0, max_iter=1000).fit(vectors, [label for (label,) in labels])
    ours = LogisticClassifier(labelled(vectors, labels), c_by_label={ALL_LABELS: 10.0})
    for query, row in zip(queries, peer.predict_proba(queries), strict=True):
        answer = ours(query)
        assert answer.labels == (peer.classes_[row.argmax()],)
        assert answer.confidence == pytest.approx(row.max(), abs=1e-4)


def test_selected_c_minimizes_the_held_out_loss() -> None:
    """Overlapping classes need a strong penalty, separate ones a weak penalty."""
    targets = np.repeat([0, 1], 60)
    rng = np.random.default_rng(0)
    shift = np.where(targets == 1, 0.5, -0.5)[:, None]
    signal = rng.normal(size=(120, 1)) / 20 + shift
    unrelated = rng.normal(size=(120, 30)).astype(np.float32)
    separate = np.hstack([signal, unrelated / 20]).astype(np.float32)
    assert select_c(unrelated, targets, seed=0) == C_VALUES[0]
    assert select_c(separate, targets, seed=0) == C_VALUES[-1]


def test_tuning_is_repeatable_for_a_seed() -> None:
    vectors, _ = clouds(*"ab" * 30, noise=0.8)
    targets = np.array([0, 1] * 30)
    first, again, other = (_folds(targets, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()
    assert select_c(vectors, targets, seed=1) == select_c(vectors, targets, seed=1)


@given(LABELS)
def test_no_fold_holds_a_whole_class(labels: list[str]) -> None:
    targets = np.array([ord(label) for label in labels])
    fold_of = _folds(targets, np.random.default_rng(0))
    for target in set(targets):
        own = fold_of[targets == target]
        if len(own) == 1:
            assert own[0] == -1
        else:
            assert (own >= 0).all()
            assert len(set(own)) > 1


def test_one_example_per_class_uses_the_default_penalty() -> None:
    vectors, labels = clouds(*"abc", noise=0.0)
    assert select_c(vectors, np.arange(3), seed=0) == DEFAULT_C
    classify = LogisticClassifier(labelled(vectors, labels))
    assert [classify(vector).text for vector in vectors] == ["a", "b", "c"]


def test_one_class_is_certain_and_no_class_is_invalid() -> None:
    vectors, labels = clouds(*"aaa")
    answer = LogisticClassifier(labelled(vectors, labels))(-vectors[0])
    assert (answer.labels, answer.confidence) == (("a",), 1.0)
    empty = LogisticClassifier(labelled(vectors[:0], ()))(vectors[0])
    assert (empty.valid, empty.labels) == (False, ())


@settings(max_examples=20)
@given(LABELS, st.integers(0, 11))
def test_a_duplicate_never_lowers_the_probability_of_its_label(
    labels: list[str], index: int
) -> None:
    """The optimum of a convex loss moves towards a term whose weight grows."""
    index %= len(labels)
    vectors, _ = clouds(*labels, noise=0.6)
    targets = np.array([ord(label) for label in labels])
    rows = [*range(len(labels)), index]
    before = LogisticModel(vectors, targets, 1.0)
    after = LogisticModel(vectors[rows], targets[rows], 1.0)
    own = int(targets[index])
    assert after.probability(vectors[index], own) >= before.probability(vectors[index], own) - 1e-3


def test_multi_label_returns_every_probable_label() -> None:
    vectors, _ = clouds(*"abc" * 6, noise=0.05)
    labels = [("a",), ("b",), ("a", "b")] * 6
    both = vectors[0] + vectors[1]
    rows = np.stack([vectors[0], vectors[1], both / np.linalg.norm(both)] * 6)
    classify = LogisticClassifier(labelled(rows, labels), multi_label=True)
    assert [set(classify(row).labels) for row in rows[:3]] == [{"a"}, {"b"}, {"a", "b"}]
    assert classify(rows[2]).confidence is None


def test_labels_of_every_multi_label_example_are_certain() -> None:
    vectors, _ = clouds(*"ab" * 4, noise=0.05)
    labels = [("x", "a"), ("x",)] * 4
    classify = LogisticClassifier(labelled(vectors, labels), multi_label=True)
    assert all("x" in classify(row).labels for row in vectors)


def filled(*examples: Example, namespace: str = "") -> KnowledgeBase:
    knowledge = KnowledgeBase.open(":memory:", embed=PixelEmbedder(), namespace=namespace)
    knowledge.add(examples)
    return knowledge


def shades(label: str, start: int, count: int) -> list[Example]:
    return [example(label, start + 3 * index) for index in range(count)]


def test_an_example_is_never_its_own_training_data() -> None:
    """One image has a wrong label: only the other examples decide about it."""
    wrong = example("b", 1)
    with filled(*shades("a", 10, 6), wrong, *shades("b", 60_000, 6)) as knowledge:
        without = KnowledgeBaseLogistic(knowledge)
        assert without.answer(wrong.query).text == "a"
        with_it = KnowledgeBaseLogistic(knowledge, exclude="same-question")
        other = replace(wrong.query, text="Another question?")
        confidence = [without.answer(other).confidence, with_it.answer(other).confidence]
        assert confidence[0] is not None
        assert confidence[1] is not None
        assert confidence[0] > confidence[1]


def test_the_only_example_leaves_no_label_for_its_own_image() -> None:
    with filled(only := example("a", 1)) as knowledge:
        method = KnowledgeBaseLogistic(knowledge)
        assert not method.answer(only.query).valid
        assert method.answer(example("?", 9).query).text == "a"


def test_within_restricts_the_training_data() -> None:
    with filled(*shades("a", 10, 3), *shades("b", 40_000, 3), *shades("c", 60_000, 3)) as knowledge:
        ids = [*knowledge.ids(label="a"), *knowledge.ids(label="c")]
        query = example("?", 40_001).query
        assert KnowledgeBaseLogistic(knowledge).answer(query).text == "b"
        assert KnowledgeBaseLogistic(knowledge, within=ids).answer(query).text in ("a", "c")


def test_another_namespace_is_no_training_data(tmp_path: object) -> None:
    path = f"{tmp_path}/k.db"
    for namespace, label in (("one", "a"), ("two", "b")):
        with KnowledgeBase.open(path, embed=PixelEmbedder(), namespace=namespace) as knowledge:
            knowledge.add(shades(label, 10, 3))
    with KnowledgeBase.open(path, embed=PixelEmbedder(), namespace="two") as knowledge:
        answer = KnowledgeBaseLogistic(knowledge).answer(example("?", 11).query)
        assert (answer.text, answer.confidence) == ("b", 1.0)


def test_passages_are_rejected() -> None:
    passage = Example(Query("A passage", (solid_image(1),)), "")
    with (
        filled(passage, example("a", 9)) as knowledge,
        pytest.raises(SettingError, match="got 1 passage without an answer"),
    ):
        check_labelled(knowledge, "logreg")


def planned(knowledge: KnowledgeBase, *names: str) -> list[Method]:
    config = RunConfig(methods=names, shots=[1, 2])
    return plan(config, SHADES, knowledge, Classifier(ScriptedGenerator([]), []))


async def test_eval_fits_each_episode_once_for_all_shots() -> None:
    with filled(*SHADES.knowledge) as knowledge:
        [method] = planned(knowledge, "logreg")
        result, scored = await evaluate(SHADES, method)
    assert (method.name, method.shots, result.calls) == ("logreg", 0, 0)
    assert (result.n, result.value) == (len(SHADES.items), 1.0)
    assert all(0.5 < (one.answer.confidence or 0) <= 1 for one in scored)
    assert any(figure.metric.startswith("ece") for figure in result.also)


def test_open_answers_and_searches_without_vectors_are_rejected() -> None:
    open_answers = replace(
        labelled_benchmark("free", [example("a", 1)], [example("b", 2)]), labels=()
    )
    with pytest.raises(SettingError, match="needs a set of labels, got open answers in free"):
        check_benchmark_fit(RunConfig(methods=["logreg"]), open_answers)
    with pytest.raises(SettingError, match="got retrieval by bm25"):
        check_benchmark_fit(RunConfig(methods=["logreg"], retrieve="bm25"), SHADES)
    with pytest.raises(SettingError, match="logreg needs labels, got passages"):
        check_benchmark_fit(RunConfig(methods=["logreg"]), HOMES)
    assert "logreg" not in default_methods(open_answers)
    assert "logreg" not in default_methods(SHADES, "bm25")
    assert "knn" in default_methods(SHADES, "bm25")
    for name in ("logreg", *default_methods(SHADES)):
        check_benchmark_fit(RunConfig(methods=[name]), SHADES)


def test_selected_c_has_the_lowest_log_loss_of_scikit_learn() -> None:
    labels = "abc" * 20
    vectors, _ = clouds(*labels, noise=0.5)
    targets = np.array([ord(label) for label in labels])
    rng = np.random.default_rng(3)
    rng.permutation(len(targets))  # as in the sampling of `select_c`
    fold_of = _folds(targets, rng)

    def loss(c: float) -> float:
        total = 0.0
        for fold in set(fold_of):
            rest, held_out = fold_of != fold, fold_of == fold
            peer = LogisticRegression(C=c, max_iter=1000).fit(vectors[rest], targets[rest])
            probabilities = peer.predict_proba(vectors[held_out])
            total += log_loss(
                targets[held_out], probabilities, labels=peer.classes_, normalize=False
            )
        return total

    best = min(C_VALUES, key=loss)
    assert best not in (C_VALUES[0], C_VALUES[-1])
    assert select_c(vectors, targets, seed=3) == best


def test_small_classes_are_spread_over_all_folds() -> None:
    targets = np.repeat(np.arange(10), 2)
    fold_of = _folds(targets, np.random.default_rng(0))
    assert np.bincount(fold_of).tolist() == [4] * 5


def test_tuning_uses_a_sample_of_many_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "MAX_TUNED", 40)
    sizes: list[int] = []

    class CountedModel(LogisticModel):
        def __init__(self, vectors: Vectors, targets: ClassIndices, c: float) -> None:
            sizes.append(len(targets))
            super().__init__(vectors, targets, c)

    monkeypatch.setattr(logistic, "LogisticModel", CountedModel)
    vectors, labels = clouds(*"ab" * 100)
    LogisticClassifier(labelled(vectors, labels))
    assert set(sizes[:-1]) == {32}
    assert sizes[-1] == 200


def test_refits_select_c_without_the_excluded_example_and_are_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuned: list[int] = []
    fitted: list[float] = []

    def tune(vectors: Vectors, targets: ClassIndices, *, seed: int) -> float:
        tuned.append(len(targets))
        return 10.0 if len(targets) == 8 else 1.0

    class CountedModel(LogisticModel):
        def __init__(self, vectors: Vectors, targets: ClassIndices, c: float) -> None:
            fitted.append(c)
            super().__init__(vectors, targets, c)

    monkeypatch.setattr(logistic, "select_c", tune)
    monkeypatch.setattr(logistic, "LogisticModel", CountedModel)
    examples = [*shades("a", 10, 4), *shades("b", 40_000, 4)]
    with filled(*examples) as knowledge:
        method = KnowledgeBaseLogistic(knowledge)
        for query in (examples[0].query, examples[0].query, examples[1].query, examples[0].query):
            method.answer(query)
    assert tuned == [8, 7, 7]
    assert fitted == [10.0, 1.0, 1.0]


@pytest.mark.parametrize("seed", range(3))
def test_multi_label_threshold_is_a_half(seed: int) -> None:
    vectors, single = clouds(*"abc" * 8, noise=0.6, seed=seed)
    labels = [(*one, "x") if row % 2 else one for row, one in enumerate(single)]
    classify = LogisticClassifier(
        labelled(vectors, labels), multi_label=True, c_by_label=dict.fromkeys("abcx", 1.0)
    )
    queries, _ = clouds(*"abc" * 20, noise=0.6, seed=seed + 10)
    expected: list[set[str]] = [set() for _ in queries]
    for name in "abcx":
        peer = LogisticRegression(C=1.0).fit(vectors, [name in some for some in labels])
        for row in np.flatnonzero(peer.predict_proba(queries)[:, 1] > 0.5):
            expected[row].add(name)
    assert [set(classify(query).labels) for query in queries] == expected
    assert any(expected) and not all(expected)


@dataclass(frozen=True)
class ScaledEmbedder:
    """Embedder of vectors whose norm is `length`."""

    length: float

    @property
    def fingerprint(self) -> str:
        return "long"

    @property
    def dimension(self) -> int:
        return PixelEmbedder().dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return PixelEmbedder().embed(queries) * np.float32(self.length)


def test_vectors_have_unit_length() -> None:
    answers = []
    for length in (1.0, 9.0):
        with KnowledgeBase.open(":memory:", embed=ScaledEmbedder(length)) as knowledge:
            knowledge.add([*shades("a", 10, 4), *shades("b", 40_000, 4)])
            answers.append(KnowledgeBaseLogistic(knowledge).answer(example("?", 20_000).query))
    assert answers[0].labels == answers[1].labels
    assert answers[0].confidence == pytest.approx(answers[1].confidence, abs=1e-4)


async def test_examples_of_another_episode_are_no_training_data() -> None:
    """The same shades have opposite labels in the two episodes."""
    dark, light = 10, 60_000
    parts = {"0": (("a", dark), ("b", light)), "1": (("b", dark + 1), ("a", light + 1))}
    knowledge_examples: list[Example] = []
    items: list[Example] = []
    for episode, classes in parts.items():
        for label, start in classes:
            for index in range(4):
                one = example(label, start + 3 * index, id=f"{episode}-{label}-{index}")
                query = replace(one.query, id=one.id)
                one = replace(one, query=query, tags={"episode": episode})
                (items if index == 3 else knowledge_examples).append(one)
    data = replace(
        labelled_benchmark("swapped", knowledge_examples, items),
        episode_of={str(one.id): one.tags["episode"] for one in (*knowledge_examples, *items)},
    )
    with filled(*data.knowledge) as knowledge:
        config = RunConfig(methods=["logreg"], shots=[1])
        [method] = plan(config, data, knowledge, Classifier(ScriptedGenerator([]), []))
        result, _ = await evaluate(data, method)
    assert result.value == 1.0
