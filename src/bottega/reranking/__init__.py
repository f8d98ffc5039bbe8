"""Which candidates are shown, and in which order."""

from bottega.reranking.ensemble import Ensemble
from bottega.reranking.flat_search import FlatSearch
from bottega.reranking.joint import JointChoice
from bottega.reranking.rewards import (
    Agree,
    Mutual,
    Reward,
    SelfConsistency,
    Variant,
    Weighted,
    Worth,
    says_the_same,
)
from bottega.reranking.search_budget import Asker, BudgetSpentError
from bottega.reranking.selection import (
    Gated,
    LabelCover,
    MaximalMarginalRelevance,
    Order,
    TopK,
    arranged,
    check_depth,
)
from bottega.reranking.tree_search import TreeSearch

__all__ = [
    "Agree",
    "Asker",
    "BudgetSpentError",
    "Ensemble",
    "FlatSearch",
    "Gated",
    "JointChoice",
    "LabelCover",
    "MaximalMarginalRelevance",
    "Mutual",
    "Order",
    "Reward",
    "SelfConsistency",
    "TopK",
    "TreeSearch",
    "Variant",
    "Weighted",
    "Worth",
    "arranged",
    "check_depth",
    "says_the_same",
]
