"""Classifiers without a model, on the stored vectors of labelled examples: logistic regression, and
the weighted vote of `knn`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from bottega._util.caching import LRUCache
from bottega._util.identity import Exclude
from bottega._util.progress import plural
from bottega.errors import SettingError, StoreError
from bottega.evaluation.methods.votes import knn, no_label, with_means
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.records import unit
from bottega.knowledge.stored_metric import packed, unpacked
from bottega.knowledge.stores import note_key
from bottega.knowledge.tuned_settings import LOGREG
from bottega.protocols import Vectors
from bottega.types import Answer, Candidate, Query

VECTOR_METHODS = ("knn", LOGREG)

FOLDS = 5
# scikit-learn's C is the inverse of the L2 penalty; the strongest penalty comes first.
C_VALUES = (0.1, 1.0, 10.0, 100.0, 1000.0)
DEFAULT_C = 1.0  # of scikit-learn
MAX_TUNED = 2000
MAX_ITERATIONS = 1000
MAX_REFITS = 16
ALL_LABELS = ""  # key of the model over all labels
LOGISTIC_NOTE = LOGREG  # key of the note of the default namespace

ClassIndices = NDArray[np.int64]


@dataclass(frozen=True)
class LinearSoftmax:
    """Class probabilities, the softmax of a linear function: `weights` (classes, dimension),
    `offsets` (classes,)."""

    weights: NDArray[np.floating[Any]]
    offsets: NDArray[np.floating[Any]]

    def probabilities(self, vectors: Vectors) -> NDArray[np.float64]:
        """Return the probabilities (n, classes) of vectors (n, dimension)."""
        logits = vectors.astype(np.float64) @ self.weights.T + self.offsets
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
        return shares


class LogisticModel:
    """Multinomial logistic regression; with one class, a constant."""

    def __init__(self, vectors: Vectors, targets: ClassIndices, c: float) -> None:
        self.classes: ClassIndices = np.unique(targets)
        self.linear = LinearSoftmax(np.zeros((1, vectors.shape[1])), np.zeros(1))
        if len(self.classes) > 1:
            from sklearn.linear_model import LogisticRegression  # takes a second to import
            from threadpoolctl import threadpool_limits

            model = LogisticRegression(C=c, max_iter=MAX_ITERATIONS)
            # Two threads wait for each other most of the time: they take five times as long.
            with threadpool_limits(1):
                model.fit(vectors, targets)
            weights, offsets = model.coef_, model.intercept_
            if len(self.classes) == 2:  # scikit-learn keeps one row, the log odds
                weights, offsets = np.vstack([0 * weights, weights]), np.append(0, offsets)
            self.linear = LinearSoftmax(weights, offsets)

    def probabilities(self, vectors: Vectors) -> NDArray[np.float64]:
        """Return (n, classes), in the order of `classes`."""
        return self.linear.probabilities(vectors)

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
        names = [self._names[target] for target in model.classes]
        return most_probable(names, model.linear, vector)

    def weights(self) -> tuple[list[str], LinearSoftmax]:
        """Return the labels and weights of the model over all labels. Raises `KeyError` without
        examples, and for a multi-label classifier."""
        model = self._models[ALL_LABELS]
        return [self._names[target] for target in model.classes], model.linear


def most_probable(labels: Sequence[str], linear: LinearSoftmax, vector: Vectors) -> Answer:
    """Return the most probable label of a vector (dimension,) as an answer."""
    probabilities = linear.probabilities(vector[None])[0]
    label = labels[int(probabilities.argmax())]
    return Answer(label, labels=(label,), confidence=float(probabilities.max()))


@dataclass(frozen=True)
class StoredLogistic:
    """Logistic regression for unit vectors of the embedder with this fingerprint, stored beside the
    examples. `bottega tune` fitted it after this `change` of the examples."""

    embedder: str
    labels: tuple[str, ...]
    linear: LinearSoftmax
    change: int

    @classmethod
    def fit(cls, knowledge: KnowledgeBase, seed: int) -> StoredLogistic:
        """Fit the regression to all examples of the namespace, which have one label each."""
        change = knowledge.last_change()
        labels, linear = LogisticClassifier(LabelledVectors.of(knowledge), seed=seed).weights()
        return cls(knowledge.embedder().fingerprint, tuple(labels), linear, change)

    def store(self, knowledge: KnowledgeBase) -> None:
        linear = {name: packed(one) for name, one in vars(self.linear).items()}
        document = orjson.dumps({**vars(self), "linear": linear}).decode()
        knowledge.set_note(note_key(LOGISTIC_NOTE, knowledge.namespace), document)


def stored_logistic(knowledge: KnowledgeBase) -> StoredLogistic | None:
    """Return the stored regression of the namespace. None is returned if there is none for the
    embedder in use, and if any example has changed since. Raises `StoreError` if it is damaged."""
    if (note := knowledge.note(note_key(LOGISTIC_NOTE, knowledge.namespace))) is None:
        return None
    try:
        stored = orjson.loads(note)
        labels, change = tuple(map(str, stored["labels"])), int(stored["change"])
        if stored["embedder"] != knowledge.embedder().fingerprint:
            return None
        offsets = unpacked(stored["linear"]["offsets"])
        weights = unpacked(stored["linear"]["weights"]).reshape(len(labels), -1)
        linear = LinearSoftmax(weights, offsets)
        if weights.shape[1] != knowledge.embedder().dimension or len(offsets) != len(labels):
            raise ValueError("the shapes differ")
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"the stored logistic regression is damaged, got {note!r:.80}",
            hint="run bottega tune again",
        ) from error
    if change != knowledge.last_change():
        return None
    return StoredLogistic(stored["embedder"], labels, linear, change)


class KnowledgeBaseLogistic:
    """Logistic regression on the labelled examples of a knowledge base, fitted at the first query.

    If `exclude` removes examples for a query, such as its own image, C is selected and the model
    fitted again without them. Other queries are answered by the regression `stored`, if it is
    given. `answer` blocks; threads may share an instance.
    """

    def __init__(
        self,
        knowledge: KnowledgeBase,
        *,
        within: Sequence[str] | None = None,
        multi_label: bool = False,
        seed: int = 0,
        exclude: Exclude = "same-image",
        stored: StoredLogistic | None = None,
    ) -> None:
        self._knowledge, self._within, self._stored = knowledge, within, stored
        self._multi_label, self._seed, self._exclude = multi_label, seed, exclude
        self._fitted: tuple[LabelledVectors, LogisticClassifier] | None = None
        self._refits: LRUCache[frozenset[str], LogisticClassifier] = LRUCache(MAX_REFITS)
        self._lock = Lock()

    def answer(self, query: Query, vector: Vectors | None = None) -> Answer:
        """Return the label of a query. With its `vector`, the query is not embedded."""
        excluded = self._knowledge.excluded_ids(query, exclude=self._exclude)
        if vector is None:
            vector = self._knowledge.embed([query])[0]
        if self._stored is not None and not excluded:
            return most_probable(self._stored.labels, self._stored.linear, unit(vector))
        with self._lock:  # fit once, and use the cores for one fit at a time
            classify = self._classifier(excluded)
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

    `knn` is the weighted vote of the `neighbours` nearest examples, under a fitted metric also of
    the class means; `logreg` is a logistic regression on all examples. `bottega eval` has both.
    Raises `SettingError` for passages.
    """

    def __init__(self, knowledge: KnowledgeBase, method: str, neighbours: int) -> None:
        check_labelled(knowledge, method)
        self._knowledge, self._method, self._neighbours = knowledge, method, neighbours
        self._multi_label = knowledge.is_multi_label()
        uses_stored = method == LOGREG and not self._multi_label
        self._logistic = KnowledgeBaseLogistic(
            knowledge,
            multi_label=self._multi_label,
            stored=stored_logistic(knowledge) if uses_stored else None,
        )

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
