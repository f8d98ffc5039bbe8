"""Tests of the settings that a knowledge base file stores."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from bottega import KnowledgeBase
from bottega.errors import StoreError
from bottega.knowledge import PixelEmbedder, TowerEmbedder, View
from bottega.knowledge.tuned_settings import NOTE, TunedSettings, tuned_for, tuned_settings
from bottega.types import Example, Query
from tests.builders import solid_image


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "k.db"
    with KnowledgeBase.open(path, PixelEmbedder()) as knowledge:
        knowledge.add([Example(Query("", (solid_image(9),)), "grey")])
    return path


SETTINGS = TunedSettings(PixelEmbedder.fingerprint, 20, "shuffled")


def test_settings_are_stored_per_namespace(file: Path) -> None:
    with KnowledgeBase.open(file) as knowledge:
        assert tuned_settings(knowledge) is None
        SETTINGS.store(knowledge)
    with KnowledgeBase.open(file) as knowledge:
        assert tuned_settings(knowledge) == tuned_for(knowledge) == SETTINGS
    with KnowledgeBase.open(file, namespace="other") as knowledge:
        assert tuned_settings(knowledge) is None


def test_settings_of_an_earlier_embedder_do_not_count(file: Path) -> None:
    with KnowledgeBase.open(file) as knowledge:
        SETTINGS.store(knowledge)
        knowledge.reindex("default", TowerEmbedder.bundled())
        assert tuned_settings(knowledge) is tuned_for(knowledge) is None


def test_settings_do_not_apply_to_another_view(file: Path) -> None:
    with KnowledgeBase.open(file) as knowledge:
        SETTINGS.store(knowledge)
        knowledge.reindex("tower", TowerEmbedder.bundled())
    with KnowledgeBase.open(file, {"tower": View(TowerEmbedder.bundled())}) as knowledge:
        assert tuned_settings(knowledge) == SETTINGS
        assert tuned_for(knowledge) is None


FIELDS = {
    "embedder": PixelEmbedder.fingerprint,
    "shots": 20,
    "order": "shuffled",
    "method": "visual-rag",
}


@pytest.mark.parametrize(
    "note",
    [
        "",
        "{}",
        "[]",
        "[1]",
        *(
            orjson.dumps({**FIELDS, **changed}).decode()
            for changed in ({"shots": 0}, {"shots": 2.5}, {"shots": True}, {"order": "sorted"})
        ),
    ],
)
def test_a_damaged_note_is_an_error(file: Path, note: str) -> None:
    with KnowledgeBase.open(file) as knowledge:
        knowledge.set_note(NOTE, note)
        with pytest.raises(StoreError, match="the stored settings are damaged") as raised:
            tuned_settings(knowledge)
    assert "bottega tune" in raised.value.hint


def test_fields_of_newer_versions_are_ignored(file: Path) -> None:
    with KnowledgeBase.open(file) as knowledge:
        knowledge.set_note(NOTE, orjson.dumps({**FIELDS, "rerank": "mmr"}).decode())
        assert tuned_settings(knowledge) == SETTINGS
        absent = {**FIELDS, "embedder": "absent", "order": "new"}
        knowledge.set_note(NOTE, orjson.dumps(absent).decode())
        assert tuned_settings(knowledge) is None
