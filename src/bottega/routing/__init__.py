"""Choice of the model that answers, and of the queries that get demonstrations.

Routers choose between the first tier (the apprentice) and the last tier (the master).
`ConfidenceEscalation` also uses the tiers in between, one after the other. `AgreementRouter` and
`AgreementEscalation` keep the agreement with the master above a target.
"""

from bottega.routing.agreement_bound import AgreementBound
from bottega.routing.agreement_router import (
    AgreementEscalation,
    AgreementPolicy,
    AgreementRouter,
)
from bottega.routing.benefit_gate import (
    AgreementPair,
    BenefitGate,
    ShadowQuality,
    ShadowSampler,
    SimilarityBand,
)
from bottega.routing.novelty_gate import NoveltyGate
from bottega.routing.routers import (
    BudgetRouter,
    ColdStartRouter,
    ConfidenceEscalation,
    CoverageRouter,
    RandomRouter,
)

__all__ = [
    "AgreementBound",
    "AgreementEscalation",
    "AgreementPair",
    "AgreementPolicy",
    "AgreementRouter",
    "BenefitGate",
    "BudgetRouter",
    "ColdStartRouter",
    "ConfidenceEscalation",
    "CoverageRouter",
    "NoveltyGate",
    "RandomRouter",
    "ShadowQuality",
    "ShadowSampler",
    "SimilarityBand",
]
