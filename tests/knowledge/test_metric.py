"""The metric fitted to labelled vectors, and searches under it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bottega.errors import SettingError, StoreError
from bottega.knowledge import KnowledgeBase, View
from bottega.knowledge.metric import DIMENSION, FittedMetric, Scatter, class_means
from bottega.protocols import Vectors
from bottega.types import Example, Query

CLASSES, EACH, WIDTH = 4, 12, 30


class NumberEmbedder:
    """Embedder whose vectors are looked up by the text of the query."""

    fingerprint = "numbers"

    def __init__(self, vectors: Vectors) -> None:
        self._vectors, self.dimension = vectors, vectors.shape[1]

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return self._vectors[[int(query.text) for query in queries]]


@pytest.fixture(params=["file", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Return where a knowledge base is stored."""
    if request.param == "file":
        return tmp_path / "k.db"
    database: str = request.getfixturevalue("database")
    return database


def noisy_classes(seed: int = 0) -> tuple[Vectors, np.ndarray]:
    """Return vectors whose largest differences, along two directions, say nothing of the class."""
    rng = np.random.default_rng(seed)
    means = rng.normal(size=(CLASSES, WIDTH))
    classes = np.repeat(np.arange(CLASSES), EACH)
    nuisance = rng.normal(size=(len(classes), 2)) @ rng.normal(size=(2, WIDTH)) * 2
    noise = rng.normal(size=(len(classes), WIDTH)) * 0.1
    return (means[classes] + nuisance + noise).astype(np.float32), classes


def examples(classes: np.ndarray) -> list[Example]:
    return [Example(Query(str(row)), f"class {label}") for row, label in enumerate(classes)]


def open_base(path: str | Path, vectors: Vectors, **options: object) -> KnowledgeBase:
    return KnowledgeBase.open(path, NumberEmbedder(vectors), **options)  # type: ignore[arg-type]


def same_class_share(base: KnowledgeBase, classes: np.ndarray) -> float:
    found = [
        base.search(Query(str(row)), 6, exclude="same-question") for row in range(len(classes))
    ]
    right = [
        one.example.answer == f"class {label}"
        for label, hits in zip(classes, found, strict=True)
        for one in hits
        if one.score < 1 - 1e-5
    ]
    return float(np.mean(right))


def test_whitening_makes_the_shrunk_covariance_within_classes_the_identity() -> None:
    vectors, classes = noisy_classes()
    scatter = Scatter.of(vectors, classes)
    covariance = scatter.residuals.T @ scatter.residuals / len(vectors)
    shrunk = 0.3 * covariance + 0.7 * np.trace(covariance) / WIDTH * np.eye(WIDTH)
    rows = scatter.whitening(0.7)(np.eye(WIDTH))
    assert np.allclose(rows.T @ shrunk @ rows, np.eye(WIDTH), atol=1e-9)


def test_the_reduction_keeps_the_cosines_of_the_examples() -> None:
    vectors, classes = noisy_classes()
    metric = FittedMetric.fit(vectors, classes)
    assert metric is not None and metric.dimension <= min(DIMENSION, WIDTH)
    scatter = Scatter.of(vectors, classes)
    whole = scatter.whitening(metric.shrinkage)(scatter.rows)
    whole /= np.linalg.norm(whole, axis=1, keepdims=True)
    rows = metric.transform(vectors)
    assert np.allclose(rows @ rows.T, whole @ whole.T, atol=1e-4)


