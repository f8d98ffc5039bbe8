"""Ledger entry of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bottega.gateway.accounting.ledger_schema import Entry

ANSWERED = Entry(
    time=1000.0,
    request_id="4f1e2d",
    account="0123456789ab",
    namespace="a",
    tier="apprentice",
    model="qwen",
    state="answered",
    shots=2,
    similarity=0.83,
    prompt_tokens=1000,
    completion_tokens=30,
    cached_tokens=10,
    cost_usd=0.001,
    seconds=0.4,
    status=200,
)


def request_entry(**changes: Any) -> Entry:
    return replace(ANSWERED, **changes)
