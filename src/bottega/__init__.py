"""Bottega: a small vision-language model answers like a large one, shown the right examples."""

from bottega.bundled import bundled_folder
from bottega.errors import BottegaError
from bottega.generation import (
    OpenAICompatible,
    Replay,
    Scripted,
    Transformers,
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
    load_manyicl,
)
from bottega.parsing import LabelParser
from bottega.pipeline import Pipeline
from bottega.prompting import AppendixA, Interleaved
from bottega.protocols import (
    Embedder,
    Generator,
    Parser,
    Pricer,
    Prompter,
    Recorder,
    Reranker,
    Retriever,
    Router,
    Tier,
)
from bottega.recipes import visual_rag
from bottega.recording import Price, Prices, Traces
from bottega.reranking import TopK
from bottega.retrieval import Balanced, Dense, Uniform
from bottega.routing import always
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
    "AppendixA",
    "Balanced",
    "BottegaError",
    "Candidate",
    "Completion",
    "Dense",
    "DualEmbedder",
    "Embedder",
    "Example",
    "Generator",
    "Image",
    "Interleaved",
    "KnowledgeBase",
    "LabelParser",
    "Message",
    "OpenAICompatible",
    "Parser",
    "Pipeline",
    "PixelEmbedder",
    "Price",
    "Pricer",
    "Prices",
    "Prompt",
    "Prompter",
    "Query",
    "Recorder",
    "Replay",
    "Reply",
    "Reranker",
    "Retriever",
    "Router",
    "Sampling",
    "Scripted",
    "SentenceEmbedder",
    "Tier",
    "TokenEmbedder",
    "TopK",
    "TowerEmbedder",
    "Trace",
    "Traces",
    "Transformers",
    "Uniform",
    "Usage",
    "__version__",
    "always",
    "bundled",
    "bundled_folder",
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "load_manyicl",
    "visual_rag",
]
