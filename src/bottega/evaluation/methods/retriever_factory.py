"""Retrieval methods by name, their retrievers within the episodes of a benchmark, and caches of
question embeddings."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from bottega import naming
from bottega._util.identity import Exclude, query_key
from bottega._util.progress import SILENT, Display
from bottega.errors import EmbeddingError, SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.methods.retrieval import EXCLUDE, EpisodeRetriever, bundled_token_embedder
from bottega.knowledge import FlmrEmbedder, KnowledgeBase
from bottega.knowledge.embedders import names
from bottega.knowledge.embedders.flmr import INSTRUCTION
from bottega.knowledge.embedders.names import BUNDLED
from bottega.knowledge.index.vector_index import VectorMetric
from bottega.naming import read_options
from bottega.protocols import Embedder, MultiVectorEmbedder, Retriever, Vectors
from bottega.recipes.cache_retrieval import (
    GROUPED,
    RETRIEVE,
    TEXT_ONLY,
    WITHOUT_METRIC,
    WITHOUT_TEXT,
    CacheRetrieval,
    DraftModel,
)
from bottega.retrieval import TfidfKeywordExtractor
from bottega.types import Query

FLMR = "flmr:"
FLMR_OPTIONS: dict[str, int | str] = {"query_tokens": 32, "choices": "no"}
OpenEmbedder = Callable[[str], Embedder]
# Hints name both: most commands have options, compress train has the settings of a file.
SET_EMBED = "set the embedder (embed or --embed) to"
SET_RETRIEVE = "set the retrieval method (retrieve or --retrieve) to"

RetrieverFactory = Callable[[Benchmark, KnowledgeBase], Retriever]
# Retrieval methods with one vector for each example.
BY_VECTORS = ("image", "text", "dual")


def retriever_factory(retrieval: CacheRetrieval) -> RetrieverFactory:
    """Return a factory of retrievers over a knowledge base with the views of `retrieval`. All
    methods of a run share one retriever."""
    made: dict[int, Retriever] = {}

    def make(data: Benchmark, knowledge: KnowledgeBase) -> Retriever:
        if id(knowledge) not in made:
            made[id(knowledge)] = _retriever(retrieval, data, knowledge)
        return made[id(knowledge)]

    return make


def _retriever(retrieval: CacheRetrieval, data: Benchmark, knowledge: KnowledgeBase) -> Retriever:
    if not data.episode_of:
        return retrieval.retriever(knowledge)
    members: defaultdict[str, list[str]] = defaultdict(list)
    for example in knowledge:
        members[example.tags["episode"]].append(str(example.id))
    by_episode = {episode: retrieval.retriever(knowledge, ids) for episode, ids in members.items()}
    return EpisodeRetriever(data.episode_of, by_episode)


class CachingEmbedder:
    """Embedder that embeds each query of a run once, for all methods.

    Vectors are kept without a limit, by the query's text and image hashes.
    """

    def __init__(self, inner: Embedder) -> None:
        self.inner = inner
        self._cache: dict[tuple[str, ...], Vectors] = {}

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    @property
    def dimension(self) -> int:
        return self.inner.dimension

    def embed(self, queries: Sequence[Query]) -> Vectors:
        if not queries:
            return np.empty((0, self.dimension), np.float32)
        return np.stack(_cached(self._cache, queries, self.inner.embed))

    def keep(self, queries: Sequence[Query], rows: Vectors) -> None:
        """Cache the vectors (n, dimension) of these queries."""
        self._cache.update(zip(map(query_key, queries), rows, strict=True))


class CachingTokenEmbedder:
    """Token embedder that embeds each question of a run once.

    Documents are embedded on each call; `progress` receives their number.
    """

    def __init__(
        self, inner: MultiVectorEmbedder, progress: Callable[[int], None] | None = None
    ) -> None:
        self._inner = inner
        self._progress = progress
        self._cache: dict[tuple[str, ...], Vectors] = {}

    @property
    def fingerprint(self) -> str:
        return self._inner.fingerprint

    @property
    def dimension(self) -> int:
        return self._inner.dimension

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]:
        return _cached(self._cache, queries, self._inner.embed_queries, _key_with_choices)

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]:
        made = self._inner.embed_documents(queries)
        if self._progress is not None:
            self._progress(len(queries))
        return made


def _cached(
    vectors: dict[tuple[str, ...], Vectors],
    queries: Sequence[Query],
    embed: Callable[[Sequence[Query]], Iterable[Vectors]],
    key: Callable[[Query], tuple[str, ...]] = query_key,
) -> list[Vectors]:
    fresh = {key(q): q for q in queries if key(q) not in vectors}
    if fresh:
        vectors.update(zip(fresh, embed(list(fresh.values())), strict=True))
    return [vectors[key(q)] for q in queries]


def _key_with_choices(query: Query) -> tuple[str, ...]:
    """Return the key of a query whose tokens may include its choices (`FlmrEmbedder`)."""
    return *query_key(query), *query.choices


def open_embedder(
    spec: str, load: OpenEmbedder = names.open_embedder, display: Display = SILENT
) -> Embedder:
    """Return the embedder of a name. Raises `SettingError`, and `EmbeddingError` with a hint."""
    naming.check_embedder(spec)
    try:
        with display.waiting(f"loading the embedder {spec}"):
            return load(spec)
    except EmbeddingError as error:
        raise EmbeddingError(
            str(error),
            hint=f"{SET_EMBED} photos, bundled, pixels, words, minilm, dual, or a"
            " sentence-transformers folder or id (needs a network once)",
        ) from error


def check_retrieve(name: str, embed: str = BUNDLED) -> None:
    if name not in RETRIEVE:
        hint = f"{naming.suggestion(name, RETRIEVE)}use {', '.join(RETRIEVE)}"
        raise SettingError(f"retrieval method is unknown, got {name!r}", hint=hint)
    if name == "hybrid" and embed != BUNDLED and not embed.startswith(FLMR):
        raise SettingError(
            f"hybrid needs token vectors of the bundled model or PreFLMR, got {embed}",
            hint=f"{SET_EMBED} bundled or flmr:FOLDER, or {SET_RETRIEVE} dual",
        )
    if name != "hybrid" and embed.startswith(FLMR):
        raise SettingError(
            f"{embed} computes several vectors per question, which {name} does not support",
            hint=f"{SET_RETRIEVE} hybrid",
        )


def check_retrieval_options(
    retrieve: Collection[str], *, embed_text: str | None, metric: VectorMetric, groups: int | None
) -> None:
    """Raise `SettingError` for an option that none of the retrieval methods uses."""
    if embed_text is not None:
        naming.check_text_embedder(embed_text)
    chosen = " and ".join(retrieve)
    unused = (
        ("--embed-text", embed_text is not None, WITHOUT_TEXT, "dual"),
        ("--metric l2", metric == "l2", WITHOUT_METRIC, "dual"),
        ("--groups", groups is not None, set(RETRIEVE) - set(GROUPED), "hashtag"),
    )
    for option, given, without, other in unused:
        if given and set(retrieve) <= set(without):
            raise SettingError(
                f"{option} has no effect on --retrieve {chosen}",
                hint=f"remove it, or set --retrieve {other}",
            )


def open_tokens(embed: str, display: Display = SILENT) -> MultiVectorEmbedder | None:
    """Return a PreFLMR embedder, with document images as in RCTS; None for the bundled one.

    Options follow the checkpoint: `flmr:DIR,query_tokens=512,choices=yes,instruction=Question:`.
    The instruction comes last, so it may contain commas. Raises `SettingError`.
    """
    if not embed.startswith(FLMR):
        return None
    spec, given, instruction = embed.removeprefix(FLMR).partition(",instruction=")
    name, comma, options = spec.partition(",")
    chosen = read_options("flmr", options if comma else None, FLMR_OPTIONS)
    if chosen.get("choices", "no") not in ("yes", "no"):
        raise SettingError(f"choices is unknown, got {chosen['choices']!r}", hint="use yes or no")
    if not naming.is_folder_or_hub_id(name):
        raise SettingError(
            f"PreFLMR checkpoint is unknown, got {name!r}",
            hint="use --embed flmr:FOLDER or flmr:OWNER/NAME",
        )
    with display.waiting(f"loading the embedder {embed}"):
        return FlmrEmbedder(
            name,
            document_images=True,
            instruction=instruction if given else INSTRUCTION,
            query_tokens=int(chosen["query_tokens"]) if "query_tokens" in chosen else None,
            choices=chosen.get("choices") == "yes",
            threads=os.cpu_count(),
        )


def open_retrieval(
    retrieve: str,
    embed: str,
    embed_text: str | None = None,
    *,
    questions: Iterable[str] = (),
    draft: DraftModel | None = None,
    groups: int | None = None,
    exclude: Exclude = EXCLUDE,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    display: Display = SILENT,
) -> CacheRetrieval:
    """Return the retrieval method of a name; each query of a run is embedded once.

    `embed` embeds images, and also text for `text` if it reads text only. `embed_text` defaults to
    the text part of `embed` if that ends in `:average` or `:raw-average`, else to words.
    `questions` give the document frequencies of keywords; if all are equal, hashtags group images.
    `progress` receives the number of examples that `hybrid` embedded.
    """
    check_retrieve(retrieve, embed)
    name = next(one for one in RETRIEVE if one == retrieve)

    def caching(spec: str) -> CachingEmbedder:
        return CachingEmbedder(open_embedder(spec, display=display))

    questions = list(questions)
    model, averages = names.average_parts(embed)
    image = text = average = tokens = None
    if name not in TEXT_ONLY:
        image = caching(f"{model}:image" if averages else embed)
    if name == "text" and names.reads_text_only(embed):
        text = caching(embed_text or embed)
    elif name != "image":
        default = f"{model}:text" if averages and name not in TEXT_ONLY[1:] else "words"
        text = caching(embed_text or default)
    if averages and name not in ("image", *TEXT_ONLY):
        average = caching(embed)
    elif averages and name == "image":
        image = caching(embed)
    if name == "hybrid":
        tokens = CachingTokenEmbedder(
            open_tokens(embed, display) or bundled_token_embedder(), progress
        )
    return CacheRetrieval(
        name,
        image=image,
        text=text,
        average=average,
        tokens=tokens,
        draft=draft,
        extract=TfidfKeywordExtractor(questions, longest=1),
        groups=groups,
        group_images=len(set(questions)) == 1,
        exclude=exclude,
        seed=seed,
    )
