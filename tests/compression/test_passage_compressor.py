from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from bottega.compression.hyper_model import HyperModel
from bottega.compression.model import RaccModel
from bottega.compression.prefixes import PassageCompressor
from bottega.image import Image
from bottega.types import Candidate, Example, Prefix, Query
from tests.compression import tiny_models
from tests.compression.tiny_models import hyper, passages, texts


def image(shade: int) -> Image:
    return Image.from_pillow(Pillow.new("L", (4, 4), shade))


def about(shade: int, text: str = "where is it") -> Query:
    return Query(text, (image(shade),))


def compressor_of(racc: RaccModel, cached_images: int = 10) -> PassageCompressor:
    return PassageCompressor(racc, hyper(), texts(), cached_images=cached_images)


def prefix_of(compressor: PassageCompressor, query: Query) -> Prefix:
    return compressor.prefix(query, [Candidate(one, 1.0) for one in passages(2)])


@contextmanager
def compressions(racc: RaccModel) -> Iterator[list[int]]:
    """Yield a list that gains an entry for each compressed input: image, question or both."""
    done: list[int] = []
    reader = racc.queries.reader
    assert reader is not None
    hook = reader.register_forward_hook(lambda *_: done.append(1))
    yield done
    hook.remove()


def test_prefix_does_not_depend_on_the_default_dtype() -> None:
    shown = [Candidate(one, 0.3 - 0.01 * i) for i, one in enumerate(passages(2))]
    compressor = compressor_of(tiny_models.racc())
    wanted = compressor.prefix(about(9), shown)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = compressor.prefix(about(9), shown)
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found.layers, wanted.layers, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


def test_image_is_compressed_once_for_several_questions() -> None:
    racc = tiny_models.racc()
    compressor = compressor_of(racc)
    with compressions(racc) as done:
        prefix_of(compressor, about(9))
        assert len(done) == 3
        again = prefix_of(compressor, about(9, "who is it"))
        assert len(done) == 5

    fresh = prefix_of(compressor_of(racc), about(9, "who is it"))
    for one, other in zip(again.layers, fresh.layers, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize(("cached", "recomputed"), [(2, 2), (1, 3), (0, 3)])
def test_image_cache_is_bounded(cached: int, recomputed: int) -> None:
    racc = tiny_models.racc()
    compressor = compressor_of(racc, cached_images=cached)
    for shade in (1, 2, 3, 2):  # the last but one is used again
        prefix_of(compressor, about(shade))
    with compressions(racc) as done:
        prefix_of(compressor, about(3))

    assert len(done) == recomputed


def test_prefix_depends_on_the_image() -> None:
    racc = tiny_models.racc(start="random", dcvq=True, prompting="appended")
    compressor = compressor_of(racc)
    two = Query("where is it", (image(1), image(200)))
    one, other = prefix_of(compressor, about(1)), prefix_of(compressor, two)

    assert not np.array_equal(one.layers[0][1], other.layers[0][1])


def test_question_without_image_is_compressed_once() -> None:
    racc = tiny_models.racc()
    with compressions(racc) as done:
        prefix_of(compressor_of(racc), Query("where is it"))

    assert len(done) == 1


def test_training_compresses_questions_without_images_once() -> None:
    racc = tiny_models.racc()
    with compressions(racc) as done:
        query = racc.compress_query(hyper(), texts().query_inputs([Query("where is it")]))

    assert len(done) == 1
    assert query.image is query.question is query.both


@pytest.mark.parametrize("prompting", ["appended", "reading", "both"])
def test_prefix_is_the_same_without_packing(
    prompting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    racc = tiny_models.racc(start="random", prompting=prompting)
    packed = prefix_of(compressor_of(racc), about(9))
    monkeypatch.setattr(HyperModel, "supports_packing", False)
    separate = prefix_of(compressor_of(racc), about(9))

    for one, other in zip(packed.layers, separate.layers, strict=True):
        np.testing.assert_allclose(one[0], other[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(one[1], other[1], rtol=0, atol=1e-5)


def test_prefix_depends_on_the_answer() -> None:
    compressor = compressor_of(tiny_models.racc())

    def shown(answer: str) -> Prefix:
        return compressor.prefix(about(9), [Candidate(Example(about(1), answer), 1.0)])

    assert not np.array_equal(shown("red").layers[0][1], shown("blue").layers[0][1])
