"""The models that travel with the package, as Hugging Face folders."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from bottega.errors import ModelLoadError

# Where the bundled model keeps what embedders read, in its hidden vector.
LIKENESS = slice(0, 80)  # of a picture: trained so that pictures of one class lie close
WORDS = slice(159, 223)  # of a token: which one it is
MEANINGS = (slice(134, 158), slice(329, 345))  # of a token: the name, the topic or rule it is for


def bundled_folder(name: str = "apprentice") -> Path:
    """The folder of a bundled model: any `transformers` program can load it."""
    folder = Path(str(files(__package__))) / name
    return _there(folder / "config.json", f"model {name!r}")


def bundled_compressor() -> Path:
    """The folder of the compressor between the apprentice and itself."""
    folder = Path(str(files(__package__))) / "compressor"
    return _there(folder / "compressor.json", "compressor")


def _there(file: Path, what: str) -> Path:
    if not file.is_file():
        raise ModelLoadError(
            f"this installation carries no bundled {what}",
            hint="reinstall bottega from its wheel, unzipped",
        )
    return file.parent
