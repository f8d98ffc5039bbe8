"""Which candidates are shown, and in which order."""

from bottega.reranking.ensemble import Ensemble
from bottega.reranking.flat_search import FlatSearch
from bottega.reranking.joint import JointChoiceSearch
from bottega.reranking.rewards import (
    Agree,
    MutualReward,
    RewardFunction,
    RewardValue,
    SelfConsistencyReward,
    Variant,
    WeightedReward,
    says_the_same,
)
from bottega.reranking.search_budget import BudgetedGenerator, BudgetSpentError
from bottega.reranking.selection import (
    GatedReranker,
    LabelCoverageReranker,
    MMRReranker,
    Order,
    TopKReranker,
    arranged,
    check_depth,
)
from bottega.reranking.tree_search import TreeSearch

__all__ = [
    "Agree",
    "BudgetSpentError",
    "BudgetedGenerator",
    "Ensemble",
    "FlatSearch",
    "GatedReranker",
    "JointChoiceSearch",
    "LabelCoverageReranker",
    "MMRReranker",
    "MutualReward",
    "Order",
    "RewardFunction",
    "RewardValue",
    "SelfConsistencyReward",
    "TopKReranker",
    "TreeSearch",
    "Variant",
    "WeightedReward",
    "arranged",
    "check_depth",
    "says_the_same",
]
