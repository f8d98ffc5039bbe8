from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.errors import StoreError
from bottega.recording import StoredNode, StoredTree, TraceStore, from_json, json_text, stored_trace
from bottega.types import Answer, Candidate, Ended, Example, Query, SearchNode, SearchTree, Usage
from tests.builders import candidates, example, search_tree, searched, solid_image
from tests.recording.test_traces import trace

IMAGES = [solid_image(shade) for shade in range(3)]
numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 10**6)
continues: st.SearchStrategy[bool] = st.booleans()
ends: st.SearchStrategy[Ended] = st.sampled_from(get_args(Ended))
examples = st.builds(
    Example,
    st.builds(Query, st.text(max_size=5), st.lists(st.sampled_from(IMAGES), max_size=2).map(tuple)),
    st.text(max_size=5),
    rationale=st.none() | st.text(max_size=5),
    id=st.none() | st.text(max_size=5),
)
answers = st.builds(
    Answer,
    st.text(max_size=5),
    st.booleans(),
    st.lists(st.text(max_size=3), max_size=2).map(tuple),
    st.none() | st.floats(0, 1),
    st.none() | st.text(max_size=5),
)


@st.composite
def trees(draw: st.DrawFn) -> SearchTree:
    candidates = draw(st.lists(st.builds(Candidate, examples, numbers), min_size=1, max_size=4))

    def node(depth: int) -> SearchNode:
        return SearchNode(
            draw(st.sampled_from(candidates)) if depth else None,
            draw(numbers),
            draw(counts),
            tuple(node(depth + 1) for _ in range(draw(st.integers(0, 2)) if depth < 3 else 0)),
            draw(st.none() | answers),
            draw(st.dictionaries(st.text(max_size=5), numbers, max_size=2)),
        )

    here = root = node(0)
    path: list[int] = []
    while draw(continues) and here.children:
        path.append(draw(st.integers(0, len(here.children) - 1)))
        here = here.children[path[-1]]
    return SearchTree(
        root, tuple(path), draw(ends), draw(counts), draw(counts), Usage(draw(counts))
    )


@given(trees())
def test_a_stored_tree_is_read_back(tree: SearchTree) -> None:
    written = stored_trace(replace(trace(), tree=tree))
    read = from_json(json_text(written))
    assert read == written
    assert read.tree is not None
    assert len(set(read.tree.demonstrations)) == len(read.tree.demonstrations)
    for kept, node in zip(_stored_nodes(read.tree.root), _nodes(tree.root), strict=True):
        assert (kept.value, kept.visits, kept.answer) == (node.value, node.visits, node.answer)
        assert kept.rewards == node.rewards
        assert len(kept.children) == len(node.children)
        assert _demonstration(read.tree, kept) == _expected(node.candidate)
    assert (read.tree.path, read.tree.ended, read.usage) == (tree.path, tree.ended, tree.usage)


def _stored_nodes(node: StoredNode) -> Iterator[StoredNode]:
    yield node
    for child in node.children:
        yield from _stored_nodes(child)


def _nodes(node: SearchNode) -> Iterator[SearchNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def _demonstration(tree: StoredTree, node: StoredNode) -> object:
    if node.demonstration is None:
        return None
    one = tree.demonstrations[node.demonstration]
    return one.id, one.text, one.images, one.answer, one.rationale, one.score


def _expected(candidate: Candidate | None) -> object:
    if candidate is None:
        return None
    one, images = candidate.example, candidate.example.query.images
    hashes = tuple(image.sha256 for image in images)
    return one.id, one.query.text, hashes, one.answer, one.rationale, candidate.score


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[TraceStore]:
    opened = TraceStore.open(tmp_path / "traces.db")
    yield opened
    opened.close()


async def test_the_sums_include_all_requests_of_a_search(traces: TraceStore) -> None:
    tree = search_tree(candidates("cat", "dog", "owl", "newt"))
    await traces(searched(tree, example("cat", 9).query))
    await traces(trace("plain"))
    summary, plain = traces.summary(), trace().reply.usage
    assert summary.prompt_tokens == tree.usage.prompt_tokens + plain.prompt_tokens
    assert summary.completion_tokens == tree.usage.completion_tokens + plain.completion_tokens
    assert traces.get("abc123").usage == tree.usage


def test_a_nan_value_is_readable() -> None:
    tree = SearchTree(SearchNode(value=float("nan"), rewards={"self": float("nan")}), (), "budget")
    read = from_json(json_text(stored_trace(replace(trace(), tree=tree)))).tree
    assert read is not None
    assert str(read.root.value) == str(read.root.rewards["self"]) == "nan"


@pytest.mark.parametrize(
    "damage",
    [
        "json_set(body, '$.tree.path[0]', 7)",
        "json_set(body, '$.tree.path[0]', -1)",
        "json_set(body, '$.tree.ended', 'never')",
        "json_set(body, '$.tree.demonstrations', json('[]'))",
        "json_set(body, '$.tree.root', null)",
        "json_set(body, '$.tree.root.children[0].demonstration', -1)",
        "json_set(body, '$.tree.root.children[0].rewards', 3)",
        "json_set(body, '$.tree.root.children[0].value', 'much')",
        "json_set(body, '$.tree.colour', 'red')",
        "json_remove(body, '$.tree.usage')",
    ],
)
async def test_a_damaged_tree_is_an_error(traces: TraceStore, damage: str) -> None:
    await traces(searched(search_tree(candidates("cat", "dog", "owl")), Query("?")))
    traces._tables.execute(f"UPDATE traces SET body = {damage}")
    with pytest.raises(StoreError, match="damaged") as caught:
        traces.list()
    assert caught.value.hint
