"""Bottega: small vision-language models that answer like large ones, by retrieved demonstrations.

The common names are here. The others are public in their packages: `bottega.retrieval`,
`bottega.reranking`, `bottega.routing`, `bottega.prompting`, `bottega.parsing`,
`bottega.generation`, `bottega.knowledge`, `bottega.recording`, `bottega.compression` and the
protocols of all parts in `bottega.protocols`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bottega.errors import BottegaError
    from bottega.generation import (
        OpenAIGenerator,
        ReplayGenerator,
        ScriptedGenerator,
        TransformersGenerator,
    )
    from bottega.generation.bundled_models import bundled
    from bottega.image import Image
    from bottega.knowledge import (
        DualEmbedder,
        KnowledgeBase,
        PhotoEmbedder,
        PixelEmbedder,
        SentenceEmbedder,
        TokenEmbedder,
        TowerEmbedder,
        load_digits,
        load_hugging_face,
        load_image_folder,
        load_jsonl,
    )
    from bottega.parsing import ChoiceParser, LabelParser, RationaleParser
    from bottega.pipeline import Pipeline
    from bottega.prompting import AppendixAPrompter, InterleavedPrompter
    from bottega.protocols import Tier
    from bottega.recipes.cache_of_thought import cache_of_thought
    from bottega.recipes.racc import racc
    from bottega.recipes.rcts import rcts
    from bottega.recipes.visual_rag import visual_rag
    from bottega.recording import PriceTable, TokenPrice, TraceStore
    from bottega.reranking import TopKReranker
    from bottega.retrieval import DenseRetriever
    from bottega.types import (
        Answer,
        Candidate,
        Completion,
        Example,
        Message,
        Prompt,
        Query,
        Reply,
        Sampling,
        Trace,
        Usage,
    )

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "AppendixAPrompter",
    "BottegaError",
    "Candidate",
    "ChoiceParser",
    "Completion",
    "DenseRetriever",
    "DualEmbedder",
    "Example",
    "Image",
    "InterleavedPrompter",
    "KnowledgeBase",
    "LabelParser",
    "Message",
    "OpenAIGenerator",
    "PhotoEmbedder",
    "Pipeline",
    "PixelEmbedder",
    "PriceTable",
    "Prompt",
    "Query",
    "RationaleParser",
    "ReplayGenerator",
    "Reply",
    "Sampling",
    "ScriptedGenerator",
    "SentenceEmbedder",
    "Tier",
    "TokenEmbedder",
    "TokenPrice",
    "TopKReranker",
    "TowerEmbedder",
    "Trace",
    "TraceStore",
    "TransformersGenerator",
    "Usage",
    "__version__",
    "bundled",
    "cache_of_thought",
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "racc",
    "rcts",
    "visual_rag",
]

# The public names of each package or module, which is imported when one of them is used first.
_NAMES = {
    "errors": ("BottegaError",),
    "generation": (
        "OpenAIGenerator",
        "ReplayGenerator",
        "ScriptedGenerator",
        "TransformersGenerator",
        "bundled",
    ),
    "image": ("Image",),
    "knowledge": (
        "DualEmbedder",
        "KnowledgeBase",
        "PhotoEmbedder",
        "PixelEmbedder",
        "SentenceEmbedder",
        "TokenEmbedder",
        "TowerEmbedder",
        "load_digits",
        "load_hugging_face",
        "load_image_folder",
        "load_jsonl",
    ),
    "parsing": ("ChoiceParser", "LabelParser", "RationaleParser"),
    "pipeline": ("Pipeline",),
    "prompting": ("AppendixAPrompter", "InterleavedPrompter"),
    "protocols": ("Tier",),
    "recipes": ("cache_of_thought", "racc", "rcts", "visual_rag"),
    "recording": ("PriceTable", "TokenPrice", "TraceStore"),
    "reranking": ("TopKReranker",),
    "retrieval": ("DenseRetriever",),
    "types": (
        "Answer",
        "Candidate",
        "Completion",
        "Example",
        "Message",
        "Prompt",
        "Query",
        "Reply",
        "Sampling",
        "Trace",
        "Usage",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept every name

    def __getattr__(name: str) -> object:
        module = name if name in _NAMES else _MODULES.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        imported = import_module(f"{__name__}.{module}")
        value = imported if name == module else getattr(imported, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# The first import of the package `bottega.bundled` sets the attribute `bundled`, which has to be
# the function. Later imports set nothing.
import_module(f"{__name__}.bundled")
del globals()["bundled"]
