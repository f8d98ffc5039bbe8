"""Dense search, rank fusion, random samples, and wrappers of a retriever."""

from __future__ import annotations

import asyncio
import math
import random
import weakref
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain

from bottega._util.caching import SharedTask
from bottega._util.event_loops import gather_or_cancel
from bottega._util.identity import is_excluded, query_key
from bottega._util.progress import plural
from bottega.errors import EmptyKnowledgeBaseError, NotFoundError, SettingError, check_count
from bottega.protocols import Embedder, Retriever
from bottega.retrieval.sources import LabelledPool, NearestSearch, SearchFunction
from bottega.types import Candidate, Example, Query, Trace

CONTEXT_TAG = "context"
WIDER = 4
SAME_TEXT_DEPTH = 32  # candidates among which a router looks for one with the same text


@dataclass(frozen=True)
class DenseRetriever:
    """Retriever of the k nearest examples by `search(query, k)`, which blocks and runs in a thread.

    Visual RAG, eq. 1: exact L2 distance (or cosine, the same order for unit vectors). The search
    decides whether it compares images, texts or both: by the knowledge base's embedder, or by a
    view, as in `functools.partial(knowledge.search, by="text")`. Both means the average of the unit
    vectors of image and text. `SentenceEmbedder(model, mode="average", average="raw",
    normalize=False)` averages as the code of Cache-of-Thought does.
    """

    search: SearchFunction

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return await asyncio.to_thread(self.search, query, k)


@dataclass(frozen=True)
class CrossModalRetriever:
    """Retriever that compares queries of one embedder with a view of another embedder.

    Both must share a space, as CLIP's images and texts do. Cache-of-Thought's best dense search
    (Table 1) compares the mean of a query's image and keywords with the cached images alone.
    """

    embed: Embedder
    nearest: NearestSearch

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        def find() -> list[Candidate]:
            return self.nearest(self.embed.embed([query]), k, excluded_for=[query])[0]

        return await asyncio.to_thread(find)


class RankFusionRetriever:
    """Retriever that orders the results of several retrievers by the sum of weight / (constant +
    rank).

    Ranks start at 1, and score scales do not matter (Cormack, Clarke and Buettcher 2009, with
    constant 60). The retrievers run concurrently, each for `depth` examples, or k if that is more;
    deeper ranks count as 0. Candidates of one list with equal scores share their best rank. An
    all-tied list is ignored.
    """

    def __init__(
        self,
        retrievers: Iterable[Retriever],
        *,
        constant: float = 60.0,
        depth: int = 50,
        weights: Iterable[float] | None = None,
    ) -> None:
        retrievers = tuple(retrievers)
        weights = None if weights is None else tuple(weights)
        if not retrievers:
            raise SettingError(
                "retrievers must have at least 1 entry, got 0", hint="pass one retriever or more"
            )
        if not 0 < constant < math.inf:
            raise SettingError(f"constant must be above 0, got {constant}", hint="set constant=60")
        if weights is not None and (
            len(weights) != len(retrievers) or not all(0 <= weight < math.inf for weight in weights)
        ):
            raise SettingError(
                f"weights must have {plural(len(retrievers), 'entry')} of 0 or more, got"
                f" {list(weights)}",
                hint="pass one weight for each retriever",
            )
        self._retrievers = retrievers
        self._weights = weights or (1.0,) * len(retrievers)
        self._constant = constant
        self._depth = depth

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        check_count("k", k, 0)
        depth = max(k, self._depth)
        rankings = await gather_or_cancel(retrieve(query, depth) for retrieve in self._retrievers)
        return self._fused(rankings)[:k]

    def _fused(self, rankings: Sequence[Sequence[Candidate]]) -> list[Candidate]:
        scores: dict[Hashable, float] = {}
        found: dict[Hashable, Candidate] = {}
        for weight, ranking in zip(self._weights, rankings, strict=True):
            informative = len(ranking) == 1 or len({candidate.score for candidate in ranking}) > 1
            # Equal scores share their best rank, so later entries are written first.
            first = {one.score: rank for rank, one in reversed(list(enumerate(ranking, start=1)))}
            for candidate in ranking:
                id = _identity(candidate.example)
                rank = first[candidate.score]
                share = weight / (self._constant + rank) if informative else 0.0
                scores[id] = scores.get(id, 0.0) + share
                found.setdefault(id, candidate)
        best = sorted(scores, key=lambda id: -scores[id])
        return [Candidate(found[id].example, scores[id]) for id in best]


