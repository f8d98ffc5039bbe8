"""Bundled models as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from bottega.bundled.photo_model import MISSING_HINT, NETWORKS, photo_folder
from bottega.errors import ModelLoadError

# Parts of the bundled model's hidden vector that embedders read.
CLASS_FEATURES = slice(0, 80)  # of an image: close for images of one class
PHOTO_OPENING = 482  # set for the first token of a prompt of the photograph models
TOKEN_IDENTITY = slice(159, 223)  # of a token
TOKEN_CONCEPTS = (slice(134, 158), slice(329, 345))  # of a token: its name, topic or rule

MODELS = ("apprentice", "master", *NETWORKS)


def bundled_folder(name: str = "apprentice") -> Path:
    """Return the folder of a bundled model; any `transformers` program can load it. The folders
    of the photograph models are built on first use, which raises the errors of `photo_folder`."""
    if name not in MODELS:
        raise ModelLoadError(
            f"bundled model is unknown, got {name!r}", hint=f"use {', '.join(map(repr, MODELS))}"
        )
    if name in NETWORKS:
        return photo_folder(name)
    folder = Path(__file__).parent / name
    return _check(folder / "config.json", f"model {name!r}")


def bundled_compressor() -> Path:
    """Return the folder of the compressor whose hyper model and base model are the apprentice."""
    folder = Path(__file__).parent / "compressor"
    return _check(folder / "compressor.json", "compressor")


def _check(file: Path, what: str) -> Path:
    """Return the folder of the file. Raises `ModelLoadError` if it is missing."""
    if not file.is_file():
        raise ModelLoadError(
            f"this installation has no bundled {what}",
            hint=MISSING_HINT,
        )
    return file.parent
