"""Models in this process, which a compressor stands before."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bottega.cli.output import waiting
from bottega.errors import SettingError
from bottega.generation import Transformers
from bottega.naming import open_model

if TYPE_CHECKING:
    from bottega.generation.loaded import LoadedModel


def local(spec: str) -> Transformers:
    """Not loaded yet. Raises `SettingError` for one behind HTTP."""
    generator = open_model(spec)
    if not isinstance(generator, Transformers):
        raise SettingError(
            f"{spec} is asked over HTTP: a compressor needs the model's hidden states, keys and"
            " values",
            hint="use a model in this process: bundled, a folder, or a Hugging Face id",
        )
    return generator


def loaded(generator: Transformers) -> LoadedModel:
    with waiting(f"loading {generator.name}"):
        return asyncio.run(_loaded(generator))


async def _loaded(generator: Transformers) -> LoadedModel:
    try:
        await generator.load()
        return generator.loaded
    finally:
        await generator.aclose()  # its thread; the model stays with who holds it
