"""Which model answers, and whether it is shown demonstrations.

Routers choose between the first and the last of the tiers: the apprentice and the master. Tiers in
between are reached by `ConfidenceEscalation`, one after the other.
"""

from bottega.routing.benefit_gate import BenefitGate, SimilarityBand
from bottega.routing.budget import BudgetRouter
from bottega.routing.coverage import ConfidenceEscalation, CoverageRouter
from bottega.routing.fixed import ColdStartRouter, FixedRouter, RandomRouter
from bottega.routing.shadow import ShadowQuality, ShadowSampler

__all__ = [
    "BenefitGate",
    "BudgetRouter",
    "ColdStartRouter",
    "ConfidenceEscalation",
    "CoverageRouter",
    "FixedRouter",
    "RandomRouter",
    "ShadowQuality",
    "ShadowSampler",
    "SimilarityBand",
]
