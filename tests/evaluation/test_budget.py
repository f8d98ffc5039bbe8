from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from bottega.errors import SettingError
from bottega.evaluation.config import RunConfig
from bottega.evaluation.outcomes import Budget, Method, Outcome, ScoredAnswer
from bottega.evaluation.runs.run_store import RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.types import Answer, Completion, Prompt, Query, Reply, Trace
from tests.evaluation.test_runner import BENCHMARK

OUTCOME = Outcome(Answer("a"))


def priced(cost_usd: float | None) -> Method:
    async def answer(query: Query) -> Outcome:
        final = Answer("a", labels=("a",))
        reply = Reply("m", (Completion("a"),))
        trace = Trace("t", 0.0, query, "m", (), Prompt(()), reply, final, 0.0, cost_usd)
        return Outcome(final, trace)

    return Method("m", 0, answer)


@pytest.mark.parametrize(("concurrency", "peak"), [(1, 3), (4, 3), (32, 3)])
async def test_run_stops_before_exceeding_the_budget(concurrency: int, peak: int) -> None:
    budget = Budget(0.35)
    config = RunConfig(concurrency=concurrency)
    result, scored = await evaluate(BENCHMARK, priced(0.1), config, RunState(budget=budget))
    assert 3 <= result.n == len(scored) <= peak
    assert budget.is_spent
    assert (result.missing, result.failed) == (10 - result.n, 0)
    assert result.cost_usd == pytest.approx(budget.spent)


async def test_earlier_spending_counts() -> None:
    state = RunState(budget=Budget(0.35, spent=0.2, highest_cost=0.1))
    result, _ = await evaluate(BENCHMARK, priced(0.1), RunConfig(concurrency=1), state)
    assert result.n == 1


async def test_free_items_do_not_lower_the_cost_estimate(tmp_path: Path) -> None:
    free, config = priced(0.0), RunConfig(concurrency=10)
    before = Budget(0.35, spent=0.1, highest_cost=0.1)
    await evaluate(BENCHMARK, free, config, RunState(budget=before))
    result, _ = await evaluate(BENCHMARK, priced(0.1), config, RunState(budget=before))
    assert result.n == 2
    with closing(RunStore.open(tmp_path, {"seed": 0}, BENCHMARK.items)) as ledger:
        await evaluate(BENCHMARK, free, config, RunState(ledger))
        item = BENCHMARK.items[0]
        await ledger.keep(
            priced(0.1), ScoredAnswer(0, item, Answer("a"), (1.0,), cost_usd=0.1), OUTCOME
        )
        assert ledger.spent() == (0.1, 0.1)


async def test_budget_requires_a_price() -> None:
    with pytest.raises(SettingError, match="price"):
        await evaluate(BENCHMARK, priced(None), state=RunState(budget=Budget(1.0)))
    result, _ = await evaluate(BENCHMARK, priced(None))
    assert (result.n, result.cost_usd) == (10, None)


@pytest.mark.parametrize("usd", [0, -1, float("nan")])
def test_budget_must_be_positive(usd: float) -> None:
    with pytest.raises(SettingError):
        Budget(usd)


async def test_budget_runs_the_first_item_alone() -> None:
    running, peak = 0, list[int]()
    cheap = priced(0.001)

    async def slow(query: Query) -> Outcome:
        nonlocal running
        running += 1
        peak.append(running)
        await asyncio.sleep(0.001)
        running -= 1
        return await cheap.answer(query)

    state = RunState(budget=Budget(1.0))
    await evaluate(BENCHMARK, Method("m", 0, slow), RunConfig(concurrency=3), state)
    assert (peak[:2], max(peak), len(peak)) == ([1, 1], 3, 10)
