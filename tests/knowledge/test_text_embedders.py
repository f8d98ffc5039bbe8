from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from bottega.bundled import TOKEN_CONCEPTS, TOKEN_IDENTITY
from bottega.errors import EmbeddingError
from bottega.knowledge import DualEmbedder, KnowledgeBase, PixelEmbedder, TokenEmbedder
from bottega.knowledge.embedders.bundled_tower import TABLE
from bottega.protocols import Vectors
from bottega.types import Example, Query
from tests.builders import solid_image

TOKENS = ("[unk]", "what", "is", "its", "shape", "form", "hue", "tint")
TOPIC = TOKEN_CONCEPTS[1].start
WIDTH = max(part.stop for part in (TOKEN_IDENTITY, *TOKEN_CONCEPTS)) + 3


def table(seed: int = 0) -> NDArray[np.float16]:
    """Return word codes; "shape" and "form" share a meaning, and so do "hue" and "tint"."""
    rows = np.zeros((len(TOKENS), WIDTH), np.float16)
    codes = np.random.default_rng(seed).normal(
        size=(len(TOKENS) - 1, TOKEN_IDENTITY.stop - TOKEN_IDENTITY.start)
    )
    rows[1:, TOKEN_IDENTITY] = codes / np.linalg.norm(codes, axis=1, keepdims=True)
    rows[4:6, TOPIC] = rows[6:8, TOPIC + 1] = 1
    rows[:, -1] = 9  # what no embedder reads
    return rows


def save(folder: Path, rows: NDArray[np.float16]) -> Path:
    folder.mkdir(exist_ok=True)
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file({f"model.language_model.{TABLE}": rows}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TokenEmbedder:
    return TokenEmbedder(save(tmp_path_factory.mktemp("words"), table()))


@pytest.fixture(scope="module")
def dual(words: TokenEmbedder) -> DualEmbedder:
    return DualEmbedder(PixelEmbedder(), words)


def cosine(embedder: TokenEmbedder | DualEmbedder, one: Query, other: Query) -> float:
    a, b = embedder.embed([one, other])
    return float(a @ b)


def check_units(vectors: Vectors, dimension: int) -> None:
    assert vectors.dtype == np.float32
    assert vectors.shape[1] == dimension
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("text", ["what is its shape", "its hue", "nonsense", " ", "what what"])
def test_every_text_is_a_unit_vector(words: TokenEmbedder, text: str) -> None:
    vectors = words.embed([Query(text), Query(text, (solid_image(1),))])
    check_units(vectors, words.dimension)
    assert np.array_equal(vectors[0], vectors[1])


def test_paraphrases_are_closer_than_other_topics(words: TokenEmbedder) -> None:
    query = Query("what is its shape")
    assert cosine(words, query, Query("its form")) > cosine(words, query, Query("what is its hue"))
    assert cosine(words, Query("hue"), Query("tint")) > 0.9
    assert cosine(words, Query("nonsense"), Query("hue")) == 0


def test_empty_text_is_an_error_and_empty_batch_is_not(words: TokenEmbedder) -> None:
    with pytest.raises(EmbeddingError, match="no text"):
        words.embed([Query("", (solid_image(1),))])
    assert words.embed([]).shape == (0, words.dimension)


def test_fingerprint_covers_table_and_tokenizer(tmp_path: Path, words: TokenEmbedder) -> None:
    other = table()
    other[:, -1] = 5
    assert TokenEmbedder(save(tmp_path / "a", other)).fingerprint == words.fingerprint
    other[5, TOPIC] = 0
    assert TokenEmbedder(save(tmp_path / "b", other)).fingerprint != words.fingerprint


def test_unsupported_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EmbeddingError, match="cannot be loaded"):
        TokenEmbedder(tmp_path)
    with pytest.raises(EmbeddingError, match="numbers per token"):
        TokenEmbedder(save(tmp_path, table()[:, :100].copy()))


def test_dual_cosine_is_the_mean_of_both(words: TokenEmbedder, dual: DualEmbedder) -> None:
    one, other = Query("its shape", (solid_image(1),)), Query("its hue", (solid_image(900),))
    image_rows = PixelEmbedder().embed([one, other])
    text_rows = words.embed([one, other])
    expected = (float(image_rows[0] @ image_rows[1]) + float(text_rows[0] @ text_rows[1])) / 2
    assert cosine(dual, one, other) == pytest.approx(expected, abs=1e-5)
    check_units(dual.embed([one, other]), dual.dimension)
    assert dual.dimension == PixelEmbedder().dimension + words.dimension


@pytest.mark.parametrize(
    "queries",
    [
        [Query("its shape")],
        [Query("", (solid_image(1),))],
        [Query("its shape"), Query("", (solid_image(1),)), Query("hue", (solid_image(2),))],
    ],
)
def test_missing_part_is_zero_and_rows_have_length_one(
    dual: DualEmbedder, queries: Sequence[Query]
) -> None:
    vectors = dual.embed(queries)
    check_units(vectors, dual.dimension)
    split = PixelEmbedder().dimension
    for query, vector in zip(queries, vectors, strict=True):
        assert vector[:split].any() == bool(query.images)
        assert vector[split:].any() == bool(query.text)


def test_neither_image_nor_text_is_an_error(dual: DualEmbedder) -> None:
    with pytest.raises(EmbeddingError, match="neither"):
        dual.embed([Query("")])
    assert dual.embed([]).shape == (0, dual.dimension)


def test_duals_fingerprint_names_both(dual: DualEmbedder, words: TokenEmbedder) -> None:
    assert words.fingerprint in dual.fingerprint
    assert PixelEmbedder.fingerprint in dual.fingerprint


def test_examples_are_found_by_image_and_text(dual: DualEmbedder) -> None:
    examples = [
        Example(Query(text, (solid_image(shade),)), f"{text} {shade}")
        for text in ("its shape", "its hue")
        for shade in (1, 60_000)
    ]
    with KnowledgeBase.open(":memory:", embed=dual) as knowledge:
        knowledge.add(examples)
        [found] = knowledge.search(Query("its tint", (solid_image(59_999),)), 1)
    assert found.example.answer == "its hue 60000"
