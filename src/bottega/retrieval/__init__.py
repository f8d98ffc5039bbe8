"""Which examples are near the query.

A retriever gets what it searches as an argument: a blocking search, a pool of examples, a feed of
changes. All of them leave out the query's own id and its own images.
"""

from bottega.retrieval.alike import Alike
from bottega.retrieval.bm25 import BM25
from bottega.retrieval.counting import LeaveOneOut
from bottega.retrieval.dense import Crossed, Dense
from bottega.retrieval.emptiness import UnlessEmpty
from bottega.retrieval.following import Still
from bottega.retrieval.fusion import ReciprocalRankFusion
from bottega.retrieval.hashtags import Hashtags
from bottega.retrieval.keywords import (
    GeneratedKeywords,
    Keyworded,
    Keyworder,
    keyword_query,
    keywords_of,
    with_keywords,
)
from bottega.retrieval.ports import Pool
from bottega.retrieval.probe import ResponseProbe
from bottega.retrieval.sampling import Balanced, Uniform
from bottega.retrieval.shared import Shared
from bottega.retrieval.terms import DistinctiveTerms
from bottega.retrieval.tree import HashtagTree

__all__ = [
    "BM25",
    "Alike",
    "Balanced",
    "Crossed",
    "Dense",
    "DistinctiveTerms",
    "GeneratedKeywords",
    "HashtagTree",
    "Hashtags",
    "Keyworded",
    "Keyworder",
    "LeaveOneOut",
    "Pool",
    "ReciprocalRankFusion",
    "ResponseProbe",
    "Shared",
    "Still",
    "Uniform",
    "UnlessEmpty",
    "keyword_query",
    "keywords_of",
    "with_keywords",
]
