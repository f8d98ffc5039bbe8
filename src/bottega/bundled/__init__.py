"""The models that travel with the package, as Hugging Face folders."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from bottega.errors import ModelLoadError


def bundled_folder(name: str = "apprentice") -> Path:
    """The folder of a bundled model: any `transformers` program can load it."""
    folder = Path(str(files(__package__))) / name
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"this installation carries no bundled model {name!r}",
            hint="reinstall bottega from its wheel, unzipped",
        )
    return folder
