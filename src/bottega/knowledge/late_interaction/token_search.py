"""MaxSim search in three stages: centroids exclude documents, int8 ranks, float32 scores."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from bottega._util.durable_files import os_errors
from bottega.errors import SettingError, StoreError
from bottega.knowledge.late_interaction.maxsim import Positions, TokenRows, exact_scores
from bottega.knowledge.late_interaction.quantization import (
    Bytes,
    CentroidCodes,
    CodeScan,
    int8_scores,
)
from bottega.knowledge.late_interaction.token_array import TokenArray, check_tokens
from bottega.protocols import Vectors

log = logging.getLogger(__name__)
# Below this many documents centroids cost more than they save.
MIN_CODED_DOCUMENTS = 1024
MAX_WASTED = 0.25


@dataclass(frozen=True)
class SearchEffort:
    """Trade-off between speed and recall.

    `shortlist` is the share of documents that centroids pass to the int8 scan (1: all, which needs
    no clusters in the data); `rescored` is the number scored exactly. Up to `small` documents skip
    the centroids.
    """

    shortlist: float = 0.3
    rescored: int = 64
    small: int = 256

    def __post_init__(self) -> None:
        if not 0 < self.shortlist <= 1:
            raise SettingError(
                f"shortlist must be above 0 and at most 1, got {self.shortlist}",
                hint="use a share such as 0.3",
            )
        if self.rescored < 1:
            raise SettingError(f"rescored must be at least 1, got {self.rescored}", hint="use 64")


@dataclass(frozen=True)
class TokenCopies:
    """Tokens at each precision; document i has the rows offsets[i]:offsets[i + 1]."""

    offsets: Positions
    float16_rows: TokenRows  # (tokens, dimension) float16
    int8_rows: Bytes
    scale: float
    codes: CodeScan | None


def nearest(
    query: Vectors, copies: TokenCopies, documents: Positions, k: int, effort: SearchEffort
) -> tuple[Positions, Vectors]:
    """Return the `k` best of `documents`, best first, with float32 scores of the float16 tokens."""
    rescored = max(effort.rescored, 2 * k)
    if copies.codes is not None and effort.shortlist < 1 and len(documents) > effort.small:
        wanted = max(int(effort.shortlist * len(documents)), effort.small, rescored)
        documents = select_best(documents, copies.codes.scores(query)[documents], wanted)
    if len(documents) > rescored:
        rough = int8_scores(query, copies.int8_rows, copies.scale, copies.offsets, documents)
        documents = select_best(documents, rough, rescored)
    scores = exact_scores(query, copies.float16_rows, copies.offsets, documents)
    order = np.argsort(-scores, kind="stable")[:k]
    return documents[order], scores[order]


def select_best(documents: Positions, scores: Vectors, count: int) -> Positions:
    """Return the `count` best documents, ordered by position."""
    if len(documents) <= count:
        return documents
    return np.sort(documents[np.argpartition(-scores, count)[:count]])


class TokenIndex:
    """MaxSim search over a `TokenArray`. Methods are safe to call from several threads; writes do
    not wait for searches.

    Centroids are trained with `seed` when the array reaches 1,024 documents and again when it
    outgrows them. That takes seconds to a minute, in the first search that needs them.
    """

    def __init__(
        self, array: TokenArray, *, effort: SearchEffort | None = None, seed: int = 0
    ) -> None:
        self._array = array
        self._effort = effort or SearchEffort()
        self._seed = seed
        self._lock = Lock()
        self._coded: CentroidCodes | None = None
        self._copies: TokenCopies | None = None

    def __len__(self) -> int:
        return len(self._array)

    def ids(self) -> list[str]:
        return self._array.ids()

    def append(self, ids: Sequence[str], documents: Sequence[Vectors]) -> None:
        with self._lock:
            self._array.append(ids, documents)
            self._copies = None

    def delete(self, ids: Collection[str]) -> int:
        """Delete documents and return their number. The array is compacted once a quarter is
        deleted."""
        with self._lock:
            count = self._array.delete(ids)
            if self._array.wasted_share > MAX_WASTED:
                self._compact()
            return count

    def search(
        self, query: Vectors, k: int, *, within: Collection[str] | None = None, exact: bool = False
    ) -> list[tuple[str, float]]:
        """Return the `k` best ids with their MaxSim, best first; `within` restricts them.

        `query` is (tokens, dimension). `exact` scores every document in float32. Raises
        `EmbeddingError` for a query of another width or with values that float16 cannot hold.
        """
        if k < 1:
            raise SettingError(f"k must be at least 1, got {k}", hint="use k=5")
        if len(query):
            check_tokens("the query", query, self._array.dimension)
        with self._lock:
            self._array.check_open()
            copies = self._current()
            documents = self._array.positions(within)
            ids = self._array.ids_by_position()
        if len(documents) == 0 or len(query) == 0:
            return []
        if exact:
            scores = exact_scores(query, copies.float16_rows, copies.offsets, documents)
            order = np.argsort(-scores, kind="stable")[:k]
            found, scores = documents[order], scores[order]
        else:
            found, scores = nearest(query, copies, documents, k, self._effort)
        pairs = zip(found.tolist(), scores.tolist(), strict=True)
        return [(ids[position], score) for position, score in pairs]

    def check_open(self) -> None:
        self._array.check_open()

    def close(self) -> None:
        with self._lock:
            self._array.close()

    def _compact(self) -> None:
        """Compact the array. A full disk prevents this, but not the deletion."""
        try:
            self._array.compact()
        except StoreError as error:
            log.warning("the token array was not compacted: %s", error)
        else:
            self._coded = self._copies = None

    def _current(self) -> TokenCopies:
        if self._copies is None:
            array, coded = self._array, self._codes()
            scan = CodeScan(coded.centroids, coded.codes, array.offsets) if coded else None
            self._copies = TokenCopies(
                array.offsets, array.float16_rows, array.int8_rows, array.scale, scan
            )
        return self._copies

    def _codes(self) -> CentroidCodes | None:
        """Return codes of every token, or None while there are too few documents."""
        array, tokens = self._array, len(self._array.float16_rows)
        if len(array.offsets) - 1 < MIN_CODED_DOCUMENTS or self._effort.shortlist == 1:
            return None
        held = self._coded or CentroidCodes.load(array.codes_path, array.dimension)
        if held is None or held.is_outgrown(tokens) or len(held.codes) > tokens:
            current = CentroidCodes.of(array.float16_rows, self._seed)
        else:
            current = held if len(held.codes) == tokens else held.extend(array.float16_rows)
        if current is not held:
            try:  # the next process then need not train them
                with os_errors(array.codes_path):
                    current.save(array.codes_path)
            except StoreError as error:
                log.warning("the centroids were not saved: %s", error)
        self._coded = current
        return current
