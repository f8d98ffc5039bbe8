"""Classifiers without a model, on the stored vectors of labelled examples: logistic regression, and
the weighted vote of `knn`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from bottega._util.caching import LRUCache
from bottega._util.identity import Exclude
from bottega._util.progress import plural
from bottega.errors import SettingError
from bottega.evaluation.methods.votes import knn, no_label, with_means
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.records import unit
from bottega.protocols import Vectors
from bottega.types import Answer, Candidate, Query

VECTOR_METHODS = ("knn", "logreg")

FOLDS = 5
# scikit-learn's C is the inverse of the L2 penalty; the strongest penalty comes first.
C_VALUES = (0.1, 1.0, 10.0, 100.0, 1000.0)
DEFAULT_C = 1.0  # of scikit-learn
MAX_TUNED = 2000
MAX_ITERATIONS = 1000
MAX_REFITS = 16
ALL_LABELS = ""  # key of the model over all labels

ClassIndices = NDArray[np.int64]


class LogisticModel:
    """Multinomial logistic regression; with one class, a constant."""

    def __init__(self, vectors: Vectors, targets: ClassIndices, c: float) -> None:
        self.classes: ClassIndices = np.unique(targets)
        self._probabilities: Callable[[Vectors], NDArray[np.float64]] = _ones
        if len(self.classes) > 1:
            from sklearn.linear_model import LogisticRegression  # takes a second to import

            model = LogisticRegression(C=c, max_iter=MAX_ITERATIONS)
            self._probabilities = model.fit(vectors, targets).predict_proba

    def probabilities(self, vectors: Vectors) -> NDArray[np.float64]:
        """Return (n, classes), in the order of `classes`."""
        return self._probabilities(vectors)

    def probability(self, vector: Vectors, target: int) -> float:
        """Return the probability of one class, 0 for a class without examples."""
        return float(self.probabilities(vector[None])[0] @ (self.classes == target))


def select_c(vectors: Vectors, targets: ClassIndices, *, seed: int) -> float:
    """Return the C of `C_VALUES` with the lowest log loss in five-fold cross-validation.

    The search ends at the first C that does not improve the loss, and uses at most `MAX_TUNED`
    examples. The only example of a class is always used for training; if every class has only one
    example, the result is `DEFAULT_C`.
    """
    rng = np.random.default_rng(seed)
    rows = np.sort(rng.permutation(len(targets))[:MAX_TUNED])
    vectors, targets = vectors[rows], targets[rows]
    fold_of = _folds(targets, rng)
    best, lowest = DEFAULT_C, np.inf
    if len(np.unique(targets)) < 2 or (fold_of < 0).all():
        return best
    for c in C_VALUES:
        loss = sum(
            _held_out_loss(vectors, targets, fold_of == fold, c)
            for fold in np.unique(fold_of[fold_of >= 0])
        )
        if loss >= lowest:
            break
        best, lowest = c, loss
    return best


def _folds(targets: ClassIndices, rng: np.random.Generator) -> ClassIndices:
    """Return the fold of each example, -1 for the only example of a class.

    Each class is spread over the folds, so no fold holds all of its examples.
    """
    fold_of = np.full(len(targets), -1)
    start = 0
    for target in np.unique(targets):
        members = rng.permutation(np.flatnonzero(targets == target))
        if len(members) > 1:
            fold_of[members] = (start + np.arange(len(members))) % FOLDS
            start += len(members)
    return fold_of


def _held_out_loss(
    vectors: Vectors, targets: ClassIndices, held_out: NDArray[np.bool_], c: float
) -> float:
    """Return the sum of the negative log probabilities of the held-out examples."""
    model = LogisticModel(vectors[~held_out], targets[~held_out], c)
    columns = np.searchsorted(model.classes, targets[held_out])
    probabilities = model.probabilities(vectors[held_out])
    gold = probabilities[np.arange(len(columns)), columns]
    return float(-np.log(np.maximum(gold, np.finfo(np.float64).tiny)).sum())


def _ones(vectors: Vectors) -> NDArray[np.float64]:
    return np.ones((len(vectors), 1))


def check_labelled(knowledge: KnowledgeBase, method: str) -> None:
    """Raise `SettingError` if there are passages, which have no label."""
    if passages := knowledge.ids_by_label().get("", ()):
        found = plural(len(passages), "passage")
        raise SettingError(
            f"{method} needs labelled examples, got {found} without an answer",
            hint="use a knowledge base of labelled examples",
        )


@dataclass(frozen=True)
class LabelledVectors:
    """Unit vectors (n, dimension) of labelled examples; `ids` and `labels` have the same order."""

    ids: tuple[str, ...]
    vectors: Vectors
    labels: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, knowledge: KnowledgeBase, within: Sequence[str] | None = None) -> LabelledVectors:
        """Read the vectors of the default view: of the namespace, or of the ids in `within`."""
        ids = tuple(knowledge.ids() if within is None else within)
        labels: dict[str, list[str]] = {id: [] for id in ids}
        for label, members in knowledge.ids_by_label().items():
            for id in labels.keys() & set(members):
                labels[id].append(label)
        vectors = knowledge.vectors(ids) if ids else np.empty((0, 0), np.float32)
        return cls(ids, unit(vectors), tuple(map(tuple, labels.values())))

    def without(self, ids: Set[str]) -> LabelledVectors:
        rows = [row for row, id in enumerate(self.ids) if id not in ids]
        return LabelledVectors(
            tuple(self.ids[row] for row in rows),
            self.vectors[rows],
            tuple(self.labels[row] for row in rows),
        )


class LogisticClassifier:
    """Classifier with one model over all labels or, with `multi_label`, one model for each label.

    `c_by_label` gives the C of each model, with the key `ALL_LABELS` for a single model. The
    default is the result of `select_c`."""

    def __init__(
        self,
        data: LabelledVectors,
        *,
        multi_label: bool = False,
        seed: int = 0,
        c_by_label: Mapping[str, float] | None = None,
    ) -> None:
        self._multi_label = multi_label
        self._names = list(dict.fromkeys(label for some in data.labels for label in some))
        problems = self._problems(data)
        self.c_by_label = {
            name: (c_by_label or {}).get(name) or select_c(data.vectors, targets, seed=seed)
            for name, targets in problems.items()
        }
        self._models = {
            name: LogisticModel(data.vectors, targets, self.c_by_label[name])
            for name, targets in problems.items()
        }

    def _problems(self, data: LabelledVectors) -> dict[str, ClassIndices]:
        if self._multi_label:
            return {
                name: np.array([name in some for some in data.labels], int) for name in self._names
            }
        index = {name: number for number, name in enumerate(self._names)}
        targets = np.array([index[some[0]] for some in data.labels], int)
        return {ALL_LABELS: targets} if len(targets) else {}

    def __call__(self, vector: Vectors) -> Answer:
        """Return the most probable label with its probability as the confidence.

        Multi-label: every label with a probability above a half.
        """
        if not self._models:
            return no_label("no examples")
        if self._multi_label:
            chosen = tuple(
                name for name, model in self._models.items() if model.probability(vector, 1) > 0.5
            )
            return Answer(", ".join(chosen), labels=chosen)
        model = self._models[ALL_LABELS]
        probabilities = model.probabilities(vector[None])[0]
        label = self._names[model.classes[probabilities.argmax()]]
        return Answer(label, labels=(label,), confidence=float(probabilities.max()))


class KnowledgeBaseLogistic:
    """Logistic regression on the labelled examples of a knowledge base, fitted at the first query.

    If `exclude` removes examples for a query, such as its own image, C is selected and the model
    fitted again without them. `answer` blocks; threads may share an instance.
    """

    def __init__(
        self,
        knowledge: KnowledgeBase,
        *,
        within: Sequence[str] | None = None,
        multi_label: bool = False,
        seed: int = 0,
        exclude: Exclude = "same-image",
    ) -> None:
        self._knowledge, self._within = knowledge, within
        self._multi_label, self._seed, self._exclude = multi_label, seed, exclude
        self._fitted: tuple[LabelledVectors, LogisticClassifier] | None = None
        self._refits: LRUCache[frozenset[str], LogisticClassifier] = LRUCache(MAX_REFITS)
        self._lock = Lock()

    def answer(self, query: Query, vector: Vectors | None = None) -> Answer:
        """Return the label of a query. With its `vector`, the query is not embedded."""
        excluded = self._knowledge.excluded_ids(query, exclude=self._exclude)
        with self._lock:  # fit once, and use the cores for one fit at a time
            classify = self._classifier(excluded)
        if vector is None:
            vector = self._knowledge.embed([query])[0]
        return classify(unit(vector))

    def _classifier(self, excluded: Set[str]) -> LogisticClassifier:
        if self._fitted is None:
            data = LabelledVectors.of(self._knowledge, self._within)
            self._fitted = data, self._fit(data)
        data, fitted = self._fitted
        key = frozenset(data.ids) & excluded
        if not key:
            return fitted
        refit = self._refits.get(key)
        if refit is None:
            refit = self._fit(data.without(key))
            self._refits.put(key, refit)
        return refit

    def _fit(self, data: LabelledVectors) -> LogisticClassifier:
        return LogisticClassifier(data, multi_label=self._multi_label, seed=self._seed)


@dataclass(frozen=True)
class VectorAnswer:
    """Answer of a method without a model, with the nearest examples."""

    method: str
    answer: Answer
    candidates: tuple[Candidate, ...]
    seconds: float


class VectorClassifier:
    """Classifier of images by the stored vectors of a knowledge base.

    `knn` is the weighted vote of the `neighbours` nearest examples, `logreg` a logistic regression
    on all examples. Both are the methods of `bottega eval`. Raises `SettingError` for passages.
    """

    def __init__(self, knowledge: KnowledgeBase, method: str, neighbours: int) -> None:
        check_labelled(knowledge, method)
        self._knowledge, self._method, self._neighbours = knowledge, method, neighbours
        self._multi_label = knowledge.is_multi_label()
        self._logistic = KnowledgeBaseLogistic(knowledge, multi_label=self._multi_label)

    async def __call__(self, query: Query) -> VectorAnswer:
        return await asyncio.to_thread(self._answer, query)

    def _answer(self, query: Query) -> VectorAnswer:
        started = time.perf_counter()
        vectors = self._knowledge.embed([query])
        [found] = self._knowledge.nearest(vectors, self._neighbours, excluded_for=[query])
        if self._method == "knn":
            means = self._knowledge.class_means(query, vectors[0])
            fitted = self._knowledge.fitted
            answer = knn(
                with_means(found, means),
                multi_label=self._multi_label,
                exponent=fitted.exponent if fitted else 1.0,
            )
        else:
            answer = self._logistic.answer(query, vectors[0])
        return VectorAnswer(self._method, answer, tuple(found), time.perf_counter() - started)
