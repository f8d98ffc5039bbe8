from __future__ import annotations

import pytest

from bottega.errors import GenerationError, RateLimitedError
from bottega.generation import Call, ScriptedGenerator
from bottega.types import Sampling
from tests.generation.prompts import ask, shown


async def test_a_function_replies_and_calls_are_recorded() -> None:
    model = ScriptedGenerator(
        lambda prompt: f"{len(prompt.messages)} turns", name="toy", latency=0.001
    )
    prompt, sampling = shown(1, 2), Sampling(n=2)
    reply = await model.generate(prompt, sampling)
    assert [one.text for one in reply.completions] == ["3 turns", "3 turns"]
    assert (reply.model, reply.usage.completion_tokens) == ("toy", 4)
    assert model.calls == [Call(prompt, sampling)]


async def test_a_sequence_replies_raises_and_ends() -> None:
    model = ScriptedGenerator(["a", "b", RateLimitedError("slow down")])
    reply = await model.generate(ask(), Sampling(n=2))
    assert [one.text for one in reply.completions] == ["a", "b"]
    with pytest.raises(RateLimitedError):
        await model.generate(ask(), Sampling())
    with pytest.raises(GenerationError, match="ended after") as caught:
        await model.generate(ask(), Sampling())
    assert caught.value.hint
    await model.aclose()