def _identity(example: Example) -> Hashable:
    """Return the id of the example, or its content if it has none."""
    if example.id is not None:
        return example.id
    return example.query, example.answer, example.labels, example.rationale, example.source


@dataclass(frozen=True)
class SameContextFilter:
    """Retriever wrapper that removes examples from another context than the query's.

    The context of an example is `tags["context"]`; an example without this tag, such as an imported
    one, matches every context. If too few remain, the search is repeated with `k` times `WIDER`, up
    to `furthest` examples.
    """

    retrieve: Retriever
    _: KW_ONLY
    furthest: int = 256

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        depth = k
        while True:
            found = await self.retrieve(query, depth)
            contexts = [one.example.tags.get(CONTEXT_TAG, query.context) for one in found]
            pairs = zip(found, contexts, strict=True)
            matching = [one for one, context in pairs if context == query.context]
            if len(matching) >= k or len(found) < depth or depth >= self.furthest:
                return matching[:k]
            depth = min(max(self.furthest, k), depth * WIDER)


@dataclass(frozen=True)
class EmptyTolerantRetriever:
    """Retriever wrapper that returns no candidates while the knowledge base is empty."""

    retrieve: Retriever

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        try:
            return await self.retrieve(query, k)
        except EmptyKnowledgeBaseError:
            return []


@dataclass
class SharedSearch:
    """Search of one query object: its task while it runs, then its result.

    The task is dropped when it ends: its context may refer to the query, which would then never be
    freed.
    """

    k: int
    query: weakref.ref[Query]  # its callback removes the search
    running: SharedTask[list[Candidate]] | None = None
    found: list[Candidate] | None = None

    async def result(self) -> list[Candidate]:
        """Return the result, or raise the error of the search. Waits while it runs."""
        if self.running is not None:
            return await self.running.wait()
        assert self.found is not None
        return self.found


class SharedRetriever:
    """Retriever wrapper that searches once for all calls with the same `Query` object.

    A router and the demonstrations share one search this way, while it runs and afterwards. The
    first call searches for at least `min_k` candidates, which saves a second search if a router
    needs only one. An equal query in another object is another request, because the cache may have
    grown. The result is dropped with the query object, or when `observe` receives the trace of the
    query. A failed search is repeated at the next call. A search without waiting calls is
    cancelled.
    """

    def __init__(self, retrieve: Retriever, *, min_k: int = 1) -> None:
        check_count("min_k", min_k)
        self._retrieve = retrieve
        self._min_k = min_k
        self._searches: dict[int, SharedSearch] = {}

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        search = self._searches.get(id(query))
        if search is None or search.k < k:
            search = self._begin(query, max(k, self._min_k))
        return (await search.result())[:k]

    def best(self, query: Query) -> float | None:
        """Return the highest score found for this object, None without a result."""
        search = self._searches.get(id(query))
        if search is None or search.found is None:
            return None
        return max((one.score for one in search.found), default=None)

    async def observe(self, trace: Trace, /) -> None:
        """Drop the result for the query of this trace."""
        self._searches.pop(id(trace.query), None)

    def _begin(self, query: Query, k: int) -> SharedSearch:
        key, searches = id(query), self._searches
        search = SharedSearch(k, weakref.ref(query, lambda _: searches.pop(key, None)))

        def forget() -> None:
            if searches.get(key) is search:
                del searches[key]

        def end(task: asyncio.Task[list[Candidate]]) -> None:
            search.running = None
            # An error refers to its traceback and so to the query: neither would ever be freed.
            if task.cancelled() or task.exception() is not None:
                forget()
            else:
                search.found = task.result()

        search.running = SharedTask(self._retrieve(query, k), forget)
        search.running.task.add_done_callback(end)
        searches[key] = search
        return search


