"""Which examples are near the query.

A retriever gets what it searches as an argument: a blocking search, a pool of examples, a feed of
changes. All of them leave out the query's own id and its own images.
"""

from bottega.retrieval.bm25 import BM25, Still
from bottega.retrieval.clustering import LeaveOneOut
from bottega.retrieval.dense import Crossed, Dense, ReciprocalRankFusion
from bottega.retrieval.hashtag_tree import HashtagTree
from bottega.retrieval.hashtags import Hashtags
from bottega.retrieval.keywords import (
    DistinctiveTerms,
    GeneratedKeywords,
    Keyworded,
    Keyworder,
    ResponseProbe,
    keyword_query,
    keywords_of,
    with_keywords,
)
from bottega.retrieval.ports import Pool
from bottega.retrieval.sampling import Balanced, Uniform
from bottega.retrieval.wrappers import Alike, Shared, UnlessEmpty

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
