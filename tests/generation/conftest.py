from __future__ import annotations

from pathlib import Path

import pytest

from bottega.generation import prefix_reuse
from tests.generation import tiny_models

FAMILIES = {
    "fast_vlm": tiny_models.fast_vlm,
    "idefics3": tiny_models.idefics3,
    "qwen2_vl": tiny_models.qwen2_vl,
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {name: build(base / name) for name, build in FAMILIES.items()}


@pytest.fixture
def short_prefixes_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse prefixes of any length."""
    monkeypatch.setattr(prefix_reuse, "MIN_SAVED_TOKENS", 1)
