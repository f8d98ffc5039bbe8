from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import orjson
import pytest

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.pipeline import Pipeline
from bottega.protocols import Tier
from bottega.recording.stored_trace import read_tree, stored_tree
from bottega.reranking import Variant
from bottega.routing import FixedRouter
from bottega.types import Candidate, Example, Query, Sampling, SearchResult
from tests.builders import solid_image
from tests.reranking.searches import (
    PARSE,
    PROMPT,
    QUERY,
    known,
    later_is_better,
    leaf_at,
    leaves,
    names,
    opinion,
    rcts,
    repeated,
)


async def test_the_branch_that_is_worth_most_is_shown_and_is_the_answer() -> None:
    model = ScriptedGenerator(repeated)
    search = rcts(model, reward=later_is_better, rollouts=6)
    found = await search.search(QUERY, known(3), 2)
    tree = found.tree
    assert tree is not None
    assert tree.ended == "rollouts"
    # All six sequences were tried; 12 and 21 are worth 3/100, and what is behind 2 is worth more.
    assert sorted(str(leaf.answer and leaf.answer.text) for leaf in leaves(tree.root)) == sorted(
        f"{one} {other}" for one in range(3) for other in range(3) if one != other
    )
    assert names(found.shown) == ["2", "1"]
    assert found.answer.text == "2 1"
    assert found.prompt == PROMPT(QUERY, found.shown)
    assert found.reply.completions[0].text == "2 1"
    path = leaf_at(found)
    assert [node.candidate for node in path[1:]] == list(found.shown)
    assert path[-1].answer == found.answer
    assert path[-1].rewards == {"far": 0.03}
    assert path[-1].value == pytest.approx(0.03)
    assert path[0].visits == 6
    assert path[0].answer is not None
    assert path[0].answer.text == "nothing"
    assert (tree.requests, tree.calls) == (7, 7) == (len(model.calls), len(model.calls))
    assert await search(QUERY, known(3), 2) == list(found.shown)


async def test_the_first_two_branches_are_the_nearest_and_a_sampled_one() -> None:
    model = ScriptedGenerator(repeated)
    found = await rcts(model, reward=later_is_better, rollouts=2).search(QUERY, known(5), 3)
    assert found.tree is not None
    first, second = leaves(found.tree.root)
    assert first.answer is not None
    assert first.answer.text == "0 1 2"
    assert second.answer is not None
    assert second.answer.text != "0 1 2"
    assert found.tree.root.visits == 2


async def test_an_answer_that_all_agree_on_is_not_judged() -> None:
    model = ScriptedGenerator(lambda prompt: "I see.\nAnswer: left")
    found = await rcts(model).search(QUERY, known(5), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.requests, found.tree.path) == ("agreement", 3, (0, 0))
    assert names(found.shown) == ["0", "1"]
    assert [leaf.visits for leaf in leaves(found.tree.root)] == [0, 0]


async def test_two_answers_that_agree_are_still_judged() -> None:
    """Early stopping needs three answers: the query alone, the nearest, and a sampled branch."""
    model = ScriptedGenerator(lambda prompt: "I see.\nAnswer: left")
    found = await rcts(model, rollouts=1).search(QUERY, known(5), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.root.visits) == ("rollouts", 1)
    assert [set(leaf.rewards) for leaf in leaves(found.tree.root)] == [{"self", "mutual"}]


async def test_answers_that_are_invalid_agree_on_nothing() -> None:
    found = await rcts(ScriptedGenerator(lambda prompt: ""), rollouts=3).search(QUERY, known(5), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.requests) == ("rollouts", 4)
    assert found.tree.root.value == 0


async def test_a_tree_that_is_all_there_ends_the_search() -> None:
    found = await rcts(ScriptedGenerator(repeated), reward=later_is_better).search(
        QUERY, known(2), 3
    )
    assert found.tree is not None
    assert found.tree.ended == "exhausted"
    assert sorted(leaf.answer.text for leaf in leaves(found.tree.root) if leaf.answer) == [
        "0 1",
        "1 0",
    ]


