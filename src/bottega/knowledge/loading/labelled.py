"""What every loader of labelled images shares."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from bottega.image import Image
from bottega.types import Example, Query

# The question of the Visual RAG paper (appendix A).
QUESTION = "What is in the image above?"
NO_LABEL = "none"


def label_text(name: str) -> str:
    """Two spellings that look the same are the same label."""
    return unicodedata.normalize("NFC", name).strip()


def path_text(path: Path) -> str:
    """File names are bytes: what is not UTF-8 in them could not be stored as text."""
    return os.fsencode(path).decode("utf-8", "replace")


def joined(labels: Sequence[str]) -> str:
    """How a demonstration shows a multi-label answer."""
    return ", ".join(labels) or NO_LABEL


def labelled(
    image: Image, labels: tuple[str, ...], *, question: str, source: str, multi: bool = False
) -> Example:
    return Example(
        Query(question, (image,)),
        joined(labels),
        labels=labels if multi else None,
        source=source,
    )
