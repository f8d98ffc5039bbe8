"""Knowledge bases: storage, search and loading of examples."""

from bottega.knowledge.base import KnowledgeBase
from bottega.knowledge.batch import AddResult
from bottega.knowledge.embedders.bundled_tower import (
    TokenEmbedder,
    TowerEmbedder,
    TowerTokenEmbedder,
)
from bottega.knowledge.embedders.composite import DualEmbedder, JoinedEmbedder
from bottega.knowledge.embedders.flmr import FlmrEmbedder
from bottega.knowledge.embedders.photo_embedder import PhotoEmbedder
from bottega.knowledge.embedders.pixel_embedder import PixelEmbedder
from bottega.knowledge.embedders.sentence import MultiVectorEncoderEmbedder, SentenceEmbedder
from bottega.knowledge.eviction import (
    Eviction,
    FirstInFirstOutEviction,
    LeastFrequentlyUsedEviction,
    LeastRecentlyUsedEviction,
    LeastSavingsEviction,
    RandomEviction,
)
from bottega.knowledge.filters import And, Contains, Eq, Filter, In, Range
from bottega.knowledge.late_interaction.token_index import LateInteractionIndex
from bottega.knowledge.late_interaction.token_search import SearchEffort
from bottega.knowledge.loaders.delimited import load_manyicl, load_table
from bottega.knowledge.loaders.folders import load_digits, load_image_folder
from bottega.knowledge.loaders.jsonl import load_jsonl, read_jsonl
from bottega.knowledge.loaders.tables import load_hugging_face
from bottega.knowledge.records import View
from bottega.knowledge.stats import Stats
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
    "PhotoEmbedder",
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
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "load_manyicl",
    "load_table",
    "read_jsonl",
]
