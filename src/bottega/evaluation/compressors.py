"""What a compressor and a store of compressed passages are known by, without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from bottega.errors import LoadError
from bottega.recipes.compressing import COMPRESSOR, STORE


def identities(compressor: Path | None, store: Path | None) -> dict[str, object]:
    """Of what is given: another one may lie at the same path. A compressor's settings name the
    weights of both models, and it refuses others, so that its digest tells them, too."""
    told: dict[str, object] = {}
    try:
        if compressor is not None:
            told["compressor_digest"] = _digest(compressor.expanduser())
        if store is not None:
            manifest = store.expanduser() / STORE
            told["store_manifest"] = manifest.read_text("utf-8", errors="replace")
    except OSError as error:
        raise LoadError(
            f"{error.filename} cannot be read: {error.strerror}", hint="check its permissions"
        ) from error
    return told


def _digest(folder: Path) -> str:
    told = hashlib.sha256()
    for name in COMPRESSOR:
        with (folder / name).open("rb") as file:
            told.update(hashlib.file_digest(file, "sha256").digest())
    return told.hexdigest()[:16]