def test_few_vectors_of_many_dimensions_give_the_same_metric() -> None:
    vectors, classes = noisy_classes()
    rows = np.arange(0, len(vectors), 2)[:24]
    wide = np.zeros((len(rows), 4 * WIDTH), np.float32)
    turned = np.linalg.qr(np.random.default_rng(1).normal(size=(4 * WIDTH, WIDTH)))[0]
    wide[:] = vectors[rows] @ turned.T
    scatter = Scatter.of(wide, classes[rows])
    assert scatter.basis is not None
    residuals = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    residuals -= class_means(residuals, classes[rows])[classes[rows]]
    covariance = residuals.T @ residuals / len(rows)
    shrunk = 0.3 * covariance + 0.7 * np.trace(covariance) / len(covariance) * np.eye(4 * WIDTH)
    inverse = np.linalg.inv(shrunk.astype(np.float64))
    centred = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    centred -= centred.mean(axis=0)
    products = centred @ inverse @ centred.T
    lengths = np.sqrt(np.diag(products))
    metric = FittedMetric.fit(wide, classes[rows])
    assert metric is not None
    found = metric.transform(wide)
    assert np.allclose(found @ found.T, products / np.outer(lengths, lengths), atol=1e-3)


@pytest.mark.parametrize(
    ("vectors", "classes"),
    [
        (np.ones((6, 3), np.float32), np.array([0, 0, 0, 1, 1, 1])),
        (np.eye(4, dtype=np.float32), np.arange(4)),
        (np.zeros((4, 3), np.float32), np.array([0, 0, 1, 1])),
    ],
    ids=["equal vectors", "classes of one", "zeros"],
)
def test_without_scatter_there_is_no_metric(vectors: Vectors, classes: np.ndarray) -> None:
    assert FittedMetric.fit(vectors, classes) is None


