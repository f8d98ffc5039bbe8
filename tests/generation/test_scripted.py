from __future__ import annotations

import pytest

from bottega.errors import GenerationError, RateLimitedError
from bottega.generation import Call, ScriptedGenerator
from bottega.types import Sampling
from tests.generation.prompts import ask, shown


async def test_a_function_answers_from_the_prompt_and_calls_are_kept() -> None:
    model = ScriptedGenerator(
        lambda prompt: f"{len(prompt.messages)} turns", name="toy", latency=0.001
    )
    prompt, sampling = shown(1, 2), Sampling(n=2)
    reply = await model.generate(prompt, sampling)
    assert [one.text for one in reply.completions] == ["3 turns", "3 turns"]
    assert (reply.model, reply.usage.completion_tokens) == ("toy", 4)
    assert model.calls == [Call(prompt, sampling)]


async def test_a_sequence_answers_fails_and_runs_out() -> None:
    model = ScriptedGenerator(["a", "b", RateLimitedError("slow down")])
    reply = await model.generate(ask(), Sampling(n=2))
    assert [one.text for one in reply.completions] == ["a", "b"]
    with pytest.raises(RateLimitedError):
        await model.generate(ask(), Sampling())
    with pytest.raises(GenerationError, match="run out") as caught:
        await model.generate(ask(), Sampling())
    assert caught.value.hint
    await model.aclose()
