from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.errors import GenerationError, SettingError
from bottega.generation import Scripted
from bottega.parsing import FinalAnswerParser
from bottega.pipeline import Pipeline
from bottega.prompting import Interleaved
from bottega.protocols import Tier
from bottega.recording.stored_tree import stored_tree, tree_from
from bottega.reranking import Asker, Mutual, SelfConsistency, TreeSearch, Variant, Weighted, Worth
from bottega.routing import always
from bottega.types import (
    Answer,
    Candidate,
    Example,
    Found,
    Message,
    Node,
    Prompt,
    Query,
    Reply,
    Sampling,
)
from tests.builders import picture

QUERY = Query("Which way?")
PROMPT = Interleaved()
PARSE = FinalAnswerParser()
SHORT = Sampling(max_tokens=16)


def known(count: int) -> list[Candidate]:
    """Named 0, 1, 2 and so on, with falling scores; what they ask is their name."""
    examples = [Example(Query(f"case {i}"), f"{i % 3}", id=str(i)) for i in range(count)]
    return [Candidate(one, 1 - i / 100) for i, one in enumerate(examples)]


def names(shown: Sequence[Candidate]) -> list[str]:
    return [str(one.example.id) for one in shown]


def opinion(prompt: Prompt) -> str:
    """A model whose answer and reasoning depend on all that it is shown."""
    digest = hashlib.sha256(repr(prompt).encode()).hexdigest()
    return f"It follows from {digest[:8]}.\nAnswer: {int(digest, 16) % 3}"


def reminded(query: Query, rationale: str) -> Prompt:
    return Prompt((Message("user", (f"{query.text}\n{rationale}",)),))


REWARD = Weighted(
    SelfConsistency(reminded, PARSE, sampling=replace(SHORT, temperature=0.8)),
    Mutual(PROMPT, PARSE, sampling=replace(SHORT, temperature=0.8)),
)


def rcts(model: Scripted, **settings: Any) -> TreeSearch:
    fields: dict[str, Any] = {"reward": REWARD, "sampling": SHORT}
    return TreeSearch(model, prompt=PROMPT, parse=PARSE, **(fields | settings))


async def later_is_better(
    query: Query, said: Answer, known: Sequence[Candidate], ask: Asker, /
) -> Worth:
    """Likes the answers that name far candidates, and asks nothing."""
    value = sum(int(name) for name in said.text.split() if name.isdigit()) / 100
    return Worth(value, {"far": value})


def repeated(prompt: Prompt) -> str:
    """Answers with the names of what it is shown."""
    texts = [str(message.parts[0]) for message in prompt.messages if message.role == "user"]
    return " ".join(text.removeprefix("case ") for text in texts[:-1]) or "nothing"


def leaf_at(found: Found) -> list[Node]:
    """The nodes on the chosen path, the root first."""
    assert found.tree is not None
    nodes = [found.tree.root]
    for step in found.tree.path:
        nodes.append(nodes[-1].children[step])
    return nodes


def leaves(node: Node) -> list[Node]:
    return [leaf for child in node.children for leaf in leaves(child)] or [node]


async def test_the_branch_that_is_worth_most_is_shown_and_is_the_answer() -> None:
    model = Scripted(repeated)
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
    model = Scripted(repeated)
    found = await rcts(model, reward=later_is_better, rollouts=2).search(QUERY, known(5), 3)
    assert found.tree is not None
    first, second = leaves(found.tree.root)
    assert first.answer is not None
    assert first.answer.text == "0 1 2"
    assert second.answer is not None
    assert second.answer.text != "0 1 2"
    assert found.tree.root.visits == 2


async def test_an_answer_that_all_agree_on_is_not_judged() -> None:
    model = Scripted(lambda prompt: "I see.\nAnswer: left")
    found = await rcts(model).search(QUERY, known(5), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.requests, found.tree.path) == ("agreement", 3, (0, 0))
    assert names(found.shown) == ["0", "1"]
    assert [leaf.visits for leaf in leaves(found.tree.root)] == [0, 0]


async def test_answers_that_are_invalid_agree_on_nothing() -> None:
    found = await rcts(Scripted(lambda prompt: ""), rollouts=3).search(QUERY, known(5), 2)
    assert found.tree is not None
    assert (found.tree.ended, found.tree.requests) == ("rollouts", 4)
    assert found.tree.root.value == 0


async def test_a_tree_that_is_all_there_ends_the_search() -> None:
    found = await rcts(Scripted(repeated), reward=later_is_better).search(QUERY, known(2), 3)
    assert found.tree is not None
    assert found.tree.ended == "exhausted"
    assert sorted(leaf.answer.text for leaf in leaves(found.tree.root) if leaf.answer) == [
        "0 1",
        "1 0",
    ]


