"""Bottega: small vision-language models that answer like large ones, by retrieved demonstrations.

The common names are here. The others are public in their packages: `bottega.retrieval`,
`bottega.reranking`, `bottega.routing`, `bottega.prompting`, `bottega.parsing`,
`bottega.generation`, `bottega.knowledge`, `bottega.recording`, `bottega.compression` and the
protocols of all parts in `bottega.protocols`.
"""

from bottega.errors import BottegaError
from bottega.generation import (
    OpenAIGenerator,
    ReplayGenerator,
    ScriptedGenerator,
    TransformersGenerator,
    bundled,
)
from bottega.image import Image
from bottega.knowledge import (
    DualEmbedder,
    KnowledgeBase,
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
from bottega.recipes import cache_of_thought, racc, rcts, visual_rag
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
