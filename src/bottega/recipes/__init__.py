"""The published methods as short compositions of the same parts."""

from bottega.recipes.caching import cache_of_thought
from bottega.recipes.classifying import Classification, suited_prompt, visual_rag
from bottega.recipes.compressing import compressing, racc
from bottega.recipes.reusing import reusing
from bottega.recipes.searching import heuristic, rcts

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
