"""The photograph models: published vision weights and a shipped decoder in one folder.

This package ships the decoders; the extra `[photos]` installs packages of vision weights. The first
use joins both in the user's cache, as a folder that any `transformers` program can load.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from bottega.bundled.efficientnet import (
    CLASSES,
    FEATURES,
    LITE0,
    LITE2,
    EfficientNetLite,
    classifier,
    tower_tensors,
)
from bottega.errors import DISTRIBUTION, ModelLoadError, StoreError

REINSTALL = f"run pip install --force-reinstall --no-deps {DISTRIBUTION}"
# `Path` finds no files inside a zipped wheel on sys.path.
MISSING_HINT = f"{REINSTALL}; a wheel must be installed, not imported as a zip file"
CACHE = "BOTTEGA_CACHE"  # environment variable that names another cache folder
DECODER, WEIGHTS, CHECKSUM = "decoder.safetensors.gz", "model.safetensors", "model.sha256"
PHOTOS, PHOTOS_LITE2, PHOTOS_MASTER = "photos", "photos-lite2", "photos-master"
NETWORKS: dict[str, EfficientNetLite] = {
    PHOTOS: LITE0,
    PHOTOS_LITE2: LITE2,
    PHOTOS_MASTER: LITE0,
}
# In the master, every position has this constant beside the tower's features. It is far larger than
# they are, so it determines the position's norm, by which the last layer norm divides.
CONSTANT, CONSTANT_SIZE = FEATURES, 4096.0


def photo_folder(name: str) -> Path:
    """Return the folder of a photograph model; build it if it is missing from the
    cache or damaged.

    Raises `MissingDependencyError` without the extra `[photos]`, `ModelLoadError` for damaged
    weights, and `StoreError` if the cache cannot be written.
    """
    shipped = Path(__file__).with_name(name)
    if not (shipped / DECODER).is_file():
        raise ModelLoadError(
            f"this installation has no bundled model {name!r}",
            hint=MISSING_HINT,
        )
    folder = cache_folder() / f"{name}-{_version(shipped)}"
    try:
        if not _is_intact(folder, shipped):
            _install(shipped, folder)
    except OSError as error:
        raise _cache_error(f"{folder.parent}: {error.strerror or error}") from error
    return folder


def decoder_weights(name: str) -> bytes:
    """Return the shipped weights of a photograph model, a file of safetensors."""
    return gzip.decompress(Path(__file__).with_name(name).joinpath(DECODER).read_bytes())


def _install(shipped: Path, folder: Path) -> None:
    """Build the folder, or replace its files one by one: another process may build the same files
    at the same time, or read them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.is_file():
        folder.unlink()
    with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        _build(shipped, Path(draft))
        folder.mkdir(exist_ok=True)
        for file in Path(draft).iterdir():
            file.replace(folder / file.name)


def _cache_error(problem: str) -> StoreError:
    return StoreError(
        f"the model cache cannot be written: {problem}",
        hint=f"set the environment variable {CACHE} to a writable folder with 100 MB of free space",
    )


def cache_folder() -> Path:
    """Return the cache folder of this user. Raises `StoreError` if the home folder is unknown."""
    try:
        if named := os.environ.get(CACHE):
            return Path(named).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # the XDG specification ignores relative paths
            base = Path.home() / ".cache"
    except RuntimeError as error:  # in a container, the user may have no home
        raise _cache_error("the home folder is unknown") from error
    return base / "bottega"


def _version(shipped: Path) -> str:
    """Return a digest of the shipped files and the published weights."""
    digest = hashlib.sha256(NETWORKS[shipped.name].sha256.encode())
    for file in sorted(shipped.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _build(shipped: Path, folder: Path) -> None:
    from safetensors.torch import load, save

    for file in _copied(shipped):
        shutil.copyfile(file, folder / file.name)
    weights = load(decoder_weights(shipped.name))
    if shipped.name == PHOTOS_MASTER:
        weights["lm_head.weight"] = _with_classifier(weights["lm_head.weight"].float())
    tower = tower_tensors(NETWORKS[shipped.name])
    weights |= {f"model.vision_tower.{name}": part for name, part in tower.items()}
    whole = {name: tensor.contiguous() for name, tensor in weights.items()}
    (folder / WEIGHTS).write_bytes(save(whole, metadata={"format": "pt"}))
    (folder / CHECKSUM).write_text(_digest(folder / WEIGHTS), encoding="ascii")


def _with_classifier(head: Any) -> Any:
    """Return the head (vocabulary, hidden) with the classifier in its last rows, one per label."""
    weight, bias = classifier(LITE0)
    root = head.shape[1] ** 0.5
    head[-CLASSES:, :FEATURES] = weight * CONSTANT_SIZE / root
    head[-CLASSES:, CONSTANT] = bias / root
    return head


def _copied(shipped: Path) -> list[Path]:
    return [file for file in shipped.iterdir() if file.is_file() and file.name != DECODER]


def _is_intact(folder: Path, shipped: Path) -> bool:
    checksum, weights = folder / CHECKSUM, folder / WEIGHTS
    return (
        checksum.is_file()
        and weights.is_file()
        and checksum.read_text(encoding="ascii", errors="replace") == _digest(weights)
        and all(_is_copied(file, folder / file.name) for file in _copied(shipped))
    )


def _is_copied(file: Path, copy: Path) -> bool:
    return copy.is_file() and copy.read_bytes() == file.read_bytes()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
