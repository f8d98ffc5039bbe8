"""Tests of the embedder that joins two image embedders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bottega import KnowledgeBase
from bottega.errors import EmbedderMismatchError, SettingError
from bottega.knowledge import JoinedEmbedder, PixelEmbedder, TowerEmbedder
from bottega.knowledge.embedders.composite import photo_embedder_of
from bottega.knowledge.embedders.names import (
    joined_parts,
    open_embedder,
    packaged_name,
    photo_tower,
)
from bottega.knowledge.records import unit
from bottega.naming import check_embedder, default_model
from bottega.protocols import Vectors
from bottega.types import Example, Query
from tests.knowledge.test_embedders import noise, queries


def joined(weight: float = 0.3) -> JoinedEmbedder:
    return JoinedEmbedder(TowerEmbedder.bundled(), PixelEmbedder(), weight)


@pytest.mark.parametrize("weight", [0.1, 0.3, 0.9])
def test_the_cosine_is_the_weighted_mean_of_both(weight: float) -> None:
    images = queries(1, 2, 3)
    tower, pixels = (one.embed(images) for one in (TowerEmbedder.bundled(), PixelEmbedder()))
    embedder = joined(weight)
    rows = embedder.embed(images)
    assert rows.dtype == np.float32
    assert rows.shape == (3, embedder.dimension)
    expected = (1 - weight) * tower @ tower.T + weight * pixels @ pixels.T
    assert np.allclose(rows @ rows.T, expected, atol=1e-5)


@pytest.mark.parametrize("weight", [0.1, 0.9])
def test_the_first_part_is_recovered(weight: float) -> None:
    embedder = joined(weight)
    rows = embedder.embed(queries(1, 2))
    expected = TowerEmbedder.bundled().embed(queries(1, 2))
    assert np.allclose(embedder.first_part(rows), expected, atol=1e-5)
    assert np.allclose(embedder.first_part(rows[0]), expected[0], atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 1.0, -0.2, float("nan")])
def test_a_weight_outside_of_zero_and_one_is_rejected(weight: float) -> None:
    with pytest.raises(SettingError, match="weight must be between 0 and 1"):
        joined(weight)


def test_the_fingerprint_names_the_embedder_with_its_weight() -> None:
    assert joined(0.3).fingerprint != joined(0.4).fingerprint
    assert packaged_name(joined(0.4).fingerprint) == "bundled+pixels:0.4"
    opened = open_embedder("bundled+pixels:0.4")
    assert opened.fingerprint == joined(0.4).fingerprint
    assert packaged_name("joined 0.4 (words) (pixels)") is None


def test_a_base_is_opened_with_its_own_weight(tmp_path: Path) -> None:
    file = tmp_path / "k.db"
    with KnowledgeBase.open(file, open_embedder("bundled+pixels:0.2")) as knowledge:
        knowledge.add([Example(Query("", (noise(i),)), f"label {i}") for i in range(3)])
    with KnowledgeBase.open(file) as knowledge:
        assert knowledge.embedder().fingerprint == joined(0.2).fingerprint
        assert knowledge.search(Query("", (noise(1),)), 1, include_self=True)[0].score > 0.999
    with pytest.raises(EmbedderMismatchError):
        KnowledgeBase.open(file, joined(0.3))


def test_names_of_joined_embedders() -> None:
    assert joined_parts("photos+pixels") == ("photos", 0.3)
    assert joined_parts("photos+pixels:.25") == ("photos", 0.25)
    assert joined_parts("pixels") is joined_parts("words+pixels") is None
    names = ("photos", "photos-lite2+pixels:0.5", "photos-both+pixels")
    assert [photo_tower(name) for name in names] == ["photos", "photos-lite2", "photos-both"]
    assert [photo_tower(name) for name in ("bundled+pixels", "pixels")] == [None, None]


@pytest.mark.parametrize("weight", ["0", "1", "1.5", "x", "", "nan"])
def test_a_name_with_a_wrong_weight_is_rejected(weight: str) -> None:
    with pytest.raises(SettingError, match="must be between 0 and 1, got") as raised:
        check_embedder(f"photos+pixels:{weight}")
    assert "photos+pixels:0.3" in raised.value.hint


def test_a_misspelt_joined_name_has_a_suggestion() -> None:
    with pytest.raises(SettingError) as raised:
        check_embedder("photo+pixel")
    assert "did you mean photos+pixels?" in raised.value.hint


def test_other_embedders_contain_no_vectors_of_photographs() -> None:
    assert photo_embedder_of(joined()) is None
    assert photo_embedder_of(PixelEmbedder()) is None
    assert default_model(joined()) == "bundled"


@dataclass(frozen=True)
class RawEmbedder:
    """Embedder whose vectors keep their lengths."""

    vectors: Vectors
    fingerprint: str = "raw"

    @property
    def dimension(self) -> int:
        return len(self.vectors[0])

    def embed(self, queries: Sequence[Query]) -> Vectors:
        return self.vectors


def test_the_first_part_keeps_its_lengths() -> None:
    """The cosine is the same at any length; an image without features is known by its pixels."""
    raw = RawEmbedder(np.array([[3, 0, 4], [0.1, 0, 0], [0, 0, 0]], np.float32))
    pixels, embedder = PixelEmbedder(), JoinedEmbedder(raw, PixelEmbedder(), 0.3)
    rows = embedder.embed(queries(1, 2, 3))
    assert np.allclose(embedder.first_part(rows), raw.vectors, atol=1e-6)
    expected = 0.7 * unit(raw.vectors) @ unit(raw.vectors).T
    similar = pixels.embed(queries(1, 2, 3))
    expected += 0.3 * similar @ similar.T
    expected[2, :2] = expected[2, :2] / np.sqrt(0.3)
    expected[:2, 2] = expected[2, :2]
    expected[2, 2] = 1
    assert np.allclose(unit(rows) @ unit(rows).T, expected, atol=1e-5)
