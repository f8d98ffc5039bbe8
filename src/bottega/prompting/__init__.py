"""How demonstrations are shown to the model."""

from bottega.prompting.rcts import (
    MATH_V,
    MATH_V_REASONED,
    MMMU,
    MMMU_REASONED,
    SCIENCE_QA,
    SCIENCE_QA_REASONED,
    VIZ_WIZ,
    VSR_MC,
)
from bottega.prompting.reasoning import Concluding, Continuing, Explaining
from bottega.prompting.template import Template
from bottega.prompting.turns import AppendixA, Interleaved, Lettered, Reasoned

__all__ = [
    "MATH_V",
    "MATH_V_REASONED",
    "MMMU",
    "MMMU_REASONED",
    "SCIENCE_QA",
    "SCIENCE_QA_REASONED",
    "VIZ_WIZ",
    "VSR_MC",
    "AppendixA",
    "Concluding",
    "Continuing",
    "Explaining",
    "Interleaved",
    "Lettered",
    "Reasoned",
    "Template",
]
