"""Retrieval by words: BM25, and keywords of long questions.

CLIP reads about twenty tokens of a question (Cache-of-Thought, 4.3.1).
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from threading import Lock
from typing import Any, Protocol

import numpy as np

from bottega._util.event_loops import gather_or_cancel
from bottega._util.identity import Exclude, is_excluded
from bottega.errors import EmptyKnowledgeBaseError, NotFoundError, SettingError, check_count
from bottega.protocols import Generator, Prompter, Retriever, Vectors
from bottega.retrieval.sources import ChangeFeed, ChangeFollower
from bottega.types import Candidate, Example, Message, Prompt, Query, Sampling

Tokenizer = Callable[[str], list[str]]
WORD = re.compile(r"\w+")

TAG = "keywords"
MAX_WORDS = 6
REQUEST = """\
Extract the {count} most important keywords or key phrases from the text below. Answer with the \
keywords alone, separated by commas, the most important first.

Text:
{text}"""
SEPARATORS = re.compile(r"[,;\n\t|•、，；]+")
THINKING = re.compile(r"\A.*</think>|<think>.*\Z", re.DOTALL)
# "1. ", "2) ", "- ", "* " before a keyword, and "Keywords:" or "Here are the keywords:".
BULLET = re.compile(r"^\s*(?:\d{1,2}[.)]\s+|[-*+]\s+|#+\s*)")
HEADING = re.compile(r"^[^,:\n]*\b(?:keywords?|key phrases?|words)\b[^,:\n]*:", re.IGNORECASE)
QUOTES = "\"'`*_[](){}<>.:!?“”‘’«» \t"


class BM25Retriever:
    """Retriever of the k best examples by the BM25 score (Lucene's variant) of their text.

    `reads` returns the searched text of an example, by default its question, rationale and answer.
    Examples without a common word have score 0 and come last, oldest first. The first search after
    a change of the feed rebuilds the index, which takes about 50 microseconds per example. The
    default `words` keeps digits and single letters, which the tokenizer of bm25s drops: some
    questions are only "3 + 5". `exclude` is the rule for excluded examples: all that share an image
    with the query, or only the same question.
    """

    def __init__(
        self,
        feed: ChangeFeed,
        *,
        reads: Callable[[Example], str] | None = None,
        words: Tokenizer | None = None,
        k1: float = 1.5,
        b: float = 0.75,
        exclude: Exclude = "same-image",
    ) -> None:
        if not 0 <= k1 < math.inf or not 0 <= b <= 1:
            raise SettingError(
                f"k1 must be 0 or more and b between 0 and 1, got k1={k1} and b={b}",
                hint="set k1=1.5 and b=0.75",
            )
        self._feed = feed
        self._exclude = exclude
        self._follower = ChangeFollower(feed.changes, self._take)
        self._reads = reads or example_text
        self._words = words or tokenize
        self._settings = {"k1": k1, "b": b}
        self._documents: dict[str, list[str]] = {}
        self._index = _BM25Index({}, self._settings)
        self._follow_lock = Lock()

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        check_count("k", k)
        return await asyncio.to_thread(self._find, query, k)

    def _find(self, query: Query, k: int) -> list[Candidate]:
        index = self._current_index()
        while True:
            try:
                return self._best(index, query, k)
            except NotFoundError:  # deleted since the index was built
                before, index = index, self._current_index()
                if index is before:
                    raise

    def _best(self, index: _BM25Index, query: Query, k: int) -> list[Candidate]:
        scores = index.scores(self._words(query.text))
        order = np.argsort(-scores, kind="stable")
        found: list[Candidate] = []
        # One page at a time, because the best ones may include the query itself.
        for start in range(0, len(order), k):
            page = order[start : start + k].tolist()
            examples = self._feed.get_many([index.ids[position] for position in page])
            found += [
                Candidate(example, float(scores[position]))
                for position, example in zip(page, examples, strict=True)
                if not is_excluded(query, example, self._exclude)
            ]
            if len(found) >= k:
                break
        return found[:k]

    def _current_index(self) -> _BM25Index:
        with self._follow_lock:
            self._follower.follow()
            if not self._documents:
                raise EmptyKnowledgeBaseError(
                    "the knowledge base is empty", hint="bottega add K.db FOLDER fills it"
                )
            return self._index

    def _take(self, gone: Sequence[str], new: Sequence[str]) -> None:
        examples = self._feed.get_many(new) if new else []
        texts = [self._words(self._reads(example)) for example in examples]
        removed = set(gone)
        left = {id: words for id, words in self._documents.items() if id not in removed}
        documents = left | dict(zip(new, texts, strict=True))
        self._index = _BM25Index(documents, self._settings)
        self._documents = documents


class _BM25Index:
    """Immutable BM25 index of documents, shared by threads."""

    def __init__(self, documents: Mapping[str, list[str]], settings: Mapping[str, float]) -> None:
        self.ids: Sequence[str] = list(documents)
        self._index: Any = None
        if any(documents.values()):  # bm25s cannot index documents without any word
            import bm25s  # slow to import

            self._index = bm25s.BM25(method="lucene", **settings)
            self._index.index(list(documents.values()), show_progress=False)

    def scores(self, words: list[str]) -> Vectors:
        """Return one score per document."""
        if self._index is None or not words:
            return np.zeros(len(self.ids), np.float32)
        scores: Vectors = self._index.get_scores(words)
        return scores


def tokenize(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def example_text(example: Example) -> str:
    texts = (example.query.text, example.rationale or "", example.answer)
    return "\n".join(part for part in texts if part)


class KeywordExtractor(Protocol):
    """Function that returns the keywords of a text, the most important first.

    It accepts any text and may return no keywords.
    """

    async def __call__(self, text: str, /) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class GeneratedKeywordExtractor:
    """Keyword extractor that uses a small language model.

    Cache-of-Thought requests 10 from Llama-3-8B at temperature 0.6. By default decoding is greedy,
    and equal texts have equal keywords. `request` is a template
    with the fields {count} and {text}. Raises the generator's `GenerationError`.
    """

    generator: Generator
    _: KW_ONLY
    count: int = 10
    request: str = REQUEST
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        check_count("count", self.count)

    async def __call__(self, text: str, /) -> tuple[str, ...]:
        if not text.strip():
            return ()
        request = self.request.replace("{count}", str(self.count)).replace("{text}", text)
        prompt = Prompt((Message("user", (request,)),))
        sampling = self.sampling or Sampling(max_tokens=16 * self.count)
        reply = await self.generator.generate(prompt, sampling)
        return read_keywords(reply.completions[0].text, self.count)


@dataclass(frozen=True)
class KeywordRetriever:
    """Retriever wrapper that replaces the question by its keywords.

    They keep their order in the question, which is natural for encoders. A question without
    keywords is not changed.
    """

    retrieve: Retriever
    extractor: KeywordExtractor

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        keywords, lower = await self.extractor(query.text), query.text.casefold()
        positions = {one: lower.find(one.casefold()) for one in keywords}
        # In the order of the text; a keyword that is not in it comes last.
        ordered = sorted(keywords, key=lambda one: (positions[one] < 0, positions[one]))
        text = ", ".join(ordered) or query.text
        return await self.retrieve(replace(query, text=text), k)


async def tag_keywords(examples: Iterable[Example], extractor: KeywordExtractor) -> list[Example]:
    """Return the examples with `tags["keywords"]`: the keywords of rationale and answer, or of the
    question if these have none. An existing tag is kept."""

    async def tagged(example: Example) -> Example:
        if TAG in example.tags:
            return example
        keywords = await extractor(response_text(example)) or await extractor(example.query.text)
        if not keywords:
            return example
        return replace(example, tags={**example.tags, TAG: ", ".join(keywords)})

    return await gather_or_cancel(map(tagged, examples))


def stored_keywords(example: Example) -> tuple[str, ...]:
    """Return the keywords stored by `tag_keywords`."""
    return tuple(filter(None, map(str.strip, example.tags.get(TAG, "").split(","))))


def keyword_query(example: Example) -> Query:
    """Return the example's query with the keywords of its response as text, if it has any. For the
    `reads` of a view."""
    keywords = ", ".join(stored_keywords(example))
    return replace(example.query, text=keywords) if keywords else example.query


def response_text(example: Example) -> str:
    """Return the rationale and the answer."""
    return "\n".join(filter(None, (example.rationale, example.answer)))


def read_keywords(reply: str, count: int) -> tuple[str, ...]:
    """Return the first `count` different keywords of a reply, in any common list format.

    Sentences are skipped. Empty if there are no keywords.
    """
    spoken = THINKING.sub("", reply)
    lines = (HEADING.sub("", line) for line in spoken.splitlines())
    parts = (BULLET.sub("", part) for part in SEPARATORS.split("\n".join(lines)))
    return distinct((" ".join(part.strip(QUOTES).split()) for part in parts), count)


def distinct(keywords: Iterable[str], count: int) -> tuple[str, ...]:
    """Return the first `count` keywords that differ in more than case, as first written."""
    kept: dict[str, str] = {}
    for keyword in keywords:
        if keyword and len(keyword.split()) <= MAX_WORDS:
            kept.setdefault(keyword.casefold(), keyword)
    return tuple(kept.values())[:count]


class TfidfKeywordExtractor:
    """Keyword extractor by TF-IDF, for terms of up to `longest` words.

    `corpus` determines the common terms; without it the most frequent terms are chosen, earlier
    ones first. A term that the corpus lacks counts as rarest, because new words mark a new topic.
    Lucene's 33 English stop words are left out and no others, because "how many" and "where" are
    what some questions ask.
    """

    def __init__(self, corpus: Iterable[str] = (), *, count: int = 10, longest: int = 2) -> None:
        check_count("count", count)
        check_count("longest", longest)
        self._count = count
        self._longest = longest
        self._texts = 0
        self._containing: Counter[str] = Counter()
        for text in corpus:
            self._texts += 1
            self._containing.update(set(_terms(text, longest)))

    async def __call__(self, text: str, /) -> tuple[str, ...]:
        return await asyncio.to_thread(self.of, text)

    def of(self, text: str) -> tuple[str, ...]:
        """Return the keywords of a text: the synchronous form."""
        frequency = Counter(_terms(text, self._longest))

        def weight(term: str) -> float:
            # Smooth inverse document frequency, as in scikit-learn.
            rarity = math.log((1 + self._texts) / (1 + self._containing[term])) + 1
            return frequency[term] * rarity

        ranked = sorted(frequency, key=weight, reverse=True)  # stable: earlier terms first
        return tuple(ranked[: self._count])


def _terms(text: str, longest: int) -> list[str]:
    """Return single words, then pairs and so on, without terms that contain a stop word."""
    from bm25s.stopwords import STOPWORDS_EN  # slow to load

    words = tokenize(text)
    runs = [
        words[start : start + length]
        for length in range(1, longest + 1)
        for start in range(len(words) - length + 1)
    ]
    return [" ".join(run) for run in runs if not set(run) & set(STOPWORDS_EN)]


@dataclass(frozen=True)
class ResponseProbeRetriever:
    """Retriever wrapper that adds the keywords of an answer without demonstrations to the query.

    Cache-of-Thought, 4.3.1: "what is in the image" carries little information, and even a wrong
    answer more. It costs one call per query. The keywords follow the question, or replace it with
    `keep_question=False`, as in the paper. An answer without keywords does not change the query.
    Raises the generator's `GenerationError`.
    """

    retrieve: Retriever
    generator: Generator
    prompt: Prompter
    extractor: KeywordExtractor
    _: KW_ONLY
    keep_question: bool = True
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=128))

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        reply = await self.generator.generate(self.prompt(query, ()), self.sampling)
        keywords = await self.extractor(reply.completions[0].text)
        if keywords:
            kept = query.text if self.keep_question else ""
            query = replace(query, text=f"{kept} {', '.join(keywords)}".strip())
        return await self.retrieve(query, k)
