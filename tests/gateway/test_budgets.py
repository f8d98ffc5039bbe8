"""Budgets under concurrent requests, and what requests cost whose clients leave early."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.metered import PRICE, Meter, metered
from tests.server import Server

SLOW = pytest.mark.slow
SPENDING = [
    (0.10, 24, None),
    (0.10, 24, 200),
    pytest.param(0.10, 96, None, marks=SLOW),
    pytest.param(0.10, 96, 200, marks=SLOW),
    pytest.param(0.50, 96, None, marks=SLOW),
    pytest.param(0.50, 96, 200, marks=SLOW),
]
# Clients, the seconds after which they leave, and the upstream's seconds for a token.
LEAVING = [(12, 0.1, 0.01), pytest.param(100, 1.0, 0.05, marks=SLOW)]


@pytest.mark.parametrize(("budget", "at_once", "limit"), SPENDING)
async def test_concurrent_requests_overshoot_a_budget_by_one_at_most(
    endpoint: Server, tmp_path: Path, budget: float, at_once: int, limit: int | None
) -> None:
    more = {} if limit is None else {"max_tokens": limit}
    meter = Meter(token_seconds=0.0, hidden_tokens=800)
    with metered(tmp_path, endpoint, budget, meter=meter) as found:
        await found.spend(at_once, **more)
        assert found.spent == pytest.approx(meter.tokens * PRICE)
        dearest = meter.dearest * PRICE
        print(f"{at_once} at once, budget {budget}: spent {found.spent:.4f}, dearest {dearest:.4f}")
        assert budget <= found.spent <= budget + dearest


@pytest.mark.parametrize(("at_once", "patience", "token_seconds"), LEAVING)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_ledger_counts_what_abandoned_requests_cost(
    endpoint: Server,
    tmp_path: Path,
    at_once: int,
    patience: float,
    token_seconds: float,
    stream: bool,
) -> None:
    meter = Meter(token_seconds=token_seconds, reply_tokens=(60, 120))
    with metered(tmp_path, endpoint, 100.0, meter=meter) as found:
        await found.ask(4, stream=stream, max_tokens=10)  # what this upstream counts is known
        await found.leave(at_once, patience, stream=stream)
        await found.settled(4 + at_once)
        rows = found.entries()
        assert [row[0] for row in rows].count(499) > at_once / 2
        assert all(row[3] for row in rows)
        tokens = sum(row[1] + row[2] for row in rows)
        print(f"{at_once} abandoned: ledger {tokens}, upstream {meter.tokens} tokens")
        assert tokens == pytest.approx(meter.tokens, rel=0.1)


async def test_a_call_that_may_not_be_finished_is_estimated(
    endpoint: Server, tmp_path: Path
) -> None:
    meter = Meter(token_seconds=0.01, reply_tokens=(60, 120))
    with metered(tmp_path, endpoint, 100.0, finish=0.0, meter=meter) as found:
        await found.ask(4, max_tokens=10)
        await found.leave(12, 0.1)
        await found.settled(16)
        tokens = sum(row[1] + row[2] for row in found.entries())
        assert tokens == pytest.approx(meter.tokens, rel=0.2)
