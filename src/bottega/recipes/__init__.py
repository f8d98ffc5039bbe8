"""The published methods as short compositions of the same parts."""

from bottega.recipes.cache_of_thought import cache_of_thought
from bottega.recipes.racc import compressing, racc, reusing
from bottega.recipes.rcts import heuristic, rcts
from bottega.recipes.visual_rag import Classification, suited_prompt, visual_rag

__all__ = [
    "Classification",
    "cache_of_thought",
    "compressing",
    "heuristic",
    "racc",
    "rcts",
    "reusing",
    "suited_prompt",
    "visual_rag",
]
