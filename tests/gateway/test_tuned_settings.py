"""Tests of the shots and the order that `bottega tune` stored in a gateway's cache file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bottega.errors import StoreError
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.cache_views import with_tuned_settings
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.knowledge.tuned_settings import TunedSettings
from tests.builders import example

CONFIG = """
[tiers.small]
model = "bundled"
[tiers.set]
model = "bundled"
shots = 3
[tiers.master]
model = "bundled:master"
"""


def config(file: Path, more: str = "") -> Config:
    return parse_config(f"{CONFIG}[cache]\nfile = '{file}'\nembed = 'pixels'\n{more}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "k.db"
    with KnowledgeBase.open(path, PixelEmbedder()) as knowledge:
        knowledge.add([example("grey", 9)])
        TunedSettings(PixelEmbedder.fingerprint, 20, "shuffled").store(knowledge)
    return path


def shots(found: Config) -> list[int]:
    return [found.shots(tier) for tier in found.tiers]


def test_stored_settings_are_defaults(file: Path) -> None:
    found = with_tuned_settings(config(file))
    assert shots(found) == [20, 3, 0]  # the master's answers are stored: it needs no examples
    assert found.cache.order == "shuffled"


def test_the_configuration_overrides_stored_settings(file: Path) -> None:
    found = with_tuned_settings(config(file, "order = 'nearest-first'\n"))
    assert found.cache.order == "nearest-first"


def test_a_file_without_stored_settings_changes_nothing(tmp_path: Path, file: Path) -> None:
    with KnowledgeBase.open(file) as knowledge:
        knowledge.reindex("default", PixelEmbedder())
        TunedSettings("another embedder", 20).store(knowledge)
    (tmp_path / "empty.db").touch()
    for name in ("k.db", "missing.db", "empty.db"):
        plain = config(tmp_path / name)
        assert with_tuned_settings(plain) == plain
        assert shots(plain) == [1, 3, 0]


def test_the_default_file_is_that_of_the_data_folder(file: Path, tmp_path: Path) -> None:
    file.rename(tmp_path / "cache.db")
    plain = parse_config(CONFIG)
    gateway = dataclasses.replace(plain.gateway, data=tmp_path)
    assert shots(with_tuned_settings(dataclasses.replace(plain, gateway=gateway))) == [20, 3, 0]


def test_a_file_that_is_no_cache_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "k.db"
    file.write_bytes(b"no cache" * 100)
    with pytest.raises(StoreError):
        with_tuned_settings(config(file))
