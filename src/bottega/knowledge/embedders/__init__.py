"""Queries to vectors."""

from bottega.knowledge.embedders.dual import DualEmbedder
from bottega.knowledge.embedders.flmr import FlmrEmbedder
from bottega.knowledge.embedders.multi_vector import MultiVectorEncoderEmbedder
from bottega.knowledge.embedders.pixel import PixelEmbedder
from bottega.knowledge.embedders.sentence import SentenceEmbedder
from bottega.knowledge.embedders.tokens import TokenEmbedder
from bottega.knowledge.embedders.tower import TowerEmbedder
from bottega.knowledge.embedders.tower_tokens import TowerTokenEmbedder

__all__ = [
    "DualEmbedder",
    "FlmrEmbedder",
    "MultiVectorEncoderEmbedder",
    "PixelEmbedder",
    "SentenceEmbedder",
    "TokenEmbedder",
    "TowerEmbedder",
    "TowerTokenEmbedder",
]
