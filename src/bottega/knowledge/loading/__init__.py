"""Examples from files: each loader is a generator that gives what it cannot read to `on_bad`, and
without one stops there by raising it."""

from bottega.knowledge.loading.digits import load_digits
from bottega.knowledge.loading.folders import has_splits, load_image_folder
from bottega.knowledge.loading.hub import load_hugging_face
from bottega.knowledge.loading.jsonl import load_jsonl, load_passage_lines, read_jsonl
from bottega.knowledge.loading.labelled import QUESTION
from bottega.knowledge.loading.manyicl import load_manyicl

__all__ = [
    "QUESTION",
    "has_splits",
    "load_digits",
    "load_hugging_face",
    "load_image_folder",
    "load_jsonl",
    "load_manyicl",
    "load_passage_lines",
    "read_jsonl",
]
