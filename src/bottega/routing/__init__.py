"""Which model answers, and whether it is shown demonstrations.

Routers choose between the first and the last of the tiers: the apprentice and the master. Tiers in
between are reached by `Unsure`, one after the other.
"""

from bottega.routing.benefit_gate import Band, BenefitGate
from bottega.routing.budget import Budgeted
from bottega.routing.coverage import Covered, Unsure
from bottega.routing.fixed import always, coin, cold_start
from bottega.routing.shadow import Quality, Shadow

__all__ = [
    "Band",
    "BenefitGate",
    "Budgeted",
    "Covered",
    "Quality",
    "Shadow",
    "Unsure",
    "always",
    "coin",
    "cold_start",
]
