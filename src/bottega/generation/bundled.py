"""The bundled model as a generator."""

from __future__ import annotations

from typing import Any

from bottega.bundled import bundled_folder
from bottega.generation.local import Transformers
from bottega.generation.photographs import PhotographCheck
from bottega.types import Prompt, Reply, Sampling


class BundledTransformers(Transformers):
    """Bundled model that warns once when a prompt ends with a photograph."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._photographs = PhotographCheck()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        await self._photographs.run(prompt)
        return await super().generate(prompt, sampling)


def bundled(
    name: str = "apprentice", *, max_batch: int = 16, threads: int | None = 1
) -> Transformers:
    """A bundled model as a generator: `bundled("apprentice")` learns from what it is shown,
    `bundled("master")` also knows digits and the plain words for what a scene shows. They are so
    small that a second thread slows them down. Raises `ModelLoadError` for one that is not there.
    """
    return BundledTransformers(
        bundled_folder(name),
        name=f"bundled:{name}",
        device="cpu",
        max_batch=max_batch,
        threads=threads,
        turns_only=True,
        prefix_cache_mb=0,
    )
