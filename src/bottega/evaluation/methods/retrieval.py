"""Retrieval methods by name, retrievers within an item's episode, oracles, controls, and caches of
embeddings.

A benchmark without episodes is one episode with the name "".
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from bottega import naming
from bottega._util.identity import DESCRIPTIONS, Exclude, query_key
from bottega._util.progress import SILENT, Display
from bottega.errors import EmbeddingError, NotFoundError, SettingError
from bottega.evaluation.benchmark import (
    Benchmark,
    index_by_id,
    is_passage,
    is_relevant,
    names_passages,
)
from bottega.evaluation.metrics.metric import labels_of
from bottega.knowledge import FlmrEmbedder, KnowledgeBase, TowerTokenEmbedder
from bottega.knowledge.embedders import names
from bottega.knowledge.embedders.flmr import INSTRUCTION
from bottega.knowledge.embedders.names import BUNDLED
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
from bottega.retrieval import DenseRetriever, LabelledPool, TfidfKeywordExtractor
from bottega.types import Candidate, Example, Query

FLMR = "flmr:"
FLMR_OPTIONS: dict[str, int | str] = {"query_tokens": 32, "choices": "no"}
OpenEmbedder = Callable[[str], Embedder]
# Hints name both: most commands have options, compress train has the settings of a file.
SET_EMBED = "set the embedder (embed or --embed) to"
SET_RETRIEVE = "set the retrieval method (retrieve or --retrieve) to"

# Demonstrations never share an image with the item: the answer to another question about the same
# image may reveal the item's answer.
EXCLUDE: Exclude = "same-image"
EXCLUSION_RULE = f"Demonstrations exclude {DESCRIPTIONS[EXCLUDE]}."
UNSCORED = 0.0  # score of a passage for which a benchmark has none

RetrieverFactory = Callable[[Benchmark, KnowledgeBase], Retriever]


class ExamplePool:
    """Examples in memory with the interface that the random retrievers need."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples = {
            example.query.id or f"nameless {index}": example
            for index, example in enumerate(examples)
        }

    def ids(self) -> Sequence[str]:
        return list(self._examples)

    def ids_by_label(self) -> Mapping[str, Sequence[str]]:
        by_label: defaultdict[str, list[str]] = defaultdict(list)
        for id, example in self._examples.items():
            for label in labels_of(example):
                by_label[label].append(id)
        return by_label

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        """Return the examples in the order of `ids`. Raises `NotFoundError`."""
        for id in ids:
            if id not in self._examples:
                raise NotFoundError(
                    f"passage {id} is unknown", hint="check the tag passage of the items"
                )
        return [self._examples[id] for id in ids]


class EpisodeRetriever:
    """Retriever that delegates each query to the retriever of its episode."""

    def __init__(self, episode_of: Mapping[str, str], retrievers: Mapping[str, Retriever]) -> None:
        self._episode_of = episode_of
        self._retrievers = retrievers

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await self._retrievers[self._episode_of.get(query.id or "", "")](query, k)


class OracleRetriever:
    """Retriever of the gold passage among k - 1 random others, in a random order.

    The query seeds both. `passage_of` maps query ids to passage ids. Retrieval uses the gold
    passage, so accuracy measures reading alone.
    """

    def __init__(self, pool: LabelledPool, passage_of: Mapping[str, str], *, seed: int) -> None:
        self._pool = pool
        self._passage_of = passage_of
        self._seed = seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        gold = self._passage_of[str(query.id)]
        rng = random.Random(f"{self._seed}:{query.id}")
        others = [id for id in self._pool.ids() if id != gold]
        chosen = [gold, *rng.sample(others, min(k - 1, len(others)))]
        rng.shuffle(chosen)
        return [Candidate(example, 0.0) for example in self._pool.get_many(chosen)]


class ScoredPassageRetriever:
    """Retriever of the passages that have a score for the query, in a random order.

    `scores` maps query ids to scores by passage id. If more than k passages have one, those with
    the highest remain; if fewer, random others with score 0 are added. The query seeds both.
    """

    def __init__(
        self, pool: LabelledPool, scores: Mapping[str, Mapping[str, float]], *, seed: int
    ) -> None:
        self._pool, self._scores, self._seed = pool, scores, seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        scores = self._scores[str(query.id)]
        rng = random.Random(f"{self._seed}:{query.id}")
        chosen = sorted(scores, key=lambda id: scores[id], reverse=True)[:k]
        others = [id for id in self._pool.ids() if id not in scores]
        chosen += rng.sample(others, min(k - len(chosen), len(others)))
        rng.shuffle(chosen)
        found = zip(chosen, self._pool.get_many(chosen), strict=True)
        return [Candidate(example, scores.get(id, UNSCORED)) for id, example in found]


def gold_passages(data: Benchmark) -> dict[str, str]:
    """Map query ids to the ids of the passages that answer them."""
    return {id: item.tags["passage"] for id, item in index_by_id(data.items).items()}


def oracle_retriever(data: Benchmark, *, seed: int) -> Retriever:
    """Return an `OracleRetriever` over the passages of each episode."""
    gold = gold_passages(data)
    by_episode = {
        episode: OracleRetriever(pool, gold, seed=seed)
        for episode, pool in episode_pools(data).items()
    }
    return EpisodeRetriever(data.episode_of, by_episode)


def scored_retriever(data: Benchmark, *, seed: int) -> Retriever:
    """Return a `ScoredPassageRetriever` over the passages of each episode."""
    by_episode = {
        episode: ScoredPassageRetriever(pool, data.passage_scores, seed=seed)
        for episode, pool in episode_pools(data).items()
    }
    return EpisodeRetriever(data.episode_of, by_episode)


