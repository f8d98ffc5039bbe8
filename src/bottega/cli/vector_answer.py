"""Answers of `bottega classify --method knn|logreg`: from stored vectors, without a model."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from bottega.errors import SettingError
from bottega.evaluation.methods.logistic import KnowledgeBaseLogistic, check_labelled
from bottega.evaluation.methods.votes import knn
from bottega.knowledge import KnowledgeBase
from bottega.naming import suggestion
from bottega.types import Answer, Candidate, Query

VISUAL_RAG = "visual-rag"
VECTOR_METHODS = ("knn", "logreg")


def check_method(method: str, **model_options: object) -> None:
    """Raise `SettingError` for an unknown method, and for model options that the method would
    ignore.

    Options that are not set are None.
    """
    methods = (VISUAL_RAG, *VECTOR_METHODS)
    if method not in methods:
        raise SettingError(
            f"--method must be {', '.join(methods[:-1])} or {methods[-1]}, got {method!r}",
            hint=f"{suggestion(method, methods)}set e.g. --method knn",
        )
    given = [
        f"--{name.replace('_', '-')}" for name, value in model_options.items() if value is not None
    ]
    if method in VECTOR_METHODS and given:
        raise SettingError(
            f"--method {method} calls no model, got {', '.join(given)}",
            hint=f"remove {' and '.join(given)}, or set --method {VISUAL_RAG}",
        )


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
            answer = knn(found, multi_label=self._multi_label)
        else:
            answer = self._logistic.answer(query, vectors[0])
        return VectorAnswer(self._method, answer, tuple(found), time.perf_counter() - started)
