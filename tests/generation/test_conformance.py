"""What every generator promises."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from bottega.generation import (
    OpenAIGenerator,
    ReplayGenerator,
    ScriptedGenerator,
    TransformersGenerator,
)
from bottega.protocols import Generator
from bottega.types import Reply, Sampling
from tests.generation.prompts import ask, shown
from tests.server import Server


@pytest.fixture(params=["scripted", "replay", "endpoint", "local"])
def generator(
    request: pytest.FixtureRequest, endpoint: Server, folders: dict[str, Path], tmp_path: Path
) -> Generator:
    def words() -> Generator:
        return ScriptedGenerator(lambda prompt: "word", latency=0.01)

    parts: dict[str, Generator] = {
        "scripted": words(),
        "replay": ReplayGenerator(tmp_path / "record.jsonl", words()),
        "endpoint": OpenAIGenerator("m", base_url=endpoint.url),
        "local": TransformersGenerator(folders["fast_vlm"]),
    }
    return parts[request.param]


async def test_the_reply_has_the_requested_number_of_completions(generator: Generator) -> None:
    for n in (1, 3):
        start = time.perf_counter()
        reply = await generator.generate(shown(1, 2), Sampling(0.5, 3, n))
        assert len(reply.completions) == n
        assert reply.model == generator.name
        assert reply.usage.prompt_tokens > 0
        assert reply.usage.completion_tokens >= n
        assert 0 < reply.seconds < time.perf_counter() - start + 0.001
    await generator.aclose()


async def test_concurrent_requests_survive_a_cancellation(generator: Generator) -> None:
    flights = [
        asyncio.create_task(generator.generate(ask(f"number {i}"), Sampling(max_tokens=3)))
        for i in range(12)
    ]
    await asyncio.sleep(0)
    flights[5].cancel()
    replies = await asyncio.gather(*flights, return_exceptions=True)
    for i, reply in enumerate(replies):
        assert isinstance(reply, asyncio.CancelledError if i == 5 else Reply)
    await generator.aclose()
    await generator.aclose()


def test_successive_event_loops_share_a_generator(generator: Generator) -> None:
    for _ in range(3):
        reply = asyncio.run(generator.generate(shown(1), Sampling(max_tokens=2)))
        assert reply.completions
    asyncio.run(generator.aclose())
