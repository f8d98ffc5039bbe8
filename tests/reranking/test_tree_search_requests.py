from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bottega.errors import GenerationError
from bottega.generation import ScriptedGenerator
from bottega.reranking import TreeSearch
from bottega.types import Prompt, Reply, Sampling
from tests.reranking.tiny_search import QUERY, candidates, opinion, rcts


class DelayedGenerator(ScriptedGenerator):
    """Generator with a pseudo-random delay for each reply."""

    def __init__(self, replies: Callable[[Prompt], str], salt: int) -> None:
        super().__init__(replies)
        self._salt = salt

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        for _ in range(hash((prompt, self._salt)) % 40):
            await asyncio.sleep(0)
        return await super().generate(prompt, sampling)


@pytest.mark.parametrize("budget", [None, 70])
async def test_result_does_not_depend_on_reply_order(budget: int | None) -> None:
    def search(model: ScriptedGenerator) -> TreeSearch:
        return rcts(model, parallel=4, max_calls=budget)

    expected = await search(ScriptedGenerator(opinion)).search(QUERY, candidates(20), 3)
    for salt in range(5):
        assert (
            await search(DelayedGenerator(opinion, salt)).search(QUERY, candidates(20), 3)
            == expected
        )


class SequentialGenerator(ScriptedGenerator):
    """Generator that answers one request at a time."""

    def __init__(self, replies: Callable[[Prompt], str], latency: float) -> None:
        super().__init__(replies, latency=latency)
        self._turn = asyncio.Semaphore(1)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        async with self._turn:
            return await super().generate(prompt, sampling)


class WaveGenerator(ScriptedGenerator):
    """Generator that answers all waiting requests together, once the search sends no more."""

    waves = 0
    _wave: asyncio.Task[None] | None = None

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if self._wave is None:
            self._wave = asyncio.create_task(self._end_wave())
        await self._wave
        return await super().generate(prompt, sampling)

    async def _end_wave(self) -> None:
        for _ in range(100):
            await asyncio.sleep(0)
        self._wave = None
        self.waves += 1


@pytest.mark.parametrize(("parallel", "waves"), [(4, 6), (1, 18)])
async def test_many_requests_are_sent_at_once(parallel: int, waves: int) -> None:
    """K=3, N=20, P=10, N_s=N_m=5: 71 requests in 6 waves (11.8x) or, in the paper's order, 18."""
    model = WaveGenerator(opinion)
    found = await rcts(model, parallel=parallel).search(QUERY, candidates(20), 3)
    slow = SequentialGenerator(opinion, latency=0.0)
    assert await rcts(slow, parallel=parallel).search(QUERY, candidates(20), 3) == found
    assert len(slow.calls) == len(model.calls) == 1 + 10 * 7
    assert found.tree is not None
    assert (found.tree.requests, found.tree.calls) == (71, 1 + 10 * 11)
    assert model.waves == waves


async def test_identical_probes_are_requested_once() -> None:
    """Without rationales, branches with the same answer (one of 3) have the same probes."""
    model = ScriptedGenerator(lambda prompt: opinion(prompt)[-1])
    found = await rcts(model).search(QUERY, candidates(20), 3)
    assert found.tree is not None
    assert found.tree.root.visits == 10
    assert found.tree.requests == len({(call.prompt, call.sampling) for call in model.calls})
    assert found.tree.requests <= 11 + 3 * 5


class FailingGenerator(ScriptedGenerator):
    def __init__(self, position: int) -> None:
        super().__init__(opinion)
        self._position = position

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if len(self.calls) == self._position:
            raise GenerationError("the endpoint failed")
        return await super().generate(prompt, sampling)


@pytest.mark.parametrize(("parallel", "budget"), [(1, None), (4, 500)])
async def test_a_failing_endpoint_is_neither_a_reward_nor_an_answer(
    parallel: int, budget: int | None
) -> None:
    for position in range(71):
        search = rcts(FailingGenerator(position), parallel=parallel, max_calls=budget)
        with pytest.raises(GenerationError, match="the endpoint failed"):
            await search.search(QUERY, candidates(20), 3)
