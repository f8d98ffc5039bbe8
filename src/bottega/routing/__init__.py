"""Choice of the model that answers, and of the queries that get demonstrations.

Routers choose between the first tier (the apprentice) and the last tier (the master).
`ConfidenceEscalation` also uses the tiers in between, one after the other.
"""

from bottega.routing.benefit_gate import BenefitGate, SimilarityBand
from bottega.routing.budget import BudgetRouter
from bottega.routing.coverage import ConfidenceEscalation, CoverageRouter
from bottega.routing.fixed import ColdStartRouter, FixedRouter, RandomRouter
from bottega.routing.shadow import AgreementPair, ShadowQuality, ShadowSampler

__all__ = [
    "AgreementPair",
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
