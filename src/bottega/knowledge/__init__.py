"""Examples at rest: where they are stored, how they are found, how they are loaded."""

from bottega.knowledge.base import Added, KnowledgeBase
from bottega.knowledge.embedders import (
    DualEmbedder,
    FlmrEmbedder,
    MultiVectorEncoderEmbedder,
    PixelEmbedder,
    SentenceEmbedder,
    TokenEmbedder,
    TowerEmbedder,
    TowerTokenEmbedder,
)
from bottega.knowledge.eviction import (
    Eviction,
    LeastFrequentlyUsedEviction,
    LeastRecentlyUsedEviction,
    LeastSavingsEviction,
    RandomEviction,
)
from bottega.knowledge.filters import And, Contains, Eq, Filter, In, Range
from bottega.knowledge.late_interaction import Effort, LateInteractionIndex
from bottega.knowledge.loaders import (
    has_splits,
    load_digits,
    load_hugging_face,
    load_image_folder,
    load_jsonl,
    load_manyicl,
    read_jsonl,
)
from bottega.knowledge.rows import Stats
from bottega.knowledge.verification import Problem, Verified
from bottega.knowledge.views import View

__all__ = [
    "Added",
    "And",
    "Contains",
    "DualEmbedder",
    "Effort",
    "Eq",
    "Eviction",
    "Filter",
    "FlmrEmbedder",
    "In",
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
    "SentenceEmbedder",
    "Stats",
    "TokenEmbedder",
    "TowerEmbedder",
    "TowerTokenEmbedder",
    "Verified",
    "View",
    "has_splits",
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "load_manyicl",
    "read_jsonl",
]
