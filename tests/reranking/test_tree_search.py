from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import orjson
import pytest

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.pipeline import FixedRouter, Pipeline
from bottega.prompting import PromptTemplate
from bottega.protocols import Tier
from bottega.recording.stored_traces import read_tree, stored_tree
from bottega.reranking import RewardVariant
from bottega.types import Candidate, Example, Query, Sampling, SearchResult
from tests.builders import solid_image
from tests.reranking.tiny_search import (
    PARSE,
    PROMPT,
    QUERY,
    candidates,
    later_is_better,
    leaf_at,
    leaves,
    names,
    opinion,
    rcts,
    repeated,
)


async def test_branch_with_highest_reward_is_the_answer() -> None:
    model = ScriptedGenerator(repeated)
    search = rcts(model, reward=later_is_better, rollouts=6)
    found = await search.search(QUERY, candidates(3), 2)
    tree = found.tree
    assert tree is not None
    assert tree.ended == "rollouts"
    # All six sequences were tried; 12 and 21 have reward 3/100, and node 2 has a higher value.
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
    assert await search(QUERY, candidates(3), 2) == list(found.shown)


async def test_the_first_two_branches_are_the_nearest_and_a_sampled_one() -> None:
    model = ScriptedGenerator(repeated)
    found = await rcts(model, reward=later_is_better, rollouts=2).search(QUERY, candidates(5), 3)
    assert found.tree is not None
    first, second = leaves(found.tree.root)
    assert first.answer is not None
    assert first.answer.text == "0 1 2"
    assert second.answer is not None
    assert second.answer.text != "0 1 2"
    assert found.tree.root.visits == 2


async def test_unanimous_answer_needs_no_reward() -> None:
    model = ScriptedGenerator(lambda prompt: "I see.\nAnswer: left")
    found = await rcts(model).search(QUERY, candidates(5), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.requests, found.tree.path) == ("agreement", 3, (0, 0))
    assert names(found.shown) == ["0", "1"]
    assert [leaf.visits for leaf in leaves(found.tree.root)] == [0, 0]


async def test_a_unanimous_answer_is_searched_without_early_stopping() -> None:
    model = ScriptedGenerator(lambda prompt: "I see.\nAnswer: left")
    search = replace(rcts(model, reward=later_is_better, rollouts=4), early_stop=False)
    found = await search.search(QUERY, candidates(5), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.root.visits) == ("rollouts", 4)


async def test_two_agreeing_answers_still_need_rewards() -> None:
    """Early stopping needs three answers: the query alone, the nearest, and a sampled branch."""
    model = ScriptedGenerator(lambda prompt: "I see.\nAnswer: left")
    found = await rcts(model, rollouts=1).search(QUERY, candidates(5), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.root.visits) == ("rollouts", 1)
    assert [set(leaf.rewards) for leaf in leaves(found.tree.root)] == [{"self", "mutual"}]


async def test_answers_that_are_invalid_agree_on_nothing() -> None:
    found = await rcts(ScriptedGenerator(lambda prompt: ""), rollouts=3).search(
        QUERY, candidates(5), 2
    )
    assert found.tree is not None
    assert (found.tree.ended, found.tree.requests) == ("rollouts", 4)
    assert found.tree.root.value == 0


async def test_exhausted_tree_ends_search() -> None:
    found = await rcts(ScriptedGenerator(repeated), reward=later_is_better).search(
        QUERY, candidates(2), 3
    )
    assert found.tree is not None
    assert found.tree.ended == "exhausted"
    assert sorted(leaf.answer.text for leaf in leaves(found.tree.root) if leaf.answer) == [
        "0 1",
        "1 0",
    ]


@pytest.mark.parametrize(("count", "k"), [(0, 3), (3, 0)])
async def test_no_candidates_means_zero_shot(count: int, k: int) -> None:
    model = ScriptedGenerator(["left"])
    found = await rcts(model).search(QUERY, candidates(count), k)
    assert found.shown == ()
    assert found.answer.text == "left"
    assert found.tree is not None
    assert (found.tree.path, found.tree.ended) == ((), "exhausted")


@pytest.mark.parametrize("variant", ["paper", "released"])
async def test_equal_seeds_give_equal_results(variant: RewardVariant) -> None:
    async def search(seed: int) -> tuple[SearchResult, list[Any]]:
        model = ScriptedGenerator(opinion)
        found = await rcts(model, seed=seed, variant=variant).search(QUERY, candidates(20), 3)
        return found, model.calls

    first, requested = await search(1)
    assert (first, requested) == await search(1)
    other, _ = await search(2)
    assert first.tree is not None
    assert other.tree is not None
    assert first.tree.root != other.tree.root
    assert first.tree.root.visits == 10


async def test_another_query_has_other_draws() -> None:
    async def requested(query: Query) -> list[str]:
        search = rcts(ScriptedGenerator(repeated), reward=later_is_better)
        found = await search.search(query, candidates(20), 3)
        assert found.tree is not None
        return [leaf.answer.text for leaf in leaves(found.tree.root) if leaf.answer]

    pictured = Query(QUERY.text, (solid_image(1),))
    assert len({tuple(await requested(one)) for one in (QUERY, Query("Where?"), pictured)}) == 3


async def test_in_a_pipeline_the_search_answers() -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return candidates(k)

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
        {"max_calls": 0},
        {"max_tokens": 0},
        {"max_calls": 1.5},
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
        await rcts(ScriptedGenerator([])).search(QUERY, candidates(3), -1)


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
async def test_nan_score_is_an_error(score: float, variant: RewardVariant) -> None:
    found = [*candidates(2), Candidate(Example(Query("case 2"), "2", id="2"), score)]
    with pytest.raises(SettingError, match="score") as raised:
        await rcts(ScriptedGenerator(opinion), variant=variant).search(QUERY, found, 2)
    assert raised.value.hint


@pytest.mark.parametrize("variant", ["paper", "released"])
async def test_scores_of_extreme_range(variant: RewardVariant) -> None:
    scores = (1e308, 0.0, -1e308)
    far = [replace(one, score=score) for one, score in zip(candidates(3), scores, strict=True)]
    assert (await rcts(ScriptedGenerator(opinion), variant=variant).search(QUERY, far, 2)).tree


async def test_search_depth_is_limited_by_recording() -> None:
    deep = rcts(ScriptedGenerator(opinion), rollouts=1)
    tree = (
        await deep.search(QUERY, [replace(one, score=1.0) for one in candidates(100)], 100)
    ).tree
    assert tree is not None
    assert read_tree(orjson.loads(orjson.dumps(stored_tree(tree)))).path == tree.path
    with pytest.raises(SettingError, match="101"):
        await deep.search(QUERY, candidates(101), 101)


async def test_the_answer_without_demonstrations_may_have_a_prompt_of_its_own() -> None:
    model = ScriptedGenerator(repeated)
    zero_shot = PromptTemplate(instruction="Be brief.")
    search = replace(rcts(model, reward=later_is_better, rollouts=2), zero_shot_prompt=zero_shot)
    await search.search(QUERY, candidates(5), 2)
    brief = [call.prompt for call in model.calls if "Be brief." in str(call.prompt)]
    assert brief == [zero_shot(QUERY, [])]
    assert len(model.calls) == 3
