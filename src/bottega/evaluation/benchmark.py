"""Benchmark: labelled examples, passages, evaluated items, how replies are parsed and scored."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import orjson

from bottega._util.identity import image_hashes
from bottega.errors import SettingError
from bottega.evaluation.config import Relevance
from bottega.evaluation.metrics.metric import Accuracy, MacroF1, Metric, labels_of
from bottega.evaluation.metrics.open_answers import AnnotatorAgreement
from bottega.parsing import LabelParser, SynonymParser
from bottega.protocols import Parser, Prompter
from bottega.reranking import DemonstrationOrder
from bottega.types import Example


@dataclass(frozen=True)
class Benchmark:
    """Evaluated `items` and the `knowledge` that demonstrations come from, which are disjoint.

    Without `labels`, answers are free text. `episode_of` maps the ids of items and of example
    queries to their episodes; an item may be shown examples of its own episode only. It is empty
    without episodes. `passage_scores` are the benchmark's own retrieval scores, by item id and then
    by passage id; it is empty if passages are scored by retrieval. `corrupted_count` examples have
    a wrong answer; it is None without label noise. The first metric compares methods. `prompt`
    suits the questions, None selects the model's default; `rationale_prompt` replaces it where
    demonstrations show rationales. `order` arranges demonstrations as in the paper of the
    benchmark's figures. `reward_metric` scores answers to examples in RCTS's mutual reward; None
    compares them with the example's answer. With `needs_answers`, the examples are questions
    without published answers. `relevance` decides how a passage contains an answer (`is_relevant`).
    """

    name: str
    knowledge: tuple[Example, ...]
    items: tuple[Example, ...]
    labels: tuple[str, ...] = ()
    multi_label: bool = False
    episode_of: Mapping[str, str] = field(default_factory=dict)
    passage_scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    corrupted_count: int | None = None
    metrics: tuple[Metric, ...] = field(default=(Accuracy(),), compare=False)
    parse: Parser = field(default_factory=LabelParser, compare=False)
    prompt: Prompter | None = field(default=None, compare=False)
    rationale_prompt: Prompter | None = field(default=None, compare=False)
    needs_answers: bool = False
    order: DemonstrationOrder = field(default="nearest-last", compare=False)
    reward_metric: Metric | None = field(default=None, compare=False)
    relevance: Relevance = field(default="contains", compare=False)


def labelled_benchmark(
    name: str, knowledge: Iterable[Example], items: Iterable[Example]
) -> Benchmark:
    """Return a benchmark with the labels that occur in its examples."""
    knowledge, items = tuple(knowledge), tuple(items)
    labels = tuple(dict.fromkeys(label for e in (*knowledge, *items) for label in labels_of(e)))
    multi_label = any(e.labels is not None and len(e.labels) != 1 for e in (*knowledge, *items))
    return Benchmark(
        name,
        knowledge,
        items,
        labels,
        multi_label,
        metrics=(MacroF1(labels) if multi_label else Accuracy(),),
        parse=LabelParser(multi_label=multi_label),
    )


def answers_of(data: Benchmark, item: Example) -> tuple[str, ...]:
    """Return all answers of the annotators if a metric holds them, else the item's own."""
    for metric in data.metrics:
        if isinstance(metric, AnnotatorAgreement) and (answers := metric.annotators(item)):
            return tuple(dict.fromkeys(answers))
    return item.labels or (item.answer,)


def is_relevant(data: Benchmark, item: Example, example: Example) -> bool:
    """Return the pseudo-relevance of an example to an item: a passage contains one of the item's
    answers (RACC's PRDB), or a demonstration gives one."""
    answers = answers_of(data, item)
    if is_passage(example):
        return contains_answer(example.query.text, answers, data.relevance)
    return fold(example.answer) in map(fold, answers)


def fingerprint(data: Benchmark) -> str:
    """Return a digest of all items and examples in their order."""
    digest = hashlib.sha256()
    for example in (*data.items, *data.knowledge):
        query = example.query
        images = list(image_hashes(query))
        content = (query.text, images, query.choices, example.answer, example.rationale)
        # Two labels may look like one answer, and tags decide the episode.
        further = (labels_of(example), sorted(example.tags.items()))
        digest.update(repr((*content, *further)).encode(errors="replace"))
        if scores := data.passage_scores.get(query.id or ""):
            digest.update(repr(sorted(scores.items())).encode(errors="replace"))
    return digest.hexdigest()


def is_passage(example: Example) -> bool:
    """Return whether the example is a passage to read: it has no answer."""
    return not example.answer


def names_passages(items: Iterable[Example]) -> bool:
    """Return whether every item names the passage that answers it, in the tag `passage`."""
    return all("passage" in item.tags for item in items)


def index_by_id(items: Iterable[Example]) -> dict[str, Example]:
    """Index items by query id, in their order. Raises `SettingError` unless ids are unique."""
    indexed: dict[str, Example] = {}
    for item in items:
        id = item.query.id
        if not id or id in indexed:
            problem = f"the id {id!r} is not unique" if id else "an item has no id"
            raise SettingError(
                f"{problem}, got the question {item.query.text!r}",
                hint="give each item its own query id, or remove oracle, concat and racc",
            )
        indexed[id] = item
    return indexed


def contains_answer(
    passage: str, answers: Iterable[str], relevance: Relevance = "contains"
) -> bool:
    """Return whether the passage contains an answer, in any case.

    `contains`, the rule of OK-VQA's retrievers and of RACC (Luo et al. 2021), finds "art" in
    "start". `stems` also allows other word endings: it finds "surf board" in "surfing
    boards". `words` requires whole words.
    """
    text = fold(passage)
    return any(
        answer in text if relevance == "contains" else re.search(_pattern(answer, relevance), text)
        for answer in map(fold, answers)
        if answer
    )


def _pattern(answer: str, relevance: Relevance) -> str:
    if relevance == "stems":
        return r"\w* ".join(map(re.escape, answer.split()))
    return rf"(?<!\w){re.escape(answer)}(?!\w)"


def fold(text: str) -> str:
    """Return the text in lower case with single spaces."""
    return " ".join(text.casefold().split())


def with_synonyms(data: Benchmark, file: Path | None) -> Benchmark:
    """Return the benchmark with a parser that accepts other names of labels. `file` is a JSON
    object with the names of each label. Raises `SettingError`."""
    if file is None:
        return data
    try:
        names = orjson.loads(file.read_bytes())
        if not all(isinstance(one, str) for some in names.values() for one in some):
            raise ValueError
    except OSError as error:
        raise SettingError(
            f"{file} cannot be read: {error.strerror}", hint="check the path"
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingError(
            f"{file} is not a JSON object of lists of names",
            hint='write e.g. {"cat": ["tabby", "Persian cat"], "dog": ["pug"]}',
        ) from error
    if unknown := [label for label in names if label not in data.labels]:
        raise SettingError(
            f"{file} has names of {unknown[0]!r}, which is not a label of {data.name}",
            hint=f"use its labels: {', '.join(data.labels[:20])}"
            if data.labels
            else "remove --synonyms: the answers are free text",
        )
    return replace(data, parse=SynonymParser(names, multi_label=data.multi_label))
