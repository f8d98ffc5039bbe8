"""Examples at rest: where they are stored, how they are found, how they are loaded."""

from bottega.knowledge.base import Added, KnowledgeBase, Stats
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
from bottega.knowledge.late import Effort, LateIndex
from bottega.knowledge.loading import (
    has_splits,
    load_digits,
    load_hugging_face,
    load_image_folder,
    load_jsonl,
    load_manyicl,
)

__all__ = [
    "Added",
    "DualEmbedder",
    "Effort",
    "FlmrEmbedder",
    "KnowledgeBase",
    "LateIndex",
    "MultiVectorEncoderEmbedder",
    "PixelEmbedder",
    "SentenceEmbedder",
    "Stats",
    "TokenEmbedder",
    "TowerEmbedder",
    "TowerTokenEmbedder",
    "has_splits",
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "load_manyicl",
]