@pytest.mark.parametrize(("count", "k"), [(0, 3), (3, 0)])
async def test_with_nothing_to_show_the_query_is_asked_alone(count: int, k: int) -> None:
    model = Scripted(["left"])
    found = await rcts(model).search(QUERY, known(count), k)
    assert found.shown == ()
    assert found.answer.text == "left"
    assert found.tree is not None
    assert (found.tree.path, found.tree.ended) == ((), "exhausted")


@pytest.mark.parametrize("variant", ["paper", "released"])
async def test_the_same_seed_finds_the_same(variant: Variant) -> None:
    async def search(seed: int) -> tuple[Found, list[Any]]:
        model = Scripted(opinion)
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
        search = rcts(Scripted(repeated), reward=later_is_better)
        found = await search.search(query, known(20), 3)
        assert found.tree is not None
        return [leaf.answer.text for leaf in leaves(found.tree.root) if leaf.answer]

    pictured = Query(QUERY.text, (picture(1),))
    assert len({tuple(await asked(one)) for one in (QUERY, Query("Where?"), pictured)}) == 3


class Uneven(Scripted):
    """Some replies take longer than others, by the dice."""

    def __init__(self, replies: Callable[[Prompt], str], salt: int) -> None:
        super().__init__(replies)
        self._salt = salt

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        for _ in range(hash((prompt, self._salt)) % 40):
            await asyncio.sleep(0)
        return await super().generate(prompt, sampling)


@pytest.mark.parametrize("budget", [None, 70])
async def test_what_is_found_does_not_depend_on_which_reply_is_first(budget: int | None) -> None:
    def search(model: Scripted) -> TreeSearch:
        return rcts(model, parallel=4, most_calls=budget)

    expected = await search(Scripted(opinion)).search(QUERY, known(20), 3)
    for salt in range(5):
        assert await search(Uneven(opinion, salt)).search(QUERY, known(20), 3) == expected


class OneByOne(Scripted):
    """An endpoint that takes one request at a time."""

    def __init__(self, replies: Callable[[Prompt], str], latency: float) -> None:
        super().__init__(replies, latency=latency)
        self._turn = asyncio.Semaphore(1)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        async with self._turn:
            return await super().generate(prompt, sampling)


@pytest.mark.parametrize(("parallel", "faster"), [(4, 8), (1, 3)])
async def test_much_faster_than_the_same_requests_one_by_one(parallel: int, faster: int) -> None:
    """K=3, N=20, P=10, N_s=N_m=5: 71 requests in 6 waves (11.8x) or, in the paper's order, 18."""
    latency, seconds = 0.02, []
    for _ in range(2):
        model = Scripted(opinion, latency=latency)
        began = time.perf_counter()
        found = await rcts(model, parallel=parallel).search(QUERY, known(20), 3)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    slow = OneByOne(opinion, latency)
    assert await rcts(slow, parallel=parallel).search(QUERY, known(20), 3) == found
    serial = time.perf_counter() - began
    assert len(slow.calls) == len(model.calls) == 1 + 10 * 7
    assert found.tree is not None
    assert (found.tree.requests, found.tree.calls) == (71, 1 + 10 * 11)
    assert serial / min(seconds) >= faster


async def test_identical_probes_are_asked_once() -> None:
    """Without rationales branches with the same answer have the same probes: 3 answers at most."""
    model = Scripted(lambda prompt: opinion(prompt)[-1])
    found = await rcts(model).search(QUERY, known(20), 3)
    assert found.tree is not None
    assert found.tree.root.visits == 10
    assert found.tree.requests == len({(call.prompt, call.sampling) for call in model.calls})
    assert found.tree.requests <= 11 + 3 * 5


class FailsAt(Scripted):
    def __init__(self, place: int) -> None:
        super().__init__(opinion)
        self._place = place

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if len(self.calls) == self._place:
            raise GenerationError("the endpoint failed")
        return await super().generate(prompt, sampling)


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("budget", [None, 500])
async def test_a_failing_endpoint_is_neither_a_reward_nor_an_answer(
    parallel: int, budget: int | None
) -> None:
    for place in range(71):
        search = rcts(FailsAt(place), parallel=parallel, most_calls=budget)
        with pytest.raises(GenerationError, match="the endpoint failed"):
            await search.search(QUERY, known(20), 3)


