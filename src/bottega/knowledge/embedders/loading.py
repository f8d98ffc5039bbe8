"""Loading models: the one place where the libraries' errors become ours."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bottega.errors import BottegaError, EmbeddingError, MissingDependencyError
from bottega.loading import LOADING

WEIGHTS = ("*.safetensors", "*.bin")
CHUNK = 1 << 20


@contextmanager
def loading_model(name: str) -> Iterator[None]:
    """Around the imports of the libraries, too."""
    try:
        with LOADING:
            yield
    except ModuleNotFoundError as error:
        raise MissingDependencyError(error.name or "torch", "local") from error
    except BottegaError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EmbeddingError(
            f"{name} cannot be loaded as an embedder: {reason}",
            hint="check the model's name or folder; a hub name needs a network once",
        ) from error


def weights_digest(folder: Path) -> str:
    """Of every weight file in a model folder."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in WEIGHTS for path in folder.rglob(pattern)):
        digest.update(str(path.relative_to(folder)).encode())
        with path.open("rb") as weights:
            while chunk := weights.read(CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:12]
