from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import default_methods, method_keys, needs_search, plan
from bottega.evaluation.methods.specifications import LABEL_METHODS
from bottega.evaluation.outcomes import Method
from bottega.evaluation.runs.runner import evaluate
from bottega.generation import ScriptedGenerator
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.prompting import InterleavedPrompter
from bottega.recipes import Classifier
from bottega.types import Prompt, Query, Trace
from tests.builders import example
from tests.evaluation.builders import episodic_benchmark, passage_benchmark

SHADES, HOMES = episodic_benchmark(), passage_benchmark()
EMPTY = partial(KnowledgeBase.open, ":memory:", embed=None)


def settings(script: ScriptedGenerator) -> Classifier:
    return Classifier(script, [], prompt=InterleavedPrompter())


@pytest.mark.parametrize(
    ("names", "shots"), [(["zero"], [5]), ([], [5]), (["vote"], [0]), (["vote"], [])]
)
def test_invalid_settings_raise(names: list[str], shots: list[int]) -> None:
    with EMPTY() as knowledge, pytest.raises(SettingError):
        plan(
            RunConfig(methods=names, shots=shots),
            SHADES,
            knowledge,
            settings(ScriptedGenerator([])),
        )


def many(count: int) -> Benchmark:
    examples = tuple(example("a", i) for i in range(count))
    return Benchmark("many", examples, examples, ("a",))


@pytest.mark.parametrize(
    ("name", "data"),
    [("oracle", SHADES), ("vote", HOMES), ("balanced", HOMES), ("in-context", many(201))],
)
def test_unsupported_methods_raise_with_a_hint(name: str, data: Benchmark) -> None:
    with EMPTY() as knowledge, pytest.raises(SettingError) as raised:
        plan(RunConfig(methods=[name], shots=[1]), data, knowledge, settings(ScriptedGenerator([])))
    assert raised.value.hint


def test_default_methods_depend_on_the_benchmark() -> None:
    assert default_methods(HOMES) == ("zero-shot", "random", "oracle")
    assert default_methods(SHADES) == default_methods(many(1)) == LABEL_METHODS
    assert needs_search(["random"], many(1))
    assert not needs_search(["random", "oracle"], HOMES)
    assert needs_search(["random", "vote"], SHADES)


async def test_nearest_runs_once_and_knn_at_every_shot_count() -> None:
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        knowledge.add(SHADES.knowledge)
        names = ["vote", "vote-strict", "nearest", "knn"]
        planned = plan(
            RunConfig(methods=names, shots=[1, 2]),
            SHADES,
            knowledge,
            settings(ScriptedGenerator([])),
        )
        runs = [await evaluate(SHADES, method) for method in planned]
    config = RunConfig(methods=[*names, "vote", "logreg", "in-context"], shots=[1, 2])
    keys = method_keys(config, SHADES)
    assert keys[: len(planned)] == [method.key for method in planned]
    assert keys[len(planned) :] == [("logreg", 0), ("in-context", 4)]  # the largest episode
    shots = {name: [m.shots for m in planned if m.name == name] for name in names}
    assert shots == {"vote": [1, 2], "vote-strict": [1, 2], "nearest": [1], "knn": [1, 2]}
    assert all(result.n == len(SHADES.items) for result, _ in runs)


async def test_in_context_shows_the_shuffled_episode() -> None:
    data = episodic_benchmark(shots=4)
    script = ScriptedGenerator(lambda prompt: "a0")
    with EMPTY() as knowledge:
        [method] = plan(
            RunConfig(methods=["in-context"], shots=[5, 10]), data, knowledge, settings(script)
        )
        assert method.shots == 8
        orders = [await order(method, item.query) for item in data.items]
        assert orders[0] == await order(method, data.items[0].query)
    for item, ids in zip(data.items, orders, strict=True):
        own = {e.id for e in data.knowledge if e.tags["episode"] == item.tags["episode"]}
        assert set(ids) == own
        assert len(ids) == 8
    assert len(set(map(tuple, (ids for ids in orders[:2])))) == 2


async def test_oracle_reads_passages_and_scores_open_answers() -> None:
    script = ScriptedGenerator(answer_from_passages)
    with EMPTY() as knowledge:
        methods = plan(
            RunConfig(methods=["oracle", "random"], shots=[3]), HOMES, knowledge, settings(script)
        )
        oracle, rand = [
            (await evaluate(HOMES, method, RunConfig(concurrency=2)))[0] for method in methods
        ]
    assert (oracle.value, oracle.shots, oracle.invalid) == (1.0, 3, 0)
    assert rand.value is not None
    assert rand.value < 1
    turns = script.calls[0].prompt.messages
    assert [m.role for m in turns] == ["user"] * 4


def answer_from_passages(prompt: Prompt) -> str:
    """Return the answer of the image's item if a passage contains it."""
    *passages, question = [m.parts for m in prompt.messages]
    item = next(i for i in HOMES.items if i.query.images[0] == question[0])
    homes = [str(part).split()[-1] for (part,) in passages]
    return f"well\nAnswer: {item.answer}" if item.answer in homes else "unknown"


@pytest.mark.parametrize("name", ["swap-image", "swap-question"])
async def test_controls_keep_the_retrieved_examples(name: str) -> None:
    items = [
        replace(item, query=replace(item.query, text=f"Which, {i}?"))
        for i, item in enumerate(SHADES.items)
    ]
    data, script = replace(SHADES, items=tuple(items)), ScriptedGenerator(lambda prompt: "?")
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        knowledge.add(data.knowledge)
        planned = plan(
            RunConfig(methods=["visual-rag", name], shots=[2]), data, knowledge, settings(script)
        )
        plain, swapped = [(await method.answer(items[0].query)).trace for method in planned]
    assert plain is not None
    assert swapped is not None
    assert swapped.candidates == plain.candidates
    assert swapped.query == plain.query
    assert swapped.prompt.messages[:-1] == plain.prompt.messages[:-1]
    same_part = 1 if name == "swap-image" else 0
    parts = [t.prompt.messages[-1].parts for t in (plain, swapped)]
    assert parts[0][same_part] == parts[1][same_part]
    assert parts[0][1 - same_part] != parts[1][1 - same_part]


@pytest.mark.parametrize("name", ["swap-image", "swap-question", "visual-rag", "zero-shot"])
async def test_traces_record_the_method_and_the_sent_query(name: str) -> None:
    recorded: list[Trace] = []

    async def record(trace: Trace) -> None:
        recorded.append(trace)

    items = [
        replace(item, query=replace(item.query, text=f"Which, {i}?"))
        for i, item in enumerate(SHADES.items)
    ]
    data = replace(SHADES, items=tuple(items))
    traced = replace(settings(ScriptedGenerator(lambda prompt: "?")), record=record)
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        knowledge.add(data.knowledge)
        [method] = plan(RunConfig(methods=[name], shots=[2]), data, knowledge, traced)
        await method.answer(items[0].query)
    [trace] = recorded
    shots = "" if name == "zero-shot" else "2 shots, "
    assert trace.tier == f"{name}, {shots}shades"
    [image], text = trace.query.images, trace.query.text
    assert trace.prompt.messages[-1].parts == (image, text)
    assert (trace.query.id, trace.query.choices) == (items[0].query.id, items[0].query.choices)
    own = items[0].query
    assert (text != own.text, image != own.images[0]) == (
        name == "swap-question",
        name == "swap-image",
    )


async def order(method: Method, query: Query) -> list[str | None]:
    trace = (await method.answer(query)).trace
    assert trace is not None
    return [c.example.id for c in trace.candidates]