@given(
    most_calls=st.none() | st.integers(1, 130),
    most_tokens=st.none() | st.integers(200, 30_000),
    parallel=st.integers(1, 5),
    count=st.integers(0, 8),
    k=st.integers(0, 4),
)
@settings(max_examples=40)
async def test_no_budget_is_ever_exceeded(
    most_calls: int | None, most_tokens: int | None, parallel: int, count: int, k: int
) -> None:
    model = Scripted(opinion)
    search = rcts(model, parallel=parallel, most_calls=most_calls, most_tokens=most_tokens)
    found = await search.search(QUERY, known(count), k)
    tree = found.tree
    assert tree is not None
    calls = sum(call.sampling.n for call in model.calls)
    assert (tree.requests, tree.calls) == (len(model.calls), calls)
    assert calls <= (most_calls or calls)
    tokens = tree.usage.prompt_tokens + tree.usage.completion_tokens
    assert tokens <= (most_tokens or tokens)
    limited = most_calls is not None or most_tokens is not None
    assert tree.ended != "budget" or limited
    assert leaf_at(found)[-1].answer == found.answer
    for leaf in leaves(tree.root):
        assert leaf.answer is not None
        assert leaf.visits == (1 if leaf.rewards else 0)
    assert tree.root.visits == sum(leaf.visits for leaf in leaves(tree.root))


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize(
    ("most_calls", "judged"),
    # The first three answers and 10 probes; the root's answer and 11 completions a branch.
    [(3 + 10, 1), (3 + 10 + 9, 1), (1 + 5 * 11, 5), (1 + 6 * 11 + 10, 6)],
)
async def test_a_budget_is_spent_on_whole_branches(
    parallel: int, most_calls: int, judged: int
) -> None:
    search = rcts(Scripted(opinion), parallel=parallel, most_calls=most_calls)
    found = await search.search(QUERY, known(20), 3)
    assert found.tree is not None
    assert found.tree.ended == "budget"
    assert found.tree.root.visits == judged


@pytest.mark.parametrize(("most_calls", "shown"), [(1, []), (3, ["0", "1", "2"])])
async def test_what_the_budget_did_not_judge_is_answered_by_the_nearest(
    most_calls: int, shown: list[str]
) -> None:
    search = rcts(Scripted(opinion), most_calls=most_calls)
    found = await search.search(QUERY, known(20), 3)
    assert names(found.shown) == shown
    assert found.tree is not None
    assert (found.tree.ended, found.tree.requests) == ("budget", most_calls)


async def test_a_budget_without_an_answer_is_refused() -> None:
    with pytest.raises(SettingError) as raised:
        await rcts(Scripted(opinion), most_tokens=20).search(QUERY, known(3), 2)
    assert "most_tokens" in raised.value.hint


async def test_in_a_pipeline_the_search_answers() -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return known(k)

    model = Scripted(opinion)
    pipeline = Pipeline(
        always(Tier("small", model, shots=3)),
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
        rcts(Scripted([]), **wrong)
    assert raised.value.hint


async def test_a_negative_number_of_demonstrations_is_refused() -> None:
    with pytest.raises(SettingError):
        await rcts(Scripted([])).search(QUERY, known(3), -1)


class Unsteady(Scripted):
    """Replies in an order of its own."""

    def __init__(self, latency: Callable[[], float] | None) -> None:
        super().__init__(opinion)
        self._wait = latency

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if self._wait is not None:
            await asyncio.sleep(self._wait())
        return await super().generate(prompt, sampling)


@pytest.mark.parametrize("parallel", [1, 4])
@pytest.mark.parametrize("most", range(1500, 9000, 500))
async def test_a_budget_of_tokens_does_not_depend_on_which_reply_was_first(
    most: int, parallel: int
) -> None:
    chance = random.Random(most)
    waits = (None, lambda: 0.001, lambda: chance.random() / 500)
    trees = []
    for wait in waits:
        search = rcts(Unsteady(wait), rollouts=6, parallel=parallel, most_tokens=most)
        trees.append((await search.search(QUERY, known(6), 2)).tree)
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
async def test_a_score_that_is_no_number_is_refused(score: float, variant: Variant) -> None:
    found = [*known(2), Candidate(Example(Query("case 2"), "2", id="2"), score)]
    with pytest.raises(SettingError, match="score") as raised:
        await rcts(Scripted(opinion), variant=variant).search(QUERY, found, 2)
    assert raised.value.hint


@pytest.mark.parametrize("variant", ["paper", "released"])
async def test_scores_may_lie_as_far_apart_as_numbers_can(variant: Variant) -> None:
    scores = (1e308, 0.0, -1e308)
    far = [replace(one, score=score) for one, score in zip(known(3), scores, strict=True)]
    assert (await rcts(Scripted(opinion), variant=variant).search(QUERY, far, 2)).tree


async def test_a_search_shows_no_more_than_can_be_recorded() -> None:
    deep = rcts(Scripted(opinion), rollouts=1)
    tree = (await deep.search(QUERY, [replace(one, score=1.0) for one in known(100)], 100)).tree
    assert tree is not None
    assert tree_from(orjson.loads(orjson.dumps(stored_tree(tree)))).path == tree.path
    with pytest.raises(SettingError, match="101"):
        await deep.search(QUERY, known(101), 101)
