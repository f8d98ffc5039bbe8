"""The model that travels with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from bottega.errors import ModelLoadError
from bottega.generation.local import Transformers


def bundled_folder(name: str = "apprentice") -> Path:
    """The Hugging Face folder of a bundled model: any `transformers` program can load it."""
    folder = Path(str(files("bottega"))) / "bundled" / name
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"this installation carries no bundled model {name!r}",
            hint="reinstall bottega from its wheel, unzipped",
        )
    return folder


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
    )
