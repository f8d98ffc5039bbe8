from __future__ import annotations

import pytest

from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.methods import plan
from bottega.evaluation.outcomes import Method
from bottega.evaluation.runner import Conditions, evaluate
from bottega.evaluation.searches import SEARCHED, most_calls
from bottega.evaluation.tally import Result
from bottega.generation import Scripted
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.prompting import Interleaved
from bottega.recipes import Classification
from bottega.types import Prompt
from tests.builders import example

ROLLOUTS = 4
ANIMALS = ("cat", "dog", "cow")
KNOWN = tuple(example(ANIMALS[i % 3], 40 * i) for i in range(12))
ASKED = tuple(example(ANIMALS[i % 3], 7 + 300 * i) for i in range(3))
DATA = Benchmark("animals", KNOWN, ASKED, ANIMALS)


class Brief(Scripted):
    turns_only = True


def last_shown(prompt: Prompt) -> str:
    said = [message.parts[-1] for message in prompt.messages if message.role == "assistant"]
    return str(said[-1]) if said else "unknown"


async def run(name: str, script: Scripted, samples: int | None = None) -> tuple[Method, Result]:
    settings = Classification(script, ANIMALS, prompt=Interleaved())
    with KnowledgeBase.open(":memory:", embed=PixelEmbedder()) as knowledge:
        knowledge.add(DATA.knowledge)
        names = ["rcts", name] if name == "majority" else [name]
        planned = plan(
            names, [2], DATA, knowledge, settings, seed=0, samples=samples, rollouts=ROLLOUTS
        )
        result, _ = await evaluate(DATA, planned[-1], Conditions(concurrency=1))
    return planned[-1], result


@pytest.mark.parametrize("name", SEARCHED)
async def test_what_a_search_asks_is_counted_and_limited(name: str) -> None:
    script = Brief(last_shown)
    method, result = await run(name, script)
    assert (method.name, result.n, result.shots) == (name, 3, 2)
    sampled = sum(call.sampling.n for call in script.calls)
    assert result.calls == sampled > 3
    assert sampled <= 3 * most_calls(script, ROLLOUTS)
    assert result.prompt_tokens > 0
    everything = sum(len(words(call.prompt)) for call in script.calls)
    assert result.prompt_tokens >= everything


def words(prompt: Prompt) -> list[str]:
    texts = [part for m in prompt.messages for part in m.parts if isinstance(part, str)]
    return " ".join(texts).split()


async def test_the_majority_beside_a_search_gets_its_budget_unless_told_otherwise() -> None:
    script = Brief(last_shown)
    await run("majority", script)
    assert script.calls[-1].sampling.n == most_calls(script, ROLLOUTS) == 1 + 4 + 15
    await run("majority", script, samples=3)
    assert script.calls[-1].sampling.n == 3


def test_a_model_that_reasons_is_asked_about_its_reasons_as_well() -> None:
    assert most_calls(Scripted([]), 10) == 111
    assert most_calls(Brief([]), 10) == 26
