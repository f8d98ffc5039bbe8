"""Budgets under concurrent requests, and costs of requests whose clients leave early."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import aiohttp
import openai
import pytest

from bottega.gateway.accounting.access import Limiter, LocalLimiter
from bottega.gateway.accounting.ledger_schema import Account
from bottega.generation import ScriptedGenerator
from bottega.parsing import decided_agreement
from bottega.protocols import Tier
from bottega.routing import BenefitGate, ShadowSampler
from bottega.types import Answer, Query, Usage
from tests.gateway.harness import Harness, harness, raw, user_messages
from tests.gateway.metered_gateway import PRICE, Meter, metered
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
    with metered(tmp_path, endpoint, budget, meter=meter) as server:
        await server.spend(at_once, **more)
        assert server.spent == pytest.approx(meter.tokens * PRICE)
        max_cost = meter.max_tokens * PRICE
        print(f"{at_once} at once, budget {budget}: spent {server.spent:.4f}, max {max_cost:.4f}")
        assert budget <= server.spent <= budget + max_cost


async def test_prompts_in_other_scripts_respect_the_budget(
    endpoint: Server, tmp_path: Path
) -> None:
    """In Chinese each character is a token, so estimates for English are too low."""
    text = "請描述這張照片中的標誌所寫的文字" * 60
    meter = Meter(token_seconds=0.01)
    with metered(tmp_path, endpoint, 0.10, meter=meter) as server:
        await server.ask(5, max_tokens=10)
        async with aiohttp.ClientSession() as session:
            turns = ([{"role": "user", "content": f"{n} {text}"}] for n in range(24))
            await asyncio.gather(
                *(server.read(session, 0, messages=[*turn], max_tokens=10) for turn in turns)
            )
        assert 0 < server.spent <= 0.10 + meter.max_tokens * PRICE


@pytest.mark.parametrize(("at_once", "patience", "token_seconds"), LEAVING)
@pytest.mark.parametrize("stream", [False, True])
async def test_ledger_counts_the_cost_of_abandoned_requests(
    endpoint: Server,
    tmp_path: Path,
    at_once: int,
    patience: float,
    token_seconds: float,
    stream: bool,
) -> None:
    meter = Meter(token_seconds=token_seconds, reply_tokens=(60, 120))
    with metered(tmp_path, endpoint, 100.0, meter=meter) as server:
        await server.ask(4, stream=stream, max_tokens=10)  # fits the estimates to this upstream
        await server.leave(at_once, patience, stream=stream)
        await server.settled(4 + at_once)
        rows = server.entries()
        assert [row[0] for row in rows].count(499) > at_once / 2
        assert all(row[3] for row in rows)
        tokens = sum(row[1] + row[2] for row in rows)
        print(f"{at_once} abandoned: ledger {tokens}, upstream {meter.tokens} tokens")
        assert tokens == pytest.approx(meter.tokens, rel=0.1)


async def test_cost_of_a_cancelled_call_is_estimated(endpoint: Server, tmp_path: Path) -> None:
    meter = Meter(token_seconds=0.01, reply_tokens=(60, 120))
    with metered(tmp_path, endpoint, 100.0, finish=0.0, meter=meter) as server:
        await server.ask(4, max_tokens=10)
        await server.leave(12, 0.1)
        await server.settled(16)
        tokens = sum(row[1] + row[2] for row in server.entries())
        assert tokens == pytest.approx(meter.tokens, rel=0.2)


class SpendingStub:
    """Ledger stub that reports the spending of a key."""

    usd = 0.0

    def spent_this_month(self, account: str, /) -> float:
        return self.usd


def limited(server: Harness, budget: float) -> Limiter:
    """Return tiers: a master call costs one dollar, an apprentice call one cent."""
    account = Account("a", "a", usd_per_month=budget)
    limiter = LocalLimiter(SpendingStub())
    server.gateway.limiter = limiter
    server.gateway.authenticate = lambda token: account
    server.gateway.finalizer = replace(server.gateway.finalizer, price=price)
    assert server.gateway.shadow is not None
    server.gateway.shadow.finalizer = server.gateway.finalizer
    return limiter


def price(model: str, usage: Usage) -> float:
    return 1.0 if model == "big" else 0.01


def test_unaffordable_escalation_keeps_the_first_answer(tmp_path: Path) -> None:
    async def unsure(query: Query, tier: Tier, answer: Answer, /) -> Tier | None:
        return Tier("master", tier.generator) if tier.name == "apprentice" else None

    master = ScriptedGenerator(lambda prompt: "seven", name="big")
    with harness(
        tmp_path,
        master=master,
        change=lambda pipeline: replace(pipeline, escalate=unsure),
        fallback="never",
    ) as server:
        limiter = limited(server, 1.5)
        other = limiter.reservation(Account("a", "a", usd_per_month=1.5))
        asyncio.run(other.reserve(0.6))
        reply = raw(server, user_messages(1))
        record = server.wait(1)
        assert reply.headers["x-bottega-route"] == "apprentice"
        assert (record.cost_usd, master.calls) == (0.01, [])
        other.release()
        assert raw(server, user_messages(2)).headers["x-bottega-route"] == "master"
        assert server.wait(2).cost_usd == 1.01


def test_request_above_the_remaining_budget_is_delayed(tmp_path: Path) -> None:
    with harness(tmp_path, master=ScriptedGenerator(lambda prompt: "seven", name="big")) as server:
        limiter = limited(server, 1.5)
        raw(server, user_messages(1), "bottega/master")
        reservation = server.wait(1).reservation
        assert reservation is not None and reservation.usd == 1.0
        reservation.release()
        other = limiter.reservation(Account("a", "a", usd_per_month=1.5))
        asyncio.run(other.reserve(0.6))
        for more in ({}, {"stream": True}):
            with pytest.raises(openai.RateLimitError) as refused:
                raw(server, user_messages(2), "bottega/master", **more)
            assert refused.value.code == "rate_limit_exceeded"
            assert refused.value.response.headers["retry-after"] == "1"
        again = raw(server, user_messages(1), "bottega/master")
        assert again.headers["x-bottega-cache"] == "replayed"  # which costs nothing
        server.wait(4)
        assert {one.route for one in server.records if one.status == 429} == {""}  # not a tier's


def test_unaffordable_shadow_sample_is_skipped(tmp_path: Path) -> None:
    shadow = ShadowSampler(BenefitGate(), decided_agreement, rate=1.0)
    with harness(
        tmp_path,
        master=ScriptedGenerator(lambda prompt: "seven", name="big"),
        customize=lambda tenant: replace(tenant, shadow=shadow),
    ) as server:
        raw(server, user_messages(100), "bottega/master")
        limiter = limited(server, 1.5)
        other = limiter.reservation(Account("a", "a", usd_per_month=1.5))
        asyncio.run(other.reserve(0.6))
        assert raw(server, user_messages(1)).headers["x-bottega-route"] == "apprentice"
        server.wait(4)
    samples = [one for one in server.records if one.state == "shadow"]
    assert {(one.route, one.status, one.cost_usd) for one in samples} == {
        ("apprentice", 200, 0.01),
        ("master", 429, 0.0),
    }
    assert shadow.summary().failed == 1
