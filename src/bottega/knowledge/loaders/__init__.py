"""Loaders of examples from files.

Each loader is a generator. Unreadable examples go to `on_error`; without it, the loader raises.
"""

from bottega.knowledge.loaders.folders import (
    count_images,
    count_manyicl,
    has_splits,
    load_digits,
    load_image_folder,
    load_manyicl,
)
from bottega.knowledge.loaders.jsonl import (
    count_lines,
    load_jsonl,
    load_passage_lines,
    read_jsonl,
)
from bottega.knowledge.loaders.tables import count_rows, load_hugging_face

__all__ = [
    "count_images",
    "count_lines",
    "count_manyicl",
    "count_rows",
    "has_splits",
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "load_manyicl",
    "load_passage_lines",
    "read_jsonl",
]
