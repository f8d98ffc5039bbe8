"""Retrieval methods of Cache-of-Thought by name, over a knowledge base that may grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

from bottega._util.identity import Exclude
from bottega.errors import SettingError
from bottega.knowledge import DualEmbedder, KnowledgeBase, LateInteractionIndex, View
from bottega.knowledge.records import DEFAULT
from bottega.protocols import Embedder, Generator, MultiVectorEmbedder, Prompter, Retriever, Vectors
from bottega.retrieval import (
    BM25Retriever,
    CrossModalRetriever,
    DenseRetriever,
    HashtagRetriever,
    HashtagTree,
    KeywordRetriever,
    LeaveOneOutGroupCount,
    ResponseProbeRetriever,
    StaticExamples,
    TfidfKeywordExtractor,
    keyword_query,
)
from bottega.retrieval.keywords import KeywordExtractor, response_text
from bottega.retrieval.sources import ChangeReader
from bottega.types import Example, Query, Sampling

RetrievalName = Literal[
    "image",
    "text",
    "dual",
    "crossed",
    "probe",
    "keywords",
    "hashtag",
    "keyword-hashtag",
    "bm25",
    "hybrid",
]
# View of the level-2 hashtags.
HASHTAGS = "hashtags"
TOKEN_BATCH = 256


@dataclass(frozen=True)
class RetrievalProperties:
    """Properties of a retrieval method: the embedders of its view, the index that it searches, and
    the part of a stored example that it compares. With `draft`, its query contains the keywords of
    a draft. With `grouped`, it searches within groups of examples."""

    view: tuple[Literal["image", "text"], ...] = ("image", "text")
    index: Literal["vectors", "words", "tokens"] = "vectors"
    stored: Literal["example", "image", "response"] = "example"
    draft: bool = False
    grouped: bool = False


PROPERTIES: Mapping[RetrievalName, RetrievalProperties] = {
    "image": RetrievalProperties(view=("image",)),
    "text": RetrievalProperties(view=("text",)),
    "dual": RetrievalProperties(),
    "crossed": RetrievalProperties(stored="image", draft=True),
    "probe": RetrievalProperties(stored="response", draft=True),
    "keywords": RetrievalProperties(stored="response"),
    "hashtag": RetrievalProperties(grouped=True),
    "keyword-hashtag": RetrievalProperties(stored="response", draft=True, grouped=True),
    "bm25": RetrievalProperties(view=("text",), index="words"),
    "hybrid": RetrievalProperties(view=("text",), index="tokens"),
}


def _names(has: Callable[[RetrievalProperties], bool]) -> tuple[RetrievalName, ...]:
    """Return the names of the methods for which `has` returns True."""
    return tuple(name for name, properties in PROPERTIES.items() if has(properties))


RETRIEVE = tuple(PROPERTIES)
# Names whose query contains the keywords of a draft.
BY_DRAFT = _names(lambda one: one.draft)
# Names that compare the keywords of stored responses, which `tag_keywords` writes.
BY_RESPONSE = _names(lambda one: one.stored == "response")
# Names that need an image in each stored example.
BY_IMAGE = _names(lambda one: one.view == ("image",) or one.stored == "image")
# Names that compare questions without their images.
BY_QUESTION = _names(lambda one: one.view == ("text",) and one.index != "tokens")
# Names with one vector for each example.
BY_VECTORS = _names(
    lambda one: one.index == "vectors" and one.stored == "example" and not one.grouped
)
TEXT_ONLY = _names(lambda one: one.view == ("text",))  # names without an embedder of images
WITHOUT_METRIC = _names(lambda one: one.index != "vectors")
# Names that use no text embedder.
WITHOUT_TEXT = _names(lambda one: one.view == ("image",) or one.index != "vectors")
GROUPED = _names(lambda one: one.grouped)


@dataclass(frozen=True)
class DraftModel:
    """Model whose answer without demonstrations extends the query (Cache-of-Thought, 4.3.1)."""

    generator: Generator
    prompt: Prompter
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=128))


@dataclass(frozen=True)
class CacheRetrieval:
    """Retrieval method by name: its views of a knowledge base, and its retriever.

    | name | cached side | query |
    |---|---|---|
    | image | image | image |
    | text | question | question |
    | dual | image and question | image and question |
    | crossed | image | image and keywords of the draft |
    | probe | image and keywords of the response | image and keywords of the draft |
    | keywords | image and keywords of the response | image and keywords of the question |
    | hashtag | as dual, within groups of questions | as dual |
    | keyword-hashtag | as probe, within groups of the responses' keywords | as probe |
    | bm25 | words of the question | words of the question |
    | hybrid | tokens of image and question (late interaction) | the same |

    `image`, `dual`, `crossed` (the best one) and `probe` are the dense rows of the paper's Table 1,
    the hashtags its hierarchical row. `draft` is the model that answers without demonstrations.
    `extract` returns keywords; those of a response are in the example's tags (`tag_keywords`).
    `average` embeds image and text together, for example with a CLIP model; it defaults to a
    concatenation of `image` and `text`.

    `tokens` embeds for `hybrid`. `groups` is a fixed number of level-1 hashtags (10 in the paper's
    code); None adapts it to the best leave-one-out retrieval. With `group_images`, `hashtag` groups
    images instead of questions: use it where all questions are equal. `names` maps the method's
    view names to those of a knowledge base that several methods search. Raises `SettingError` if a
    part is missing.
    """

    name: RetrievalName
    _: KW_ONLY
    image: Embedder | None = None
    text: Embedder | None = None
    average: Embedder | None = None
    tokens: MultiVectorEmbedder | None = None
    draft: DraftModel | None = None
    extract: KeywordExtractor = field(default_factory=lambda: TfidfKeywordExtractor(longest=1))
    groups: int | None = None
    group_images: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    exclude: Exclude = "same-question"
    seed: int = 0

    def __post_init__(self) -> None:
        satisfied = {
            "image": self.image is not None or self.name in TEXT_ONLY,
            "text": self.text is not None or self.name == "image",
            "tokens": self.tokens is not None or self.name != "hybrid",
            "draft": self.draft is not None or self.name not in BY_DRAFT,
        }
        missing = [name for name, is_satisfied in satisfied.items() if not is_satisfied]
        if missing:
            raise SettingError(
                f"retrieval by {self.name} needs {' and '.join(missing)}",
                hint=f"pass {' and '.join(f'{name}=' for name in missing)}",
            )

    @cached_property
    def embedder(self) -> Embedder:
        """Embedder of the searched view."""
        embedder = {"image": self.image}.get(self.name)
        if self.name in TEXT_ONLY:
            embedder = self.text
        if embedder is not None:
            return embedder
        assert self.image is not None and self.text is not None
        return self.average or DualEmbedder(self.image, self.text)

    def views(self) -> dict[str, View]:
        """Return the views of the knowledge base, by their own names; the first one is searched."""
        views = {DEFAULT: View(self.embedder, self._cached_side())}
        if self.name in GROUPED:
            views[HASHTAGS] = self._hashtags()
        return views

    @property
    def _searched(self) -> str | None:
        """Name of the searched view, None for the first one of the knowledge base."""
        return self.names.get(DEFAULT)

    def _hashtags(self) -> View:
        """Return the view of the level-2 hashtags."""
        assert self.image is not None and self.text is not None
        if self.name == "keyword-hashtag":
            return View(self.text, keywords_only)
        return View(self.image, image_only) if self.group_images else View(self.text, question_only)

    def retriever(self, knowledge: KnowledgeBase, within: Sequence[str] | None = None) -> Retriever:
        """Return the retriever over a knowledge base that was opened with `views`, or over its
        examples with the ids `within`. Blocks while it groups stored examples."""
        scope: dict[str, Any] = {"exclude": self.exclude, "within": within, "by": self._searched}
        dense = DenseRetriever(partial(knowledge.search, **scope))
        match self.name:
            case "crossed":
                nearest = partial(knowledge.nearest, **scope)
                return self._with_draft(CrossModalRetriever(self.embedder, nearest))
            case "probe":
                return self._with_draft(dense)
            case "keywords":
                return KeywordRetriever(dense, self.extract)
            case "hashtag":
                return self._within_groups(knowledge, within)
            case "keyword-hashtag":
                return self._with_draft(self._within_groups(knowledge, within))
            case "bm25":
                source = knowledge if within is None else StaticExamples(_Subset(knowledge, within))
                return BM25Retriever(source, exclude=self.exclude)
            case "hybrid":
                return self._by_tokens(knowledge, within)
        return dense

    def _cached_side(self) -> Callable[[Example], Query] | None:
        if self.name == "crossed":
            return image_only
        return keyword_query if self.name in BY_RESPONSE else None

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

    def _by_tokens(self, knowledge: KnowledgeBase, within: Sequence[str] | None) -> DenseRetriever:
        index = self._index(knowledge)
        search = partial(index.search, exact=True, exclude=self.exclude, within=within)
        return DenseRetriever(search)

    def _index(self, knowledge: KnowledgeBase) -> LateInteractionIndex:
        """Return the index of the knowledge base, which is shared by its retrievers."""
        assert self.tokens is not None
        if (index := self._indexes.get(id(knowledge))) is None:
            index = LateInteractionIndex(knowledge, self.tokens, batch_size=TOKEN_BATCH)
            self._indexes[id(knowledge)] = index
        index.refresh()
        return index

    @cached_property
    def _indexes(self) -> dict[int, LateInteractionIndex]:
        return {}

    def _within_groups(
        self, knowledge: KnowledgeBase, within: Sequence[str] | None
    ) -> HashtagRetriever:
        assert self.text is not None
        text = self.text

        def responses(ids: Sequence[str]) -> Vectors:
            found = knowledge.get_many(ids)
            return text.embed([Query(response_text(one) or one.query.text) for one in found])

        vectors = partial(knowledge.vectors, by=self._searched)
        count = LeaveOneOutGroupCount(vectors, responses, seed=self.seed)
        groups, adapt = (count, True) if self.groups is None else (self.groups, False)
        changes: ChangeReader = knowledge.changes
        if within is not None:
            changes = StaticExamples(_Subset(knowledge, within)).changes
        retrieve = HashtagRetriever(
            changes,
            partial(knowledge.vectors, by=self.names.get(HASHTAGS, HASHTAGS)),
            self._hashtags().embed,
            partial(knowledge.search, exclude=self.exclude, by=self._searched),
            HashtagTree(groups, adapt=adapt, seed=self.seed),
        )
        if len(knowledge) if within is None else within:
            retrieve.build()
        return retrieve


class _Subset:
    """Examples of a knowledge base with some ids."""

    def __init__(self, knowledge: KnowledgeBase, ids: Sequence[str]) -> None:
        self._knowledge = knowledge
        self._ids = ids

    def ids(self) -> Sequence[str]:
        return self._ids

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        return self._knowledge.get_many(ids)


def image_only(example: Example) -> Query:
    """Return the example's query without its text."""
    return replace(example.query, text="")


def question_only(example: Example) -> Query:
    """Return the example's question without its images."""
    return Query(example.query.text)


def keywords_only(example: Example) -> Query:
    """Return the keywords of the example's response, or its question, without its images."""
    return Query(keyword_query(example).text)
