"""Tests of the plan, the execution and the figures of streams with scripted models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from bottega.errors import RejectedError, SettingError
from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.evaluation.runs.run_store import RunStore
from bottega.evaluation.streams.stream_plan import (
    Curve,
    Stream,
    StreamConfig,
    item_orders,
    plan_streams,
)
from bottega.evaluation.streams.stream_runs import StreamSetup, run_streams
from bottega.evaluation.streams.stream_summary import (
    CurvePoint,
    scores_without_cache,
    summarize_streams,
)
from bottega.generation import ReplayGenerator, ScriptedGenerator
from bottega.protocols import Tier
from bottega.recipes.cache_retrieval import CacheRetrieval
from bottega.types import Example, Prompt
from tests.builders import example
from tests.knowledge.doubles import SeededEmbedder

LABELS = ("a", "b")
ANSWERS = ["a", "b", "c"] * 10


def master_reply(prompt: Prompt) -> str:
    return "a"


def repeat_last_answer(prompt: Prompt) -> str:
    shown = [m.parts[0] for m in prompt.messages if m.role == "assistant"]
    return str(shown[-1]) if shown else "unknown"


@pytest.fixture
def data() -> Benchmark:
    knowledge = [example("a", shade) for shade in range(100, 108)]
    items = [example("a", shade) for shade in range(12)]
    loaded = labelled_benchmark("d", [*knowledge, example("b", 200)], items)
    named = [
        replace(one, query=replace(one.query, id=f"i{n}")) for n, one in enumerate(loaded.items)
    ]
    return replace(loaded, items=tuple(named))


def setup(data: Benchmark, apprentice: ScriptedGenerator, **options: object) -> StreamSetup:
    tiers = (
        Tier("apprentice", apprentice, shots=1),
        Tier("master", ScriptedGenerator(master_reply, name="m")),
    )
    embed = SeededEmbedder()
    made = StreamSetup(
        data,
        tiers,
        {"image": CacheRetrieval("image", image=embed)},
        item_orders([item.answer for item in data.items], 2, seed=0),
    )
    return replace(made, **options)  # type: ignore[arg-type]


def apprentice() -> ScriptedGenerator:
    return ScriptedGenerator(repeat_last_answer, name="s")


def point(points: Sequence[CurvePoint], curve: str, rate: float) -> CurvePoint:
    return next(one for one in points if (one.curve, one.rate) == (curve, rate))


def test_plan_has_one_stream_of_each_model_alone() -> None:
    curves = [Curve(), Curve(control="no-cache")]
    planned = plan_streams(curves, (0.2, 0.5), 2)
    assert [(one.rate, one.order) for one in planned[:2]] == [(0, 1), (1, 1)]
    assert len(planned) == len(set(planned)) == 2 + 2 * 2 * 2
    assert len({one.name for one in planned}) == len(planned)


def test_orders_are_permutations_that_depend_on_the_seed() -> None:
    orders = item_orders(ANSWERS, 3, seed=1)
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len(set(map(tuple, orders))) == 3
    assert item_orders(ANSWERS, 3, seed=1) == orders != item_orders(ANSWERS, 3, seed=2)


def test_phases_divide_the_answers() -> None:
    for order in item_orders(ANSWERS, 3, seed=1, phases=2):
        assert sorted(order) == list(range(30))
        halves = [{ANSWERS[index] for index in half} for half in (order[:10], order[20:])]
        assert not halves[0] & halves[1]
    firsts = {ANSWERS[order[0]] for order in item_orders(ANSWERS, 9, seed=1, phases=3)}
    assert len(firsts) > 1
    with pytest.raises(SettingError, match="--phases must not exceed the 3 different answers"):
        item_orders(ANSWERS, 1, seed=1, phases=4)


async def test_stream_shows_only_earlier_answers_of_the_master(data: Benchmark) -> None:
    """The apprentice knows nothing until the master has answered once."""
    stream, made = Stream(Curve(), 0.3, 1), setup(data, apprentice())
    result = (await run_streams(made, [stream], concurrency=1))[stream]
    first = next(one.index for one in result.scored if one.tier == "master")
    assert [one.score for one in result.scored] == [0.0] * first + [1.0] * (12 - first)
    assert [one.index for one in result.scored] == list(range(12))
    assert [one.item.query.id for one in result.scored] == [f"i{n}" for n in made.orders[0]]


async def test_master_answers_first_with_half_of_its_calls() -> None:
    """The rest of its calls are spread over the rest of the stream."""
    items = [example("a", shade) for shade in range(200)]
    data = labelled_benchmark("d", [example("b", 200)], items)
    stream = Stream(Curve(), 0.8, 1)
    made = setup(data, apprentice(), router="half-first")
    tiers = [one.tier for one in (await run_streams(made, [stream], concurrency=1))[stream].scored]
    assert tiers[:80] == ["master"] * 80
    assert tiers.count("master") == pytest.approx(160, abs=16)


@pytest.mark.parametrize("router", ["coin", "coverage", "half-first"])
async def test_streams_of_one_model_ask_no_other(data: Benchmark, router: str) -> None:
    made = setup(data, apprentice(), router=router)
    streams = [Stream(Curve(), rate, 1) for rate in (0, 1)]
    results = await run_streams(made, streams, concurrency=1)
    tiers = [{one.tier for one in results[stream].scored} for stream in streams]
    assert tiers == [{"apprentice"}, {"master"}]


async def test_the_vote_is_compared_with_the_apprentice_alone(data: Benchmark) -> None:
    streams = [Stream(Curve(control="no-cache"), rate, 1) for rate in (0, 1)]
    results = await run_streams(setup(data, apprentice()), streams, concurrency=1)
    found = scores_without_cache(results, "master")
    for item in data.items:
        scores = [found[tier, str(item.query.id)] for tier in ("", "apprentice", "master")]
        assert scores == [0.0, 0.0, 1.0]


async def test_random_control_shows_any_answer_but_that_of_the_own_question() -> None:
    own, far = example("a", 0), example("c", 9)
    near = Example(replace(own.query, text="Another question?"), "b", id="near")
    data = labelled_benchmark("d", [near, far], [own])
    shown: dict[str | None, set[str]] = {"random": set(), None: set()}
    for control, seed in product(shown, range(8)):
        stream = Stream(Curve("warm", control=control), 0, 1)  # type: ignore[arg-type]
        made = setup(data, apprentice(), corpus=[own, near, far], orders=[[0]], seed=seed)
        [scored] = (await run_streams(made, [stream], concurrency=1))[stream].scored
        shown[control].add(scored.answer.text)
    assert shown == {"random": {"b", "c"}, None: {"c"}}  # a search excludes the same image


async def test_controls_and_figures(data: Benchmark) -> None:
    curves = [Curve(), *(Curve(control=name) for name in ("no-cache", "random", "vote"))]
    planned = plan_streams(curves, (0.5,), 2)
    results = await run_streams(setup(data, apprentice()), planned, concurrency=4)
    points = summarize_streams(results, "master")
    assert point(points, "no cache", 0).accuracy.value == 0
    assert point(points, "no cache", 1).accuracy.value == 1
    cached, without = point(points, "no start, image", 0.5), point(points, "no cache", 0.5)
    assert cached.master_share == without.master_share == without.accuracy.value
    assert cached.n == 24 and cached.missing == 0
    assert cached.gain is not None and cached.apprentice is not None
    assert cached.gain.value == cached.apprentice.value == cached.agreement
    assert cached.recovered == cached.accuracy.value
    # With one demonstration, a vote and the apprentice give the same answers.
    assert point(points, "vote, no start, image", 0.5).accuracy == cached.accuracy
    assert without.gain is None


async def test_warm_and_cold_starts_load_the_corpus(data: Benchmark) -> None:
    model = apprentice()
    corpus = data.knowledge[:8]
    made = setup(data, model, corpus=corpus, cold=3)
    for start, size in (("none", 0), ("cold", 3), ("warm", 8)):
        with made.open_cache(Curve(start)) as cache:  # type: ignore[arg-type]
            assert len(cache) == size
            assert {one.answer for one in cache} <= {"a"}


async def test_capacity_evicts_the_oldest_answer(data: Benchmark) -> None:
    made = setup(data, apprentice(), corpus=data.knowledge[:4], capacity=3)
    with made.open_cache(Curve("warm", evict="fifo")) as cache:
        kept = {one.query.images for one in cache}
    assert kept == {one.query.images for one in data.knowledge[1:4]}
    with made.open_cache(Curve("warm")) as cache:
        assert len(cache) == 4


async def test_three_tiers(data: Benchmark) -> None:
    tiers = [Tier("small", apprentice(), 1), Tier("medium", apprentice(), 1)]
    tiers.append(Tier("large", ScriptedGenerator(master_reply, name="m")))
    streams = plan_streams([Curve(), Curve(control="no-cache")], (0.4,), 2)
    made = setup(data, apprentice(), tiers=tiers)
    results = await run_streams(made, streams, concurrency=2)
    found = point(summarize_streams(results, "large"), "no start, image", 0.4)
    assert {one.tier for one in results[streams[-1]].scored} >= {"small", "large"}
    assert found.apprentice is not None and found.gain is not None


async def test_interrupted_run_ends_with_the_same_answers(data: Benchmark, tmp_path: Path) -> None:
    streams = plan_streams([Curve(), Curve(control="no-cache")], (0.4,), 2)
    undisturbed = await run_streams(setup(data, apprentice()), streams, concurrency=1)
    model = apprentice()

    def opened(calls: int) -> StreamSetup:
        """Return a setup whose apprentice fails after this number of calls."""
        replies = [repeat_last_answer] * calls

        def reply(prompt: Prompt) -> str:
            if not replies:
                raise SettingError("the connection ended")
            return replies.pop()(prompt)

        inner = ScriptedGenerator(reply, name="s")
        recorded = ReplayGenerator(tmp_path / "replies.jsonl", inner)
        made = setup(data, model)
        return replace(made, tiers=(Tier("apprentice", recorded, shots=1), made.master))

    settings = {"benchmark": "d", "metrics": ["accuracy"]}
    for calls in (3, 5):
        store = RunStore.open(tmp_path / "run", settings, data.items)
        with pytest.raises(SettingError, match="ended"):
            await run_streams(opened(calls), streams, concurrency=1, store=store)
        store.close()
    store = RunStore.open(tmp_path / "run", settings, data.items)
    resumed = await run_streams(opened(99), streams, concurrency=1, store=store)
    store.close()
    store = RunStore.open(tmp_path / "run", settings, data.items)
    again = await run_streams(opened(0), streams, concurrency=1, store=store)
    store.close()
    assert list(again) == streams and again[streams[-1]].length == 12
    first, *others = (
        [
            [(one.item.query.id, one.tier, one.answer.text, one.score) for one in found[key].scored]
            for key in streams
        ]
        for found in (undisturbed, resumed, again)
    )
    assert others == [first, first]


async def test_interrupted_repetition_does_not_complete_an_earlier_run(
    data: Benchmark, tmp_path: Path
) -> None:
    """The master fails on an item, so the cache lacks its answer. A repetition that is interrupted
    must not count the later answers of that cache as its own."""
    stream = Stream(Curve(), 0.4, 1)
    made = setup(data, apprentice())
    undisturbed = (await run_streams(made, [stream], concurrency=1))[stream]
    settings = {"benchmark": "d", "metrics": ["accuracy"]}
    counts: list[int] = []
    for fails in (lambda call: call == 1, lambda call: call > 2, lambda call: False):
        calls = iter(range(99))

        def reply(prompt: Prompt, fails: Callable[[int], bool] = fails) -> str:
            if fails(next(calls)):  # noqa: B023
                raise RejectedError("no", status=400 if not counts else 401)
            return "a"

        tiers = (made.tiers[0], Tier("master", ScriptedGenerator(reply, name="m")))
        store = RunStore.open(tmp_path / "run", settings, data.items)
        try:
            found = await run_streams(
                replace(made, tiers=tiers), [stream], concurrency=1, store=store
            )
            counts.append(len(found[stream].scored))
        except RejectedError:
            counts.append(store.count())
        store.close()
    assert counts[0] == 11 and counts[1] < 11 and counts[2] == 12
    assert [one.score for one in found[stream].scored] == [one.score for one in undisturbed.scored]


def test_settings_survive_a_record() -> None:
    config = StreamConfig(
        benchmark="digits",
        tiers=("bundled", "bundled:master"),
        router="coin",
        rates=(0.2,),
        starts=("none", "warm"),
        retrieve=("image", "dual"),
        controls=("no-cache", "vote"),
        shots=1,
        orders=2,
        embed="bundled",
        embed_text="words",
        evict=("none",),
    )
    stored = StreamConfig.from_record(config.record())
    assert stored.record() == config.record()
    assert stored.streams() == config.streams()
    assert len(config.streams()) == 2 + (4 + 4 + 1) * 2
    # Every stream, also one without a cache, has a retrieval of the run.
    dual = replace(config, retrieve=("dual",))
    assert {stream.curve.retrieve for stream in dual.streams()} == {"dual"}
    random = replace(config, controls=("random",))
    names = {stream.curve.name for stream in random.streams() if stream.curve.control}
    assert names == {"random, no start, image", "random, warm start, image"}
