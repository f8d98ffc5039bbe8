"""Late interaction: documents as many vectors each, compared token by token."""

from bottega.knowledge.late.index import LateIndex
from bottega.knowledge.late.maxsim import exact_scores
from bottega.knowledge.late.news import Followed
from bottega.knowledge.late.search import Effort
from bottega.knowledge.late.searching import TokenIndex
from bottega.knowledge.late.tokens import TokenArray

__all__ = ["Effort", "Followed", "LateIndex", "TokenArray", "TokenIndex", "exact_scores"]
