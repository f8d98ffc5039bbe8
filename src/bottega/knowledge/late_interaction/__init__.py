"""Late interaction: documents as many vectors each, compared token by token."""

from bottega.knowledge.late_interaction.index import Followed, LateInteractionIndex
from bottega.knowledge.late_interaction.maxsim import exact_scores
from bottega.knowledge.late_interaction.search import Effort, TokenIndex
from bottega.knowledge.late_interaction.token_array import TokenArray

__all__ = ["Effort", "Followed", "LateInteractionIndex", "TokenArray", "TokenIndex", "exact_scores"]