@pytest.mark.parametrize(("count", "k"), [(0, 3), (3, 0)])
async def test_with_nothing_to_show_the_query_is_asked_alone(count: int, k: int) -> None:
    model = ScriptedGenerator(["left"])
    found = await rcts(model).search(QUERY, known(count), k)
    assert found.shown == ()
    assert found.answer.text == "left"
    assert found.tree is not None
    assert (found.tree.path, found.tree.ended) == ((), "exhausted")


@pytest.mark.parametrize("variant", ["paper", "released"])
async def test_the_same_seed_finds_the_same(variant: Variant) -> None:
    async def search(seed: int) -> tuple[SearchResult, list[Any]]:
        model = ScriptedGenerator(opinion)
        found = await rcts(model, seed=seed, variant=variant).search(QUERY, known(20), 3)
        return found, model.calls

    first, asked = await search(1)
    assert (first, asked) == await search(1)
    other, _ = await search(2)
    assert first.tree is not None
    assert other.tree is not None
    assert first.tree.root != other.tree.root
    assert first.tree.root.visits == 10


async def test_another_query_has_other_draws() -> None:
    async def asked(query: Query) -> list[str]:
        search = rcts(ScriptedGenerator(repeated), reward=later_is_better)
        found = await search.search(query, known(20), 3)
        assert found.tree is not None
        return [leaf.answer.text for leaf in leaves(found.tree.root) if leaf.answer]

    pictured = Query(QUERY.text, (solid_image(1),))
    assert len({tuple(await asked(one)) for one in (QUERY, Query("Where?"), pictured)}) == 3


async def test_in_a_pipeline_the_search_answers() -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return known(k)

    model = ScriptedGenerator(opinion)
    pipeline = Pipeline(
        FixedRouter(Tier("small", model, shots=3)),
        PROMPT,
        PARSE,
        retrieve=retrieve,
        fetch=20,
        search=rcts(model),
    )
    trace = await pipeline.trace(QUERY)
    assert trace.tree is not None
    assert trace.tree.requests == len(model.calls) == 71
    assert len(trace.candidates) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"rollouts": 0},
        {"parallel": 0},
        {"children": 0},
        {"exploration": -1},
        {"sampling": Sampling(n=2, temperature=1)},
        {"most_calls": 0},
        {"most_tokens": 0},
        {"most_calls": 1.5},
        {"rollouts": 2.5},
        {"variant": "oops"},
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_first_query(wrong: Any) -> None:
    with pytest.raises(SettingError) as raised:
        rcts(ScriptedGenerator([]), **wrong)
    assert raised.value.hint


async def test_a_negative_number_of_demonstrations_is_refused() -> None:
    with pytest.raises(SettingError):
        await rcts(ScriptedGenerator([])).search(QUERY, known(3), -1)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
async def test_a_score_that_is_no_number_is_refused(score: float, variant: Variant) -> None:
    found = [*known(2), Candidate(Example(Query("case 2"), "2", id="2"), score)]
    with pytest.raises(SettingError, match="score") as raised:
        await rcts(ScriptedGenerator(opinion), variant=variant).search(QUERY, found, 2)
    assert raised.value.hint


@pytest.mark.parametrize("variant", ["paper", "released"])
async def test_scores_may_lie_as_far_apart_as_numbers_can(variant: Variant) -> None:
    scores = (1e308, 0.0, -1e308)
    far = [replace(one, score=score) for one, score in zip(known(3), scores, strict=True)]
    assert (await rcts(ScriptedGenerator(opinion), variant=variant).search(QUERY, far, 2)).tree


async def test_a_search_shows_no_more_than_can_be_recorded() -> None:
    deep = rcts(ScriptedGenerator(opinion), rollouts=1)
    tree = (await deep.search(QUERY, [replace(one, score=1.0) for one in known(100)], 100)).tree
    assert tree is not None
    assert read_tree(orjson.loads(orjson.dumps(stored_tree(tree)))).path == tree.path
    with pytest.raises(SettingError, match="101"):
        await deep.search(QUERY, known(101), 101)
