"""Embedders, which convert queries to vectors."""

from bottega.knowledge.embedders.bundled_tower import (
    TokenEmbedder,
    TowerEmbedder,
    TowerTokenEmbedder,
)
from bottega.knowledge.embedders.flmr import FlmrEmbedder
from bottega.knowledge.embedders.joined import JoinedEmbedder
from bottega.knowledge.embedders.pixels import PixelEmbedder
from bottega.knowledge.embedders.sentence import (
    DualEmbedder,
    MultiVectorEncoderEmbedder,
    SentenceEmbedder,
)

__all__ = [
    "DualEmbedder",
    "FlmrEmbedder",
    "JoinedEmbedder",
    "MultiVectorEncoderEmbedder",
    "PixelEmbedder",
    "SentenceEmbedder",
    "TokenEmbedder",
    "TowerEmbedder",
    "TowerTokenEmbedder",
]
