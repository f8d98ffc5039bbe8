"""Late-interaction index of a knowledge base, updated from its change log or by comparing ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol, Self, runtime_checkable

import numpy as np

from bottega._util.identity import Exclude, is_excluded
from bottega.errors import EmbeddingError, EmptyKnowledgeBaseError, NotFoundError, StoreError
from bottega.knowledge.late_interaction.token_array import TokenArray
from bottega.knowledge.late_interaction.token_search import SearchEffort, TokenIndex
from bottega.protocols import MultiVectorEmbedder, Vectors
from bottega.types import Candidate, Example, ExampleChange, Query

IndexedIds = Callable[[], Collection[str]]


class PassageSource(Protocol):
    """Part of a knowledge base that an index reads. The content of an id never changes."""

    def ids(self) -> Sequence[str]: ...

    def get_many(self, ids: Sequence[str]) -> list[Example]: ...


@runtime_checkable
class ChangeSource(Protocol):
    """Source with a change log: `changes(since)` yields what happened after `since`, in order.

    If it has lost entries, it raises `StoreError` or yields numbers of `since` or below.
    """

    def changes(self, since: int, /) -> Iterable[ExampleChange]: ...


@dataclass(frozen=True)
class IndexDiff:
    """Ids to delete and to add; `seq` is the last change included, or None without a log."""

    deleted: list[str]
    new: list[str]
    seq: int | None = None


def index_diff(source: PassageSource, since: int | None, indexed_ids: IndexedIds) -> IndexDiff:
    """Return the changes after `since`, or the difference between the ids if the log has a gap or
    `since` is None."""
    if since is not None:
        changes = _logged_changes(source, since)
        if changes is not None:
            return _diff_from_log(changes, since, indexed_ids)
    # Read the end of the log first: changes between the two reads are repeated, not missed.
    logged = _logged_changes(source, 0)
    seq = None if logged is None else logged[-1].seq if logged else 0
    wanted, stored = dict.fromkeys(source.ids()), dict.fromkeys(indexed_ids())
    deleted = [id for id in stored if id not in wanted]
    return IndexDiff(deleted, [id for id in wanted if id not in stored], seq)


def existing_examples(source: PassageSource, ids: Sequence[str]) -> list[tuple[str, Example]]:
    """Return the ids that still exist, with their examples."""
    try:
        return list(zip(ids, source.get_many(ids), strict=True))
    except NotFoundError:
        if len(ids) <= 1:
            return []
    half = len(ids) // 2
    return [*existing_examples(source, ids[:half]), *existing_examples(source, ids[half:])]


def _diff_from_log(
    changes: Sequence[ExampleChange], since: int, indexed_ids: IndexedIds
) -> IndexDiff:
    if not changes:
        return IndexDiff([], [], since)
    last: dict[str, bool] = {}
    for change in changes:
        last.pop(change.id, None)  # a restored id becomes the newest
        last[change.id] = change.deleted
    stored = set(indexed_ids())
    deleted = [id for id, deleted in last.items() if deleted and id in stored]
    new = [id for id, deleted in last.items() if not deleted and id not in stored]
    return IndexDiff(deleted, new, changes[-1].seq)


def _logged_changes(source: PassageSource, since: int) -> list[ExampleChange] | None:
    """Return the changes after `since`, or None if the log has a gap."""
    if not isinstance(source, ChangeSource):
        return None
    try:
        changes = list(source.changes(since))
    except StoreError:
        return None
    return None if changes and changes[0].seq <= since else changes


class LateInteractionIndex:
    """MaxSim search over a knowledge base: the hybrid retrieval of RCTS (sec. 3.2) if the embedder
    returns image and text tokens.

    Every search first embeds new examples and drops deleted ones. The first search compares ids;
    later ones read `changes` since the previous one, or compare ids again without such a log.
    `folder` keeps the tokens between runs; with None they last as long as the index. Every method
    blocks. Use `DenseRetriever(index.search)` as a retriever.
    """

    def __init__(
        self,
        knowledge: PassageSource,
        embed: MultiVectorEmbedder,
        folder: str | Path | None = None,
        *,
        effort: SearchEffort | None = None,
        seed: int = 0,
        batch_size: int = 32,
    ) -> None:
        self._knowledge = knowledge
        self._embed = embed
        self._batch_size = batch_size
        array = TokenArray(folder, embed.fingerprint, embed.dimension)
        self._tokens = TokenIndex(array, effort=effort, seed=seed)
        self._following = Lock()
        self._seq: int | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def refresh(self) -> int:
        """Update the index and return the number of examples embedded or dropped.

        Batches embedded before an error remain.
        """
        with self._following:
            self._tokens.check_open()
            found = index_diff(self._knowledge, self._seq, self._tokens.ids)
            if found.deleted:
                self._tokens.delete(found.deleted)
            for start in range(0, len(found.new), self._batch_size):
                self._add(found.new[start : start + self._batch_size])
            # Set last: after an error, the same changes are read again.
            self._seq = found.seq
            return len(found.deleted) + len(found.new)

    def search(
        self,
        query: Query,
        k: int,
        *,
        include_self: bool = False,
        exclude: Exclude = "same-image",
        within: Collection[str] | None = None,
        exact: bool = False,
    ) -> list[Candidate]:
        """Return the `k` examples with the highest MaxSim, best first; fewer only if there are
        fewer.

        Excludes the query's own id and, by `exclude`, every example that shares an image with it or
        only the same question. `include_self` excludes nothing. `within` restricts the search to
        these ids. `exact` scores every example. Raises `EmptyKnowledgeBaseError`.
        """
        self._tokens.check_open()
        [tokens] = _check_count(self._embed.embed_queries([query]), 1)
        self.refresh()
        if len(self) == 0:
            raise EmptyKnowledgeBaseError(
                "the knowledge base holds no examples", hint="add some first: bottega add"
            )
        wanted = k
        while True:
            hits = self._tokens.search(tokens, wanted, within=within, exact=exact)
            scores = dict(hits)
            found = [
                Candidate(example, scores[id])
                for id, example in existing_examples(self._knowledge, list(scores))
                if include_self or not is_excluded(query, example, exclude)
            ]
            if len(found) >= k or len(hits) < wanted:
                return found[:k]
            # Exclusion and deletion may have removed hits: search for more.
            wanted *= 2

    def close(self) -> None:
        """Wait for a running refresh and close the index; later calls raise `StoreError`."""
        with self._following:
            self._tokens.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add(self, ids: Sequence[str]) -> None:
        # A meanwhile deleted example has its own log entry, or is missing from the ids.
        found = existing_examples(self._knowledge, ids)
        if found:
            made = self._embed.embed_documents([example.query for _, example in found])
            # An example without tokens gets one zero row, whose score is 0.
            zeros = np.zeros((1, self._embed.dimension), np.float32)
            tokens = [rows if len(rows) else zeros for rows in _check_count(made, len(found))]
            self._tokens.append([id for id, _ in found], tokens)


def _check_count(made: Iterable[Vectors], count: int) -> list[Vectors]:
    matrices = list(made)
    if len(matrices) != count:
        raise EmbeddingError(
            f"the embedder must return {count} matrices, got {len(matrices)}",
            hint="return one matrix per query, an empty one without tokens",
        )
    return matrices
