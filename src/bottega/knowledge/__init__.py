"""Knowledge bases: storage, search and loading of examples."""

from bottega.knowledge.base import AddResult, KnowledgeBase
from bottega.knowledge.embedders import (
    DualEmbedder,
    FlmrEmbedder,
    JoinedEmbedder,
    MultiVectorEncoderEmbedder,
    PixelEmbedder,
    SentenceEmbedder,
    TokenEmbedder,
    TowerEmbedder,
    TowerTokenEmbedder,
)
from bottega.knowledge.eviction import (
    Eviction,
    FirstInFirstOutEviction,
    LeastFrequentlyUsedEviction,
    LeastRecentlyUsedEviction,
    LeastSavingsEviction,
    RandomEviction,
)
from bottega.knowledge.filters import And, Contains, Eq, Filter, In, Range
from bottega.knowledge.late_interaction import LateInteractionIndex, SearchEffort
from bottega.knowledge.loaders import (
    has_splits,
    load_digits,
    load_hugging_face,
    load_image_folder,
    load_jsonl,
    load_manyicl,
    read_jsonl,
)
from bottega.knowledge.reader import Stats
from bottega.knowledge.records import View
from bottega.knowledge.verification import Problem, VerificationReport

__all__ = [
    "AddResult",
    "And",
    "Contains",
    "DualEmbedder",
    "Eq",
    "Eviction",
    "Filter",
    "FirstInFirstOutEviction",
    "FlmrEmbedder",
    "In",
    "JoinedEmbedder",
    "KnowledgeBase",
    "LateInteractionIndex",
    "LeastFrequentlyUsedEviction",
    "LeastRecentlyUsedEviction",
    "LeastSavingsEviction",
    "MultiVectorEncoderEmbedder",
    "PixelEmbedder",
    "Problem",
    "RandomEviction",
    "Range",
    "SearchEffort",
    "SentenceEmbedder",
    "Stats",
    "TokenEmbedder",
    "TowerEmbedder",
    "TowerTokenEmbedder",
    "VerificationReport",
    "View",
    "has_splits",
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "load_manyicl",
    "read_jsonl",
]
