"""From the names that people write to models and embedders."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from bottega.errors import MissingDependencyError, SettingError
from bottega.generation import OpenAICompatible, Transformers, bundled
from bottega.knowledge import (
    DualEmbedder,
    PixelEmbedder,
    SentenceEmbedder,
    TokenEmbedder,
    TowerEmbedder,
)
from bottega.protocols import Embedder, Generator

BUNDLED = "bundled"
REMOTE = "openai:"
NOTE = "embed"  # under which a knowledge base says what its embedder is called
WITHOUT_TORCH = ("pixels", "words")
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MODES: tuple[Literal["image", "text", "average"], ...] = ("image", "text", "average")


def open_model(spec: str, *, concurrency: int = 16) -> Generator:
    """`bundled` (the apprentice), `bundled:NAME`, `openai:NAME` (at OPENAI_BASE_URL, so many
    requests at once), or a Hugging Face id or folder."""
    if spec == BUNDLED:
        return bundled()
    if spec.startswith(f"{BUNDLED}:"):
        return bundled(spec.removeprefix(f"{BUNDLED}:"))
    if spec.startswith(REMOTE):
        name = spec.removeprefix(REMOTE)
        if not name:
            raise SettingError("openai: needs a model name", hint="--model openai:gpt-4o-mini")
        return OpenAICompatible(name, concurrency=concurrency)
    # The bundled embedder may have set torch to one thread.
    return Transformers(spec, threads=os.cpu_count())


def check_embedder(spec: str) -> None:
    """Before anything is loaded: what is neither known nor a folder would be looked for on the hub,
    for minutes. Raises `SettingError` and `MissingDependencyError`."""
    if spec in WITHOUT_TORCH:
        return
    name = spec
    for mode in MODES:
        name = name.removesuffix(f":{mode}")
    if spec not in ("dual", BUNDLED) and not (HUB.fullmatch(name) or Path(name).is_dir()):
        raise SettingError(
            f"{spec!r} is no embedder",
            hint="use dual, bundled, words, pixels, a folder, or a hub id such as"
            " sentence-transformers/clip-ViT-B-32, with :image, :text or :average behind it",
        )
    check_torch()


def check_torch() -> None:
    """Without importing it, which takes seconds."""
    if find_spec("torch") is None:
        raise MissingDependencyError("torch", "local")


def open_embedder(spec: str) -> Embedder:
    """`bundled`, `pixels`, `words`, `dual`, or a sentence-transformers id or folder, `:image`
    (default), `:text` or `:average` behind it. Blocks while it is loaded."""
    if spec == "pixels":
        return PixelEmbedder()
    if spec == "words":
        return TokenEmbedder.bundled()
    if spec == "dual":
        return DualEmbedder(open_embedder(BUNDLED), open_embedder("words"))
    if spec == BUNDLED:
        return TowerEmbedder.bundled(threads=1)
    for mode in MODES:
        if spec.endswith(f":{mode}"):
            return SentenceEmbedder(spec.removesuffix(f":{mode}"), mode=mode)
    return SentenceEmbedder(spec, mode="image")
