from __future__ import annotations

import random

from bottega._util.identity import image_hashes, query_key, query_rng
from bottega.types import Query
from tests.builders import solid_image

CAT = Query("what?", (solid_image(1), solid_image(2)))


def test_the_state_depends_on_content_and_seed() -> None:
    same = Query("what?", (solid_image(1), solid_image(2)), id="other")
    others = [Query("which?", CAT.images), Query("what?", CAT.images[::-1]), Query("what?")]
    state = query_rng(CAT, 0).getstate()
    assert query_rng(same, 0).getstate() == state
    assert all(query_rng(other, 0).getstate() != state for other in others)
    assert query_rng(CAT, 1).getstate() != state


def test_states_of_published_runs_do_not_change() -> None:
    seed = ":".join(("7", "what?", solid_image(1).sha256, solid_image(2).sha256))
    assert query_rng(CAT, 7).getstate() == random.Random(seed).getstate()


def test_states_of_text_queries_do_not_change() -> None:
    assert query_rng(Query("3 + 5"), 7).getstate() == random.Random("7:3 + 5:").getstate()


def test_the_key_is_the_text_and_the_image_hashes() -> None:
    assert query_key(CAT) == ("what?", *image_hashes(CAT))
    assert image_hashes(CAT) == (solid_image(1).sha256, solid_image(2).sha256)
