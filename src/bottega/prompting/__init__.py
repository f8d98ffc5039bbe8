"""Prompters: how a query and its demonstrations become a prompt."""

from bottega.prompting.cache_of_thought import CACHE_OF_THOUGHT, CachePrompter
from bottega.prompting.rcts import (
    MATH_V,
    MATH_V_REASONED,
    MMMU,
    MMMU_REASONED,
    SCIENCE_QA,
    SCIENCE_QA_REASONED,
    VIZ_WIZ,
    VSR_MC,
    ConclusionPrompter,
    ContinuationPrompter,
    ExplanationPrompter,
)
from bottega.prompting.turns import (
    AppendixAPrompter,
    InterleavedPrompter,
    LetteredPrompter,
    PromptTemplate,
    ReasoningPrompter,
)

__all__ = [
    "CACHE_OF_THOUGHT",
    "MATH_V",
    "MATH_V_REASONED",
    "MMMU",
    "MMMU_REASONED",
    "SCIENCE_QA",
    "SCIENCE_QA_REASONED",
    "VIZ_WIZ",
    "VSR_MC",
    "AppendixAPrompter",
    "CachePrompter",
    "ConclusionPrompter",
    "ContinuationPrompter",
    "ExplanationPrompter",
    "InterleavedPrompter",
    "LetteredPrompter",
    "PromptTemplate",
    "ReasoningPrompter",
]