def test_a_fitted_base_finds_examples_of_the_class_and_keeps_its_metric(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    with open_base(place, vectors) as base:
        base.add(examples(classes))
        before = same_class_share(base, classes)
        fitted = base.fit_metric()
        assert fitted is not None
        after = same_class_share(base, classes)
        assert after > before + 0.2
        assert base.stats().metric == "fitted, shrinkage 0.7"
    with open_base(place, vectors) as base:
        assert same_class_share(base, classes) == after
    with open_base(place, vectors, metric="cosine") as base:
        assert same_class_share(base, classes) == before
        assert base.stats().metric == "cosine"


def test_a_plain_search_of_a_fitted_base_has_the_scores_of_the_cosine(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    with open_base(place, vectors) as base:
        base.add(examples(classes))
        base.fit_metric()
        [plain] = base.nearest(vectors[:1], 5, plain=True)
        [fitted] = base.nearest(vectors[:1], 5)
    with open_base(place, vectors, metric="cosine") as base:
        [cosine] = base.nearest(vectors[:1], 5)
    assert [one.score for one in plain] == [one.score for one in cosine]
    assert [one.score for one in fitted] != [one.score for one in cosine]


def test_a_fitted_search_follows_additions_annotations_and_deletions(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    rows = examples(classes)
    with (
        open_base(place, vectors) as base,
        open_base(place, vectors) as other,
    ):
        base.add(rows[:-1])
        base.fit_metric()
        assert len(base.search(Query("0"), 100, include_self=True)) == len(rows) - 1
        other.add(rows[-1:])
        found = base.search(Query("0"), 100, include_self=True)
        assert len(found) == len(rows)
        other.annotate(str(found[0].example.id), rationale="because", labels=["renamed"])
        [renamed] = base.search(Query("0"), 1, include_self=True)
        assert renamed.example.labels == ("renamed",)
        other.delete([str(renamed.example.id)])
        assert len(base.search(Query("0"), 100, include_self=True)) == len(rows) - 1


def test_a_reindexed_view_no_longer_uses_the_metric(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    with open_base(place, vectors) as base:
        base.add(examples(classes))
        base.fit_metric()
        wider = NumberEmbedder(np.concatenate([vectors, vectors], axis=1))
        wider.fingerprint = "wider"
        base.reindex("default", wider)
        scores = [one.score for one in base.search(Query("0"), 5)]
        assert scores == [one.score for one in base.search(Query("0"), 5, plain=True)]
        assert base.fitted is None
        assert base.class_means(Query("0")) == []


@pytest.mark.parametrize(
    ("opened", "is_fitted"),
    [(("first",), True), (("first", "wide"), True), (("wide",), False), (("wide", "first"), False)],
)
def test_a_metric_belongs_to_the_first_view_of_the_handle(
    place: str | Path, opened: tuple[str, ...], is_fitted: bool
) -> None:
    vectors, classes = noisy_classes()
    wide = NumberEmbedder(np.concatenate([vectors, vectors], axis=1))
    wide.fingerprint = "wide"
    views = {"first": View(NumberEmbedder(vectors)), "wide": View(wide)}
    with KnowledgeBase.open(place, views) as base:
        base.add(examples(classes))
        base.fit_metric()
        with pytest.raises(SettingError, match=r"must have the shape \(n, 30\)"):
            base.class_means(Query("0"), base.embed([Query("0")], "wide")[0])
    with KnowledgeBase.open(place, {name: views[name] for name in opened}) as base:
        assert (base.fitted is not None) == is_fitted
        assert base.stats().metric.startswith("fitted") == is_fitted
        assert bool(base.class_means(Query("0"))) == is_fitted
        for name in opened:
            scores = [one.score for one in base.search(Query("0"), 5, by=name)]
            plain = [one.score for one in base.search(Query("0"), 5, by=name, plain=True)]
            assert (scores == plain) == (name == "wide" or not is_fitted)


@pytest.mark.parametrize("note", ["{", "{}", '{"embedder": "numbers", "metric": {"centre": 3}}'])
def test_a_damaged_metric_is_named(place: str | Path, note: str) -> None:
    vectors, classes = noisy_classes()
    with open_base(place, vectors) as base:
        base.add(examples(classes))
        base.set_note("metric", note)
    with pytest.raises(StoreError, match="stored metric") as raised:
        open_base(place, vectors)
    assert "bottega tune" in str(raised.value.hint)
    open_base(place, vectors, metric="cosine").close()


def test_classes_that_replace_others_refit_the_metric(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    rows = examples(classes)
    with open_base(place, vectors) as base:
        base.add(rows[: 2 * EACH])
        assert base.refit_metric()
        base.delete(base.ids(label="class 1"))
        base.add(rows[2 * EACH : 3 * EACH])  # as many labels and examples as at first
        assert base.refit_metric()
        assert not base.refit_metric()


def test_refitting_waits_for_a_new_label_or_a_quarter_more_examples(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    rows = examples(classes)
    with open_base(place, vectors) as base:
        base.add(rows[: 2 * EACH])
        assert base.refit_metric()
        assert not base.refit_metric()
        base.add([Example(Query(str(2 * EACH)), "class 1")])
        assert not base.refit_metric()
        base.add([Example(Query(str(2 * EACH + 1)), "class 2")])
        assert base.refit_metric()
        base.fit_metric(None)
        base.add(rows)
        assert not base.refit_metric()
        assert base.fitted is None


def test_labels_that_do_not_repeat_leave_the_plain_cosine_until_they_do(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    with open_base(place, vectors) as base:
        base.add([Example(Query(str(row)), f"text {row}") for row in range(6)])
        assert base.fit_metric() is None
        assert base.stats().metric == "cosine"
        base.add(examples(classes))
        assert base.refit_metric()


def test_class_means_are_those_of_unit_vectors_under_the_metric(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    with open_base(place, vectors) as base:
        base.add(examples(classes))
        assert base.class_means(Query("0")) == []
        metric = base.fit_metric()
        assert metric is not None
        means = base.class_means(Query("0"))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    others = np.stack([unit[classes == label].mean(axis=0) for label in range(CLASSES)])
    expected = metric.transform_means(others) @ metric.transform(vectors[:1])[0]
    assert [one.example.answer for one in means] == [f"class {label}" for label in range(CLASSES)]
    assert np.allclose([one.score for one in means], expected, atol=1e-5)


def test_a_required_metric_that_is_not_there_is_named(place: str | Path) -> None:
    vectors, classes = noisy_classes()
    with open_base(place, vectors) as base:
        base.add(examples(classes))
        assert base.fit_metric(None) is None
    with pytest.raises(SettingError, match="no fitted metric"):
        open_base(place, vectors, metric="fitted")
