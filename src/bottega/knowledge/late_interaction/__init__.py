"""Late interaction: documents as many vectors each, compared token by token."""

from bottega.knowledge.late_interaction.index import ExampleSource, LateInteractionIndex
from bottega.knowledge.late_interaction.maxsim import exact_scores
from bottega.knowledge.late_interaction.search import SearchEffort, TokenIndex
from bottega.knowledge.late_interaction.token_array import TokenArray

__all__ = [
    "ExampleSource",
    "LateInteractionIndex",
    "SearchEffort",
    "TokenArray",
    "TokenIndex",
    "exact_scores",
]
