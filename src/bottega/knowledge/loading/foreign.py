"""What the libraries that read tables raise, and how tables hold an image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bottega.errors import BottegaError, ImageError, LoadError, MissingDependencyError
from bottega.image import Image, path_text
from bottega.knowledge.loading.labelled import open_within


@contextmanager
def foreign_errors(name: str) -> Iterator[None]:
    """Around the reading of `name`: every error becomes ours."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "datasets", "eval") from error
    except BottegaError:
        raise
    except Exception as error:  # datasets, pyarrow, the hub's client: each has its own tree
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LoadError(
            f"{path_text(name)} cannot be loaded: {reason}",
            hint="check the name, the split and the network, or give a folder of parquet files",
        ) from error


def image_cell(value: object, folder: Path | None, source: str, *, hint: str) -> Image:
    """Encoded bytes, or a path inside of the folder. Raises `ImageError` with the hint."""
    match value:
        case bytes(data) | {"bytes": bytes(data)}:
            return Image.from_bytes(data, source=source)
        case str(path) | {"path": str(path)} if folder is not None:
            return open_within(folder, path)
    raise ImageError(f"{source}: {type(value).__name__} is not an image", hint=hint)
