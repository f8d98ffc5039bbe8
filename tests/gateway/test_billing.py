"""Output tokens that a call reserves after the replies to earlier calls."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from bottega.gateway.accounting.access import LocalLimiter
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.ports import RequestRecord, ServedTier, TierCapabilities, UpstreamCall
from bottega.gateway.request.bill import (
    UNSEEN_PROMPT,
    Bill,
    TokenEstimates,
    allowed_output,
    expected_tokens,
)
from bottega.gateway.request.jobs import fitting
from bottega.generation import ScriptedGenerator
from bottega.openai_api.request import parse_request
from bottega.protocols import Tier
from bottega.types import Candidate, Example, Query, Usage
from tests.gateway.test_disconnects import LateUpstream

TIER = Tier("large", ScriptedGenerator(lambda prompt: "seven"))


class UnspentBudget:
    def spent_this_month(self, account: str, /) -> float:
        return 0.0


@pytest.fixture
def bill() -> Bill:
    chat = parse_request({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    account = Account("a", "a", usd_per_month=1e12)
    record = RequestRecord(
        "r", account=account, reservation=LocalLimiter(UnspentBudget()).reservation(account)
    )
    return Bill(record, chat, lambda model, usage: usage.completion_tokens, TokenEstimates())


def call(**fields: Any) -> UpstreamCall:
    return UpstreamCall(ServedTier(TIER, LateUpstream(), output_tokens=1000), fields)


def reserved(bill: Bill, **fields: Any) -> float:
    reservation = bill.record.reservation
    assert reservation is not None
    asyncio.run(bill.reserve(call(**fields)))
    reserved = reservation.reserved
    reservation.settle(0.0)
    return reserved


def test_free_call_needs_no_reservation(bill: Bill) -> None:
    """A reservation would cost a round trip to the server that stores it."""
    reservation = bill.record.reservation
    assert reservation is not None
    reservations: list[float] = []

    async def reserve(usd: float) -> None:
        reservations.append(usd)

    reservation.reserve = reserve  # type: ignore[method-assign]
    for usd in (0.0, 0.5, None):  # an unknown price is not known to be free
        asyncio.run(replace(bill, price=lambda model, usage, usd=usd: usd).reserve(call()))
    assert reservations == [0.5, 0.0]


def test_long_reply_raises_later_reservations_per_choice(bill: Bill) -> None:
    bill.paid(call(n=4), Usage(10, 8000))
    assert reserved(bill) == 2000
    assert reserved(bill, n=3) == 6000
    assert reserved(bill, n=3, max_tokens=10) == 30


def test_short_replies_lower_the_reservations_again(bill: Bill) -> None:
    bill.paid(call(), Usage(10, 3000))
    for _ in range(30):
        bill.paid(call(), Usage(10, 5))
    assert reserved(bill) == 1000


def test_one_reply_cannot_raise_reservations_without_bound(bill: Bill) -> None:
    bill.paid(call(), Usage(10, 10**9))
    assert reserved(bill) == 8000


def test_min_tokens_raises_the_reservation(bill: Bill) -> None:
    """Servers generate at least this many tokens for each choice."""
    assert reserved(bill, min_tokens=100_000) == 100_000
    assert reserved(bill, min_tokens=100_000, n=2) == 200_000
    assert reserved(bill, min_tokens=5) == 1000
    assert reserved(bill, min_tokens=5, max_tokens=10) == 10


@pytest.mark.parametrize(("text", "least"), [("x" * 35_000, 10_000), ("\u732b" * 1000, 3000)])
def test_prediction_is_reserved_as_output(bill: Bill, text: str, least: int) -> None:
    """Rejected predictions are charged as completion tokens."""
    prediction = {"type": "content", "content": text}
    assert least + 10 <= reserved(bill, max_tokens=10, prediction=prediction) <= 1.2 * least
    assert reserved(bill, max_tokens=10, prediction=None) == 10


def prompt_bill(text: str, estimates: TokenEstimates) -> Bill:
    """Return a bill that counts only prompt tokens."""
    chat = parse_request({"model": "m", "messages": [{"role": "user", "content": text}]})
    account = Account("a", "a", usd_per_month=1e12)
    record = RequestRecord(
        "r", account=account, reservation=LocalLimiter(UnspentBudget()).reservation(account)
    )
    return Bill(record, chat, lambda model, usage: usage.prompt_tokens, estimates)


@pytest.mark.parametrize(
    ("text", "tokens", "most"),
    [("ш" * 900_000, 1_500_000, 100), ("#" * 900_000, 900_000, 1 + UNSEEN_PROMPT)],
    ids=["outside ascii", "ascii"],
)
def test_long_prompt_does_not_raise_reservations_of_short_prompts(
    text: str, tokens: int, most: int
) -> None:
    estimates = TokenEstimates()
    prompt_bill(text, estimates).paid(call(), Usage(tokens, 1))
    assert reserved(prompt_bill("hello", estimates)) <= most


def test_text_outside_ascii_is_reserved_once() -> None:
    """Its bytes cover its tokens, so they must not raise the reservation of the text again."""
    estimates = TokenEstimates()
    one = prompt_bill("\u732b" * 350, estimates)
    one.paid(call(), Usage(400, 1))
    assert reserved(one) == 100 + 1050
    assert estimates.prompt("late", 100) == 400


def test_text_outside_ascii_does_not_raise_the_bills_of_abandoned_calls() -> None:
    estimates = TokenEstimates()
    prompt_bill("ш" * 900_000, estimates).paid(call(), Usage(1_500_000, 1))
    other = prompt_bill("a" * 35_000, estimates)
    other.cut_off(call(), 0.0)
    assert other.record.usage.prompt_tokens == 10_000


@pytest.mark.parametrize(("context", "tokens"), [(None, 1000), (500, 500), (5000, 1000)])
def test_output_is_limited_by_the_context(context: int | None, tokens: int) -> None:
    served = ServedTier(TIER, LateUpstream(), TierCapabilities(context=context), output_tokens=1000)
    assert allowed_output(UpstreamCall(served, {})) == tokens
    assert allowed_output(UpstreamCall(served, {"n": 3})) == 3 * tokens
    assert allowed_output(UpstreamCall(served, {"max_tokens": 10})) == 10
    assert (
        allowed_output(UpstreamCall(served, {"max_tokens": 10, "max_completion_tokens": 20})) == 20
    )
    assert allowed_output(UpstreamCall(served, {}), 900) == tokens
    assert allowed_output(UpstreamCall(served, {}), 2000) == min(2000, context or 2000)


def test_demonstrations_are_expected_at_their_length() -> None:
    chat = parse_request({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    shown = [Candidate(Example(Query("abcdefg"), answer), 1.0) for answer in ("1234567", "123456")]
    assert expected_tokens(chat, []) == chat.prompt_tokens
    assert expected_tokens(chat, shown[:1]) == chat.prompt_tokens + 4  # of 3.5 characters
    assert expected_tokens(chat, shown) == chat.prompt_tokens + 8


def test_demonstrations_leave_room_for_the_reply() -> None:
    message = {"role": "user", "content": "a question of some length"}
    chat = parse_request({"model": "m", "messages": [message], "max_tokens": 10})
    shown = [Candidate(Example(Query("abcdefg"), "1234567"), 1.0)]
    needed = expected_tokens(chat, shown) + 10
    assert fitting(shown, chat, TierCapabilities(context=needed)) == shown
    assert fitting(shown, chat, TierCapabilities(context=needed - 1)) == []


def test_output_is_limited_by_the_tier() -> None:
    served = ServedTier(TIER, LateUpstream(), max_tokens=50)
    assert allowed_output(UpstreamCall(served, {"n": 2}), 2000) == 100
    assert allowed_output(UpstreamCall(served, {"max_tokens": 70})) == 70


def test_call_without_a_price_reserves_nothing(bill: Bill) -> None:
    bill.price = lambda model, usage: None
    assert reserved(bill) == 0
    bill.paid(call(), Usage(10, 5))
    assert bill.record.cost_usd is None
    bill.price = lambda model, usage: 1.0
    bill.paid(call(), Usage(10, 5))
    assert bill.record.cost_usd is None  # one unknown part makes the sum unknown


def test_default_is_one_choice(bill: Bill) -> None:
    for fields in ({}, {"n": None}, {"n": 1}):
        assert reserved(bill, max_tokens=10, **fields) == 10


def test_bill_names_the_last_tier_and_demonstrations(bill: Bill) -> None:
    shown = (Candidate(Example(Query("q"), "a"), 1.0),) * 2
    bill.paid(replace(call(), shown=shown), Usage(10, 5))
    record = bill.record
    assert (record.route, record.shots, record.usage) == ("large", 2, Usage(10, 5))
    assert record.cost_usd == 5.0
    bill.paid(call(), Usage(1, 2))
    assert (record.shots, record.usage, record.cost_usd) == (0, Usage(11, 7), 7.0)
