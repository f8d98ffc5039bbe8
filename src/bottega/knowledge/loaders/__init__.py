"""Loaders of examples from files.

Each loader is a generator. Unreadable examples go to `on_error`; without it, the loader raises.
"""

from bottega.knowledge.loaders.folders import (
    has_splits,
    load_digits,
    load_image_folder,
    load_manyicl,
)
from bottega.knowledge.loaders.jsonl import load_jsonl, load_passage_lines, read_jsonl
from bottega.knowledge.loaders.tables import load_hugging_face

__all__ = [
    "has_splits",
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "load_manyicl",
    "load_passage_lines",
    "read_jsonl",
]
