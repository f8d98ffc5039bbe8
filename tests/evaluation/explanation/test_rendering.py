from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from bottega.evaluation.report.explanation import ENDED, image_hashes, render_explanation
from bottega.image import Image
from bottega.recording import stored_trace
from bottega.types import Ended, Query, SearchNode, SearchTree
from tests.builders import candidates, search_tree, searched, solid_image
from tests.evaluation.explanation.builders import (
    HOSTILE,
    demonstrations,
    images_of,
    stored_search,
    untrusted_trace,
)
from tests.knowledge.doubles import damaged_image
from tests.recording.test_traces import trace


def test_every_node_is_rendered_and_chosen_nodes_are_marked() -> None:
    tree = search_tree(demonstrations())
    page = render_explanation(
        stored_search(tree), images_of(stored_search(tree)), absent="not stored"
    )
    assert page.count("<details") == 40
    assert page.count(" data-chosen") == 1 + len(tree.path)
    assert page.count('<li class="chosen">') == 1 + len(tree.path)
    assert page.count("preceding") == sum(tree.path) + page.count("li.preceding")
    assert "are missing" not in page
    assert 'class="none"' not in page


def test_missing_and_damaged_images_are_reported() -> None:
    of = stored_search(search_tree(demonstrations()))
    broken = damaged_image()
    given = {sha256: image for sha256, image in images_of(of).items() if sha256 in of.images}
    page = render_explanation(
        of, {**given, demonstrations()[0].example.query.images[0].sha256: broken}, absent="gone"
    )
    assert f"{len(image_hashes(of)) - 1} images are missing: gone." in page
    assert 'title="gone"' in page


def test_untrusted_text_is_escaped() -> None:
    page = render_explanation(untrusted_trace(), {}, absent="gone")
    assert HOSTILE not in page
    assert "<img" not in page
    assert "{{ 7 * 7 }}" in page
    assert page.count("<b>") == page.count("</b>")


def test_trace_without_search_lists_demonstrations() -> None:
    page = render_explanation(
        stored_trace(trace()), {solid_image(7).sha256: solid_image(7)}, absent="gone"
    )
    assert "No search was used" in page
    assert "dög" in page
    assert "2 images are missing" in page
    assert "<details" not in page


def test_root_answer_can_be_chosen() -> None:
    tree = SearchTree(SearchNode(value=math.nan, visits=1), (), "budget")
    page = render_explanation(stored_trace(searched(tree, Query("?"))), {}, absent="gone")
    assert 'data-chosen id="chosen"' in page
    assert "Q –" in page
    assert "the model saw only the question" in page


@pytest.mark.parametrize("ended", ENDED)
def test_page_reports_why_the_search_ended(ended: Ended) -> None:
    tree = replace(search_tree(candidates("cat", "dog")), ended=ended)
    of = stored_trace(searched(tree, Query("?")))
    assert f"The search ended {ENDED[ended]}." in render_explanation(of, {}, absent="gone")


def test_deep_tree_is_rendered_as_a_list() -> None:
    for depth, deep in ((4, False), (5, True)):
        of = stored_search(search_tree(demonstrations(), depth=depth, children=1))
        assert ('class="tree deep"' in render_explanation(of, {}, absent="gone")) is deep


def test_long_texts_are_cut_and_large_images_are_scaled_down() -> None:
    large = solid_image(3, (900, 700))
    query = Query("why? " * 5000, (large,), choices=tuple(map(str, range(500))))
    of = stored_trace(searched(search_tree(demonstrations(), depth=1), query))
    page = render_explanation(of, {large.sha256: large}, absent="gone")
    assert "[…]" in page
    assert "and 460 more" in page
    assert len(page) < 40_000
    [data] = set(re.findall(r'src="(data:image/[^"]+)"', page))
    assert max(Image.from_data_url(data).decode().size) == 160