class UniformSampler:
    """Retriever that samples k examples uniformly without replacement (many-shot ICL). The score of
    each is 0.

    The sample depends only on `seed` and the query, not on concurrency or query order. The ids are
    read once, at construction; examples deleted later are left out.
    """

    def __init__(self, pool: LabelledPool, *, seed: int) -> None:
        self._pool = pool
        self._ids = _not_empty(pool.ids())
        self._seed = seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        rng = _query_rng(query, self._seed)
        order = rng.sample(self._ids, len(self._ids))
        return await asyncio.to_thread(_take, self._pool, order, query, k)


class BalancedSampler:
    """Retriever that samples k examples with equal label counts (up to one), in random order.

    If k is less than the number of labels, k different labels are sampled. Seeded like
    `UniformSampler`.
    """

    def __init__(self, pool: LabelledPool, *, seed: int) -> None:
        self._pool = pool
        self._by_label = {label: list(ids) for label, ids in pool.ids_by_label().items()}
        _not_empty(list(self._by_label))
        self._seed = seed

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        rng = _query_rng(query, self._seed)
        found = await asyncio.to_thread(_take, self._pool, self._rounds(rng), query, k)
        rng.shuffle(found)
        return found

    def _rounds(self, rng: random.Random) -> list[str]:
        """Return one id of every label, then a second of every label, and so on; each id once."""
        labels = rng.sample(list(self._by_label), len(self._by_label))
        columns = [
            rng.sample(self._by_label[label], len(self._by_label[label])) for label in labels
        ]
        depth = max(map(len, columns))
        rounds = ([column[i] for column in columns if i < len(column)] for i in range(depth))
        return list(dict.fromkeys(chain.from_iterable(rounds)))


def _query_rng(query: Query, seed: int) -> random.Random:
    # Published samples for queries without images depend on this text, which has no last colon
    # there; that of `_util.identity` has one.
    return random.Random(":".join((str(seed), *query_key(query))))


def _take(pool: LabelledPool, order: Sequence[str], query: Query, k: int) -> list[Candidate]:
    """Return the first k of `order` without the query itself and deleted ids, k at a time."""
    if k <= 0:
        return []
    taken: list[Candidate] = []
    for start in range(0, len(order), k):
        for example in _present(pool, order[start : start + k]):
            if not is_excluded(query, example):
                taken.append(Candidate(example, 0.0))
        if len(taken) >= k:
            break
    return taken[:k]


def _present(pool: LabelledPool, ids: Sequence[str]) -> list[Example]:
    try:
        return pool.get_many(ids)
    except NotFoundError:
        if len(ids) <= 1:
            return []
    half = len(ids) // 2
    return [*_present(pool, ids[:half]), *_present(pool, ids[half:])]


def _not_empty(ids: Sequence[str]) -> list[str]:
    if not ids:
        raise EmptyKnowledgeBaseError(
            "the knowledge base is empty", hint="bottega add K.db FOLDER fills it"
        )
    return list(ids)


class SimilarityFilter:
    """Retriever wrapper that drops candidates less similar than `min_similarity`."""

    def __init__(self, retrieve: Retriever, min_similarity: float) -> None:
        self._retrieve, self._min_similarity = retrieve, min_similarity

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        return [one for one in await self._retrieve(query, k) if one.score >= self._min_similarity]


class UnreadFilter:
    """Retriever wrapper that returns no candidates for a question without any of the parts `reads`.
    Where these lack images, the answers to questions with images are no candidates, for such a
    question or another one; passages are."""

    def __init__(self, retrieve: Retriever, reads: Collection[str]) -> None:
        self._retrieve, self._reads = retrieve, reads

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        has_text, has_image = "text" in self._reads, "image" in self._reads
        if not ((has_text and query.text) or (has_image and query.images)):
            return []
        found = await self._retrieve(query, k)
        if has_image:
            return found
        return [
            one
            for one in found
            if not (one.example.answer and (query.images or one.example.query.images))
        ]


class SameTextFilter:
    """Retriever wrapper that drops candidates with another text, for a router by a search that
    compares images alone: other questions about the same image are not similar."""

    def __init__(self, retrieve: Retriever) -> None:
        self._retrieve = retrieve

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]:
        for depth in (k, SAME_TEXT_DEPTH):
            found = await self._retrieve(query, depth)
            same = [one for one in found if one.example.query.text == query.text]
            if same or len(found) < depth:
                break
        return same[:k]
