"""Output tokens that a call reserves after the replies to earlier calls."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bottega.gateway.accounting.accounts import Account
from bottega.gateway.accounting.estimates import TokenEstimates
from bottega.gateway.accounting.limiter import Limiter
from bottega.gateway.billing import Bill
from bottega.gateway.door import Progress
from bottega.gateway.ports import Call, Served
from bottega.gateway.requests import BACKGROUND, read_chat
from bottega.generation import Scripted
from bottega.protocols import Tier
from bottega.types import Usage
from tests.gateway.test_abandoned import Late

TIER = Tier("large", Scripted(lambda prompt: "seven"))


class Unspent:
    def spent_this_month(self, account: str, /) -> float:
        return 0.0


@pytest.fixture
def bill() -> Bill:
    chat = read_chat(
        {"messages": [{"role": "user", "content": "hi"}]}, background=re.compile(BACKGROUND)
    )
    account = Account("a", "a", usd_per_month=1e12)
    progress = Progress("r", account=account, hold=Limiter(Unspent()).hold(account))
    return Bill(progress, chat, lambda model, usage: usage.completion_tokens, TokenEstimates())


def call(**fields: Any) -> Call:
    return Call(Served(TIER, Late(), output_tokens=1000), fields)


def reserved(bill: Bill, **fields: Any) -> float:
    hold = bill.progress.hold
    assert hold is not None
    bill.reserve(call(**fields))
    reserved = hold.reserved
    hold.settle(0.0)
    return reserved


def test_a_long_reply_raises_later_reservations_per_choice(bill: Bill) -> None:
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
