"""What a compressor and a store of compressed passages are known by, without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from bottega.errors import LoadError, StoreError

# Those of `compression.saving` and `compression.store`, which need torch.
COMPRESSOR = ("compressor.json", "compressor.safetensors")
STORE = "manifest.json"


def check_there(compressor: Path | None, store: Path | None) -> None:
    """Raises `LoadError` and `StoreError` where there is none."""
    if compressor is not None:
        missing = [one for one in COMPRESSOR if not (compressor.expanduser() / one).is_file()]
        if missing:
            raise LoadError(
                f"there is no compressor in {compressor}: {missing[0]} is missing",
                hint="give the folder that `bottega compress train` wrote",
            )
    if store is not None and not (store.expanduser() / STORE).is_file():
        raise StoreError(
            f"there are no compressed passages in {store}",
            hint="run `bottega compress build` first",
        )


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
