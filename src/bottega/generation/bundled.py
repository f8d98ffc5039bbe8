"""The bundled model as a generator."""

from __future__ import annotations

from bottega.bundled import bundled_folder
from bottega.generation.local import Transformers


def bundled(
    name: str = "apprentice", *, max_batch: int = 16, threads: int | None = 1
) -> Transformers:
    """The bundled model as a generator. It is so small that a second thread slows it down."""
    return Transformers(
        bundled_folder(name),
        name=f"bundled:{name}",
        device="cpu",
        max_batch=max_batch,
        threads=threads,
        turns_only=True,
    )
