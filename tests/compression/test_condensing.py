from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega.compression.model import RaccModel
from bottega.compression.passage_compressor import PassageCompressor
from bottega.image import Image
from bottega.types import Candidate, Example, Prefix, Query
from tests.compression import spoken
from tests.compression.spoken import hyper, passages, texts


def picture(shade: int) -> Image:
    return Image.from_pillow(Pillow.new("L", (4, 4), shade))


def about(shade: int, text: str = "where is it") -> Query:
    return Query(text, (picture(shade),))


def condenser(racc: RaccModel, cached_images: int = 10) -> PassageCompressor:
    return PassageCompressor(racc, hyper(), texts(), cached_images=cached_images)


def condensed(made: PassageCompressor, query: Query) -> Prefix:
    return made.prefix(query, [Candidate(one, 1.0) for one in passages(2)])


@contextmanager
def compressions(racc: RaccModel) -> Iterator[list[int]]:
    """One entry for each time that the model read image, question or both."""
    done: list[int] = []
    hook = racc.queries.register_forward_hook(lambda *_: done.append(1))
    yield done
    hook.remove()


def test_a_picture_is_compressed_once_and_every_question_about_it_is_answered_as_ever() -> None:
    racc = spoken.racc()
    made = condenser(racc)
    with compressions(racc) as done:
        condensed(made, about(9))
        assert len(done) == 2
        again = condensed(made, about(9, "who is it"))
        assert len(done) == 3

    fresh = condensed(condenser(racc), about(9, "who is it"))
    for one, other in zip(again.layers, fresh.layers, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize(("known", "anew"), [(2, 1), (1, 2), (0, 2)])
def test_only_the_last_pictures_are_kept(known: int, anew: int) -> None:
    racc = spoken.racc()
    made = condenser(racc, cached_images=known)
    for shade in (1, 2, 3, 2):  # the last but one is used again
        condensed(made, about(shade))
    with compressions(racc) as done:
        condensed(made, about(3))

    assert len(done) == anew


def test_another_picture_makes_another_prefix() -> None:
    racc = spoken.racc(start="random", dcvq=True, prompting="appended")
    made = condenser(racc)
    two = Query("where is it", (picture(1), picture(200)))
    one, other = condensed(made, about(1)), condensed(made, two)

    assert not np.array_equal(one.layers[0][1], other.layers[0][1])


def test_a_question_without_a_picture_is_compressed_once_in_place_of_three_times() -> None:
    racc = spoken.racc()
    with compressions(racc) as done:
        condensed(condenser(racc), Query("where is it"))

    assert len(done) == 1


def test_nor_are_questions_without_pictures_in_training() -> None:
    racc = spoken.racc()
    with compressions(racc) as done:
        asked = racc.compress_query(hyper(), texts().query_inputs([Query("where is it")]))

    assert len(done) == 1
    assert asked.image is asked.question is asked.both


def test_another_answer_of_a_demonstration_makes_another_prefix() -> None:
    made = condenser(spoken.racc())

    def shown(answer: str) -> Prefix:
        return made.prefix(about(9), [Candidate(Example(about(1), answer), 1.0)])

    assert not np.array_equal(shown("red").layers[0][1], shown("blue").layers[0][1])
