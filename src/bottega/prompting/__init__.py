"""Prompters: how a query and its demonstrations become a prompt."""

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
    CACHE_OF_THOUGHT,
    AppendixAPrompter,
    CachePrompter,
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
