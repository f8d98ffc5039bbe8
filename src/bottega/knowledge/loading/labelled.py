"""What every loader of labelled images shares."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

from bottega.errors import ImageError, LoadError
from bottega.image import Image, path_text
from bottega.types import Example, Query

# The question of the Visual RAG paper (appendix A).
QUESTION = "What is in the image above?"
NO_LABEL = "none"


def label_text(name: str) -> str:
    """Two spellings that look the same are the same label."""
    text = unicodedata.normalize("NFC", name).strip()
    if not text:
        raise LoadError("the label is empty", hint="give every class a name")
    return text


def open_within(folder: Path, name: str) -> Image:
    """A row is only data: it may not send any file of this computer to an endpoint."""
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a null byte, links in a circle
        inside = False
    if not inside:
        raise ImageError(
            f"{path_text(path)} leads out of {path_text(folder)}",
            hint="keep the images beside or below the file that names them",
        )
    return Image.open(path)


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
