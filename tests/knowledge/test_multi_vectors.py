from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bottega.errors import EmbeddingError, SettingError
from bottega.knowledge import (
    KnowledgeBase,
    LateInteractionIndex,
    MultiVectorEncoderEmbedder,
    PixelEmbedder,
    TokenEmbedder,
    TowerEmbedder,
    TowerTokenEmbedder,
)
from bottega.protocols import MultiVectorEmbedder
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.knowledge import tiny_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save_colbert(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def colbert(folder: Path) -> MultiVectorEncoderEmbedder:
    return MultiVectorEncoderEmbedder(folder)


@pytest.fixture(scope="module")
def tower() -> TowerTokenEmbedder:
    return TowerTokenEmbedder.bundled()


def check_port(embedder: MultiVectorEmbedder, queries: list[Query]) -> None:
    for embed in (embedder.embed_queries, embedder.embed_documents):
        together = embed(queries)
        for query, rows in zip(queries, together, strict=True):
            assert rows.dtype == np.float32
            assert rows.shape[1] == embedder.dimension
            assert np.linalg.norm(rows, axis=1) == pytest.approx(1, abs=1e-5)
            assert np.abs(embed([query])[0] - rows).max() < 1e-5
        assert embed([]) == []


def test_encoder_returns_a_row_per_token(colbert: MultiVectorEncoderEmbedder) -> None:
    check_port(colbert, [Query("abc"), Query("xyzabc", (solid_image(1),))])
    assert [len(rows) for rows in colbert.embed_documents([Query("abc"), Query("abcdef")])] == [
        5,
        8,
    ]


def test_fingerprint_depends_on_weights_and_modes(tmp_path: Path, folder: Path) -> None:
    other = tiny_models.save_colbert(tmp_path, seed=1)
    prints = {MultiVectorEncoderEmbedder(path).fingerprint for path in (folder, other, str(folder))}
    assert len(prints) == 2


def test_unsupported_mode_is_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="not image"):
        MultiVectorEncoderEmbedder(folder, mode="both")
    with pytest.raises(SettingError, match="mode is unknown"):
        MultiVectorEncoderEmbedder(folder, mode="sound")  # type: ignore[arg-type]
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        MultiVectorEncoderEmbedder(tmp_path / "gone")
    with pytest.raises(EmbeddingError, match="no input for mode"):
        MultiVectorEncoderEmbedder(folder).embed_queries([Query("", (solid_image(1),))])


def test_threads_share_an_encoder(colbert: MultiVectorEncoderEmbedder) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: colbert.embed_queries([Query("ab" * n)]), range(1, 6)))
    assert [len(rows) for [rows] in found] == [4, 6, 8, 10, 12]


def test_tower_tokens_are_the_image_and_known_words(
    tower: TowerTokenEmbedder,
) -> None:
    query = Query("What tint is it?", (solid_image(1),))
    check_port(tower, [query, Query("", (solid_image(2),)), Query("hue")])
    [rows] = tower.embed_queries([query])
    [image] = TowerEmbedder.bundled().embed([query])
    assert np.abs(rows[0, :80] - image).max() < 1e-5
    assert not rows[0, 80:].any()
    assert not rows[1:, :80].any()
    plain = TokenEmbedder.bundled().token_rows(query.text)
    assert 2 <= len(rows) < 1 + len(plain)
    with pytest.raises(EmbeddingError, match="neither"):
        tower.embed_queries([Query("")])


def test_cells_are_four_more_tokens(tower: TowerTokenEmbedder) -> None:
    cells = TowerTokenEmbedder.bundled(cells=True)
    query = Query("", (solid_image(1),))
    check_port(cells, [query])
    assert len(cells.embed_queries([query])[0]) == 5
    assert cells.fingerprint != tower.fingerprint


def test_examples_are_found_by_image_and_text(tower: TowerTokenEmbedder) -> None:
    examples = [
        Example(Query(text, (solid_image(shade),)), f"{text} {shade}")
        for text in ("What is its shape?", "What is its hue?")
        for shade in (1, 60_000)
    ]
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        knowledge.add(examples)
        with LateInteractionIndex(knowledge, tower) as index:
            [found] = index.search(Query("What tint is it?", (solid_image(59_999),)), 1)
    assert found.example.answer == "What is its hue? 60000"
