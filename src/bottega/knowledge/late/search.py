"""The nearest documents by MaxSim: ruled out by centroids, ranked in int8, scored in float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bottega.errors import SettingError
from bottega.knowledge.late.codes import CodeScan
from bottega.knowledge.late.int8 import Bytes, int8_scores
from bottega.knowledge.late.maxsim import Positions, Rows, exact_scores
from bottega.protocols import Vectors


@dataclass(frozen=True)
class Effort:
    """How much is looked at. `shortlist` is the share of the documents that centroids leave to the
    int8 scan (1: all, which needs no clusters in the data), `rescored` how many of those are scored
    exactly. Up to `small` documents are not ruled out by centroids."""

    shortlist: float = 0.3
    rescored: int = 64
    small: int = 256

    def __post_init__(self) -> None:
        if not 0 < self.shortlist <= 1:
            raise SettingError(f"shortlist is {self.shortlist}", hint="use a share such as 0.3")
        if self.rescored < 1:
            raise SettingError(f"rescored is {self.rescored}", hint="use 64")


@dataclass(frozen=True)
class TokenCopies:
    """One set of tokens at each precision; document i is the rows offsets[i]:offsets[i + 1]."""

    offsets: Positions
    half: Rows  # (tokens, dimension) float16
    eighth: Bytes
    scale: float
    codes: CodeScan | None


def nearest(
    query: Vectors, copies: TokenCopies, documents: Positions, k: int, effort: Effort
) -> tuple[Positions, Vectors]:
    """The `k` best of `documents`, best first, with float32 scores of the float16 tokens."""
    rescored = max(effort.rescored, 2 * k)
    if copies.codes is not None and effort.shortlist < 1 and len(documents) > effort.small:
        wanted = max(int(effort.shortlist * len(documents)), effort.small, rescored)
        documents = best(documents, copies.codes.scores(query)[documents], wanted)
    if len(documents) > rescored:
        rough = int8_scores(query, copies.eighth, copies.scale, copies.offsets, documents)
        documents = best(documents, rough, rescored)
    scores = exact_scores(query, copies.half, copies.offsets, documents)
    order = np.argsort(-scores, kind="stable")[:k]
    return documents[order], scores[order]


def best(documents: Positions, scores: Vectors, count: int) -> Positions:
    """Those `count` of the documents, in their order of position."""
    if len(documents) <= count:
        return documents
    return np.sort(documents[np.argpartition(-scores, count)[:count]])
