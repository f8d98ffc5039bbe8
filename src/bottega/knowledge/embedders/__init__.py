"""Queries to vectors."""

from bottega.knowledge.embedders.pixel import PixelEmbedder
from bottega.knowledge.embedders.sentence import SentenceEmbedder
from bottega.knowledge.embedders.tower import TowerEmbedder

__all__ = ["PixelEmbedder", "SentenceEmbedder", "TowerEmbedder"]
