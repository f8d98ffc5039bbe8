"""Which examples are near the query.

A retriever gets what it searches as an argument: a blocking search, a pool of examples, a feed of
changes. All of them leave out the query's own id and its own images.
"""

from bottega.retrieval.bm25 import BM25Retriever, StaticExamples
from bottega.retrieval.clustering import LeaveOneOutGroupCount
from bottega.retrieval.dense import CrossModalRetriever, DenseRetriever, RankFusionRetriever
from bottega.retrieval.hashtag_tree import HashtagTree
from bottega.retrieval.hashtags import HashtagRetriever
from bottega.retrieval.keywords import (
    GeneratedKeywordExtractor,
    KeywordExtractor,
    KeywordRetriever,
    ResponseProbeRetriever,
    TfidfKeywordExtractor,
    keyword_query,
    stored_keywords,
    tag_keywords,
)
from bottega.retrieval.ports import LabelledPool
from bottega.retrieval.sampling import BalancedSampler, UniformSampler
from bottega.retrieval.wrappers import EmptyTolerantRetriever, SameContextFilter, SharedRetriever

__all__ = [
    "BM25Retriever",
    "BalancedSampler",
    "CrossModalRetriever",
    "DenseRetriever",
    "EmptyTolerantRetriever",
    "GeneratedKeywordExtractor",
    "HashtagRetriever",
    "HashtagTree",
    "KeywordExtractor",
    "KeywordRetriever",
    "LabelledPool",
    "LeaveOneOutGroupCount",
    "RankFusionRetriever",
    "ResponseProbeRetriever",
    "SameContextFilter",
    "SharedRetriever",
    "StaticExamples",
    "TfidfKeywordExtractor",
    "UniformSampler",
    "keyword_query",
    "stored_keywords",
    "tag_keywords",
]
