"""The published methods as short compositions of the same parts."""

from bottega.recipes.cache_of_thought import cache_of_thought
from bottega.recipes.racc import compression_searcher, kv_reuse_searcher, racc
from bottega.recipes.rcts import default_reward, rcts
from bottega.recipes.visual_rag import (
    Classifier,
    default_prompter,
    demonstration_guard,
    novelty_gate,
    share_features,
    visual_rag,
)

__all__ = [
    "Classifier",
    "cache_of_thought",
    "compression_searcher",
    "default_prompter",
    "default_reward",
    "demonstration_guard",
    "kv_reuse_searcher",
    "novelty_gate",
    "racc",
    "rcts",
    "share_features",
    "visual_rag",
]
