"""Which candidates are shown, and in which order."""

from bottega.reranking.cover import LabelCover
from bottega.reranking.gated import Gated
from bottega.reranking.relevance import MaximalMarginalRelevance
from bottega.reranking.top import Order, TopK, arranged

__all__ = ["Gated", "LabelCover", "MaximalMarginalRelevance", "Order", "TopK", "arranged"]
