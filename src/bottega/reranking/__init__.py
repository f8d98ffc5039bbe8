"""Which candidates are shown, and in which order."""

from bottega.reranking.asking import Asker, BudgetSpentError
from bottega.reranking.cover import LabelCover
from bottega.reranking.ensemble import Ensemble
from bottega.reranking.flat_search import FlatSearch
from bottega.reranking.gated import Gated
from bottega.reranking.joint import JointChoice
from bottega.reranking.relevance import MaximalMarginalRelevance
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
from bottega.reranking.top import Order, TopK, arranged, check_depth
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
