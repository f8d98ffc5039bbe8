"""Retrievers: search for the examples nearest to a query.

A retriever receives its data source as an argument: a blocking search function, a pool of examples
or a feed of changes. Every retriever excludes the query's own id and images.
"""

from bottega.retrieval.hashtag_tree import HashtagTree, LeaveOneOutGroupCount
from bottega.retrieval.hashtags import HashtagRetriever
from bottega.retrieval.keywords import (
    BM25Retriever,
    GeneratedKeywordExtractor,
    KeywordExtractor,
    KeywordRetriever,
    ResponseProbeRetriever,
    TfidfKeywordExtractor,
    keyword_query,
    stored_keywords,
    tag_keywords,
)
from bottega.retrieval.retrievers import (
    BalancedSampler,
    CrossModalRetriever,
    DenseRetriever,
    EmptyTolerantRetriever,
    RankFusionRetriever,
    SameContextFilter,
    SharedRetriever,
    UniformSampler,
)
from bottega.retrieval.sources import LabelledPool, StaticExamples

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