def pools(data: Benchmark, knowledge: KnowledgeBase) -> dict[str, LabelledPool]:
    """Return the examples of each episode; without episodes, the knowledge base."""
    return {**episode_pools(data)} if data.episode_of else {"": knowledge}


def episode_pools(data: Benchmark) -> dict[str, ExamplePool]:
    """Return the examples of each episode by the benchmark's own ids."""
    members: defaultdict[str, list[Example]] = defaultdict(list)
    for example in data.knowledge:
        members[data.episode_of.get(str(example.query.id), "")].append(example)
    return {episode: ExamplePool(examples) for episode, examples in members.items()}


def nearest_retriever(
    data: Benchmark, knowledge: KnowledgeBase, search: Callable[..., list[Candidate]] | None = None
) -> Retriever:
    """Return a retriever of the nearest examples, within the query's episode if there are episodes.

    `search` defaults to the exact search of the knowledge base; another one takes `within`.
    """
    search = partial(search or knowledge.search, exclude=EXCLUDE)
    if not data.episode_of:
        return DenseRetriever(search)
    retrievers = {
        episode: DenseRetriever(partial(search, within=knowledge.ids(tags={"episode": episode})))
        for episode in dict.fromkeys(data.episode_of.values())
    }
    return EpisodeRetriever(data.episode_of, retrievers)


class SwappedRetriever:
    """Control retriever that searches with the next item that has another answer.

    With episodes, items of another episode come first. Examples that answer the original query are
    removed: its gold passage where items name theirs, else each relevant passage (`is_relevant`).
    Further results of the other item replace them; if none remains, the item after it is
    used. Raises `SettingError` if no item remains, and for items without unique ids.
    """

    def __init__(self, retrieve: Retriever, data: Benchmark) -> None:
        self._retrieve, self._data = retrieve, data
        self._items = index_by_id(data.items)
        self._index = {id: index for index, id in enumerate(self._items)}
        self._names_passages = names_passages(data.items)

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        item = self._items[str(query.id)]
        for other in self._others(item):
            found = await self._retrieve(other.query, k)
            if not found or (kept := await self._filtered(item, other, found, k)):
                return kept if found else []
        raise SettingError(
            "no item has another answer and passages without this item's answer",
            hint="evaluate more items, or remove this control",
        )

    def _others(self, item: Example) -> Iterator[Example]:
        index, items = self._index[str(item.query.id)], self._data.items
        following = (*items[index + 1 :], *items[:index])
        for elsewhere in (True, False) if self._data.episode_of else (False,):
            for other in following:
                if other.answer != item.answer and self._is_elsewhere(item, other) is elsewhere:
                    yield other

    def _is_elsewhere(self, item: Example, other: Example) -> bool:
        one, two = (self._data.episode_of.get(str(each.query.id)) for each in (item, other))
        return one != two

    async def _filtered(
        self, item: Example, other: Example, found: list[Candidate], k: int
    ) -> list[Candidate]:
        # Keep the first results: a retriever may sample different ones for a larger k.
        kept = [one for one in found if not self._answers(item, one.example)]
        depth = k
        while len(kept) < k and len(found) >= depth:
            depth *= 2
            found = await self._retrieve(other.query, depth)
            shown = [one.example for one in kept]
            kept += [
                one
                for one in found
                if one.example not in shown and not self._answers(item, one.example)
            ]
        return kept[:k]

    def _answers(self, item: Example, example: Example) -> bool:
        if self._names_passages:
            return str(example.query.id) == item.tags["passage"]
        return is_passage(example) and is_relevant(self._data, item, example)


class RescoredRetriever:
    """Retriever that replaces the scores of another retriever's candidates."""

    def __init__(self, retrieve: Retriever, score: Callable[[Query, Candidate], float]) -> None:
        self._retrieve, self._score = retrieve, score

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await self._retrieve(query, k)
        return [replace(one, score=self._score(query, one)) for one in found]


class LateInteractionScorer:
    """Retriever that scores another retriever's candidates by late interaction."""

    def __init__(self, retrieve: Retriever, tokens: MultiVectorEmbedder | None = None) -> None:
        self._retrieve = retrieve
        self._tokens = tokens or bundled_token_embedder()

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        found = await self._retrieve(query, k)
        return await asyncio.to_thread(self._rescored, query, found)

    def _rescored(self, query: Query, found: Sequence[Candidate]) -> list[Candidate]:
        question = self._tokens.embed_queries([query])[0]
        documents = self._tokens.embed_documents([one.example.query for one in found])
        return [
            replace(one, score=late_interaction_score(question, rows))
            for one, rows in zip(found, documents, strict=True)
        ]


def bundled_token_embedder() -> MultiVectorEmbedder:
    """Return the bundled embedder of image and word tokens."""
    return TowerTokenEmbedder.bundled()


def late_interaction_score(question: Vectors, passage: Vectors) -> float:
    """Return the MaxSim score of token vectors, (tokens, dimension) each."""
    return float((question @ passage.T).max(axis=1).sum())


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
    retrieve: Collection[str], *, embed_text: str | None, metric: str | None, groups: int | None
) -> None:
    """Raise `SettingError` for an option that none of the retrieval methods uses."""
    if embed_text is not None:
        naming.check_text_embedder(embed_text)
    chosen = " and ".join(retrieve)
    unused = (
        ("--embed-text", embed_text is not None, WITHOUT_TEXT, "dual"),
        (f"--metric {metric}", metric in ("l2", "fitted"), WITHOUT_METRIC, "dual"),
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
        default = f"{model}:text" if averages and name not in WITHOUT_METRIC else "words"
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
