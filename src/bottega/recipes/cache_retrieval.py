"""Retrieval methods of Cache-of-Thought by name, over a knowledge base that may grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Literal, get_args

from bottega._util.identity import Exclude
from bottega.errors import SettingError
from bottega.knowledge import DualEmbedder, KnowledgeBase, LateInteractionIndex, View
from bottega.knowledge.records import DEFAULT
from bottega.protocols import (
    Embedder,
    Generator,
    MultiVectorEmbedder,
    Prompter,
    Retriever,
    Vectors,
)
from bottega.retrieval import (
    BM25Retriever,
    CrossModalRetriever,
    DenseRetriever,
    HashtagRetriever,
    HashtagTree,
    KeywordRetriever,
    LeaveOneOutGroupCount,
    ResponseProbeRetriever,
    TfidfKeywordExtractor,
    keyword_query,
)
from bottega.retrieval.keywords import KeywordExtractor, response_text
from bottega.types import Candidate, Example, Query, Sampling

RetrievalName = Literal[
    "image", "text", "dual", "crossed", "probe", "keywords", "hashtag", "bm25", "hybrid"
]
RETRIEVE: tuple[RetrievalName, ...] = get_args(RetrievalName)
BY_DRAFT = ("crossed", "probe")
TEXT_VIEW = "text"


@dataclass(frozen=True)
class DraftModel:
    """Model whose answer without demonstrations is part of the query (Cache-of-Thought, 4.3.1)."""

    generator: Generator
    prompt: Prompter
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=128))


@dataclass(frozen=True)
class CacheRetrieval:
    """Retrieval method by name: its views of the knowledge base and its retriever.

    | name | cached side | query |
    |---|---|---|
    | image | image | image |
    | text | question | question |
    | dual | image and question | image and question |
    | crossed | image | image and keywords of the draft |
    | probe | image and keywords of the response | image and keywords of the draft |
    | keywords | image and keywords of the response | image and keywords of the question |
    | hashtag | image and question, within the group of the question | image and question |
    | bm25 | words of the question | words of the question |
    | hybrid | tokens of image and question (late interaction) | the same |

    `dual`, `crossed`, `probe` and `image` are the dense rows of the paper's Table 1, where a draft
    is the apprentice's answer without demonstrations. `draft` gives it; `crossed` and `probe` need
    it. `average` embeds image and text together; it defaults to a concatenation of `image` and
    `text`, and one CLIP model is the paper's average. `extract` returns the keywords.

    `tokens` embeds for `hybrid`. `groups` is a fixed number of level-1 hashtags (10 in the paper's
    code); None adapts it to the best leave-one-out retrieval.
    """

    name: RetrievalName
    image: Embedder
    text: Embedder
    average: Embedder | None = None
    tokens: MultiVectorEmbedder | None = None
    draft: DraftModel | None = None
    extract: KeywordExtractor = field(default_factory=lambda: TfidfKeywordExtractor(longest=1))
    groups: int | None = None
    exclude: Exclude = "same-question"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name in BY_DRAFT and self.draft is None:
            raise SettingError(
                f"retrieval by {self.name} needs a model for drafts", hint="pass draft="
            )
        if self.name == "hybrid" and self.tokens is None:
            raise SettingError("retrieval by hybrid needs token vectors", hint="pass tokens=")

    @cached_property
    def both(self) -> Embedder:
        """Embedder of image and text together."""
        return self.average or DualEmbedder(self.image, self.text)

    def views(self) -> dict[str, View]:
        """Return the views of the knowledge base; the first one is searched."""
        views = {DEFAULT: self._searched_view()}
        if self.name == "hashtag":
            views[TEXT_VIEW] = View(self.text, question_only)
        return views

    def retriever(self, knowledge: KnowledgeBase) -> Retriever:
        """Return the retriever over a knowledge base that was opened with `views`."""
        search = partial(knowledge.search, exclude=self.exclude)
        dense = DenseRetriever(search)
        match self.name:
            case "crossed":
                nearest = partial(knowledge.nearest, exclude=self.exclude)
                return self._with_draft(CrossModalRetriever(self.both, nearest))
            case "probe":
                return self._with_draft(dense)
            case "keywords":
                return KeywordRetriever(dense, self.extract)
            case "hashtag":
                return self._within_groups(knowledge)
            case "bm25":
                return BM25Retriever(knowledge, exclude=self.exclude)
            case "hybrid":
                return self._by_tokens(knowledge)
        return dense

    def _searched_view(self) -> View:
        match self.name:
            case "image":
                return View(self.image)
            case "text" | "bm25" | "hybrid":
                return View(self.text)
            case "crossed":
                return View(self.both, image_only)
            case "probe" | "keywords":
                return View(self.both, keyword_query)
        return View(self.both)

    def _with_draft(self, retrieve: Retriever) -> Retriever:
        assert self.draft is not None
        return ResponseProbeRetriever(
            retrieve,
            self.draft.generator,
            self.draft.prompt,
            self.extract,
            keep_question=False,
            sampling=self.draft.sampling,
        )

    def _by_tokens(self, knowledge: KnowledgeBase) -> DenseRetriever:
        assert self.tokens is not None
        late = LateInteractionIndex(knowledge, self.tokens)

        def search(query: Query, k: int) -> list[Candidate]:
            late.refresh()
            return late.search(query, k, exact=True, exclude=self.exclude)

        return DenseRetriever(search)

    def _within_groups(self, knowledge: KnowledgeBase) -> HashtagRetriever:
        def responses(ids: Sequence[str]) -> Vectors:
            found = knowledge.get_many(ids)
            return self.text.embed([Query(response_text(one) or one.query.text) for one in found])

        vectors = partial(knowledge.vectors, by=TEXT_VIEW)
        count = LeaveOneOutGroupCount(knowledge.vectors, responses, seed=self.seed)
        groups, adapt = (count, True) if self.groups is None else (self.groups, False)
        tree = HashtagTree(groups, adapt=adapt, seed=self.seed)
        search = partial(knowledge.search, exclude=self.exclude)
        return HashtagRetriever(knowledge.changes, vectors, self.text, search, tree)


def image_only(example: Example) -> Query:
    """Return the example's query without its text."""
    return replace(example.query, text="")


def question_only(example: Example) -> Query:
    """Return the example's question without its images."""
    return Query(example.query.text)
