"""Re-rankers and searches: the choice and order of demonstrations."""

from bottega.reranking.flat_search import FlatSearch, JointChoiceSearch
from bottega.reranking.rewards import (
    AgreementFunction,
    EnsembleReward,
    MutualReward,
    RewardFunction,
    RewardValue,
    RewardVariant,
    SelfConsistencyReward,
    WeightedReward,
    exact_agreement,
)
from bottega.reranking.search_budget import BudgetedGenerator, BudgetSpentError, ReservedCost
from bottega.reranking.selection import (
    DemonstrationOrder,
    GatedReranker,
    LabelCoverageReranker,
    MMRReranker,
    TopKReranker,
    check_depth,
    check_exploration,
    order_demonstrations,
)
from bottega.reranking.tree_search import TreeSearch

__all__ = [
    "AgreementFunction",
    "BudgetSpentError",
    "BudgetedGenerator",
    "DemonstrationOrder",
    "EnsembleReward",
    "FlatSearch",
    "GatedReranker",
    "JointChoiceSearch",
    "LabelCoverageReranker",
    "MMRReranker",
    "MutualReward",
    "ReservedCost",
    "RewardFunction",
    "RewardValue",
    "RewardVariant",
    "SelfConsistencyReward",
    "TopKReranker",
    "TreeSearch",
    "WeightedReward",
    "check_depth",
    "check_exploration",
    "exact_agreement",
    "order_demonstrations",
]
