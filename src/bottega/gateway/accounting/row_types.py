"""Rows of the gateway's tables. The fields of these dataclasses declare the columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from bottega.parsing import COMPARISON_RULES

MAX_USD = 1e12
MAX_COUNT = 2**40  # so daily sums stay below 2**63
MAX_REASON = 300  # characters


def storable_text(text: str) -> str:
    """Return the text with NUL and lone surrogates replaced, which the databases reject."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def dollars(cost: float | None) -> float | None:
    """Return the cost, None if it is negative, NaN or too large: one infinite cost would use up
    every budget."""
    return cost if cost is not None and 0 <= cost < MAX_USD else None


def _reason(text: str) -> str:
    return storable_text(text[:MAX_REASON])


def _dollars_or_zero(cost: float) -> float:
    return dollars(cost) or 0.0


def _count(number: int) -> int:
    return min(max(number, 0), MAX_COUNT)


def _finite(number: float | None) -> float | None:
    return float(number) if number is not None and math.isfinite(number) else None


def _finite_or_zero(number: float) -> float:
    return _finite(number) or 0.0


def _seconds(number: float) -> float:
    return min(max(0.0, _finite_or_zero(number)), 1e9)  # sums must stay finite


# Values from upstreams are changed to acceptable ones, since one value that a database rejects
# would fail the whole batch.
Text = Annotated[str, storable_text]
OptionalText = Annotated[str | None, storable_text]
Count = Annotated[int, _count]
Number = Annotated[float, _finite_or_zero]
OptionalNumber = Annotated[float | None, _finite]
# A shadow is an extra call after an answer, made to measure the demonstrations. It has a cost but
# is not a client's request. A counted request asked for its number of tokens, not for an answer.
State = Literal["answered", "replayed", "passed_through", "failed", "shadow", "counted"]


@dataclass(slots=True)  # not frozen: a frozen instance takes three times as long to create
class Entry:
    """Ledger entry of one request. `cost_usd` is None if the price is unknown; it includes
    `dismissed_usd`, the cost of tiers whose answers were escalated. `similarity` is that of the
    nearest example found, shown or not, None without a retrieval or a candidate. `variant` is that
    of an experiment, such as "more-shots:b". `reason` states why this tier was selected, and why
    the request failed or passed through. `time` is in unix seconds. `id` is set by stores that
    several gateways share."""

    time: float
    request_id: Text
    account: Text
    namespace: Text
    tier: Text
    model: Text
    state: State
    shots: Count = 0
    similarity: OptionalNumber = None
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0
    cost_usd: Annotated[float | None, dollars] = None
    seconds: Annotated[float, _seconds] = 0.0
    status: Count = 200
    dismissed_usd: Annotated[float, _dollars_or_zero] = 0.0
    id: str = ""
    variant: Text = ""
    reason: Annotated[str, _reason] = ""


@dataclass(frozen=True, slots=True)
class ShadowSample:
    """Shadow sample: the agreement of an answer with the master's, from 0 to 1, with and without
    demonstrations, None if the comparison's `rules`, a version, leave it undecided. The client's
    answer had demonstrations if `was_shown`. `retrieve` is the retrieval method, "none" if the
    question had no demonstrations. A `sampled` answer was served, and its question was drawn at
    random; the others were measured for the gate alone. `judge` is the version of the judge's
    instruction, 0 if no judge was asked. `id` is that of an entry."""

    time: float
    request_id: Text
    namespace: Text
    similarity: Number
    with_score: OptionalNumber
    without_score: OptionalNumber
    id: str = ""
    retrieve: Text = ""
    sampled: bool = True
    was_shown: bool = True
    rules: Count = COMPARISON_RULES
    judge: Count = 0


@dataclass(frozen=True)
class Feedback:
    """Feedback of one account on one request. `rating` is from 0 to 1; `example` is the id of the
    demonstration that the correction became."""

    time: float
    request_id: Text
    account: Text
    namespace: Text
    tier: Text
    rating: float | None = None
    correction: OptionalText = None
    comment: OptionalText = None
    example: OptionalText = None


@dataclass(frozen=True)
class Account:
    """Account of one key. `requests_per_minute` and `usd_per_month` are None if unlimited. For
    `max_concurrent`, `tiers` (tiers that the key may choose, "*" for all) and `max_namespaces`
    (below its own), None means the gateway's default. Times are unix seconds; `revoked` is None
    until the key is revoked, `expires` if it never expires. A `viewer` sees everything in the
    console, changes nothing and sends no requests."""

    id: str
    name: str
    namespace: str = ""
    admin: bool = False
    can_store: bool = True
    requests_per_minute: int | None = None
    usd_per_month: float | None = None
    created: float = 0.0
    revoked: float | None = None
    max_concurrent: int | None = None
    tiers: tuple[str, ...] | None = None
    max_namespaces: int | None = None
    expires: float | None = None
    viewer: bool = False

    def is_valid(self, moment: float) -> bool:
        return self.revoked is None and (self.expires is None or moment < self.expires)


@dataclass(frozen=True)
class DailySums:
    """Sums over the entries of one day with the same namespace, tier, state and shots. A request
    that failed by the client's error is `rejected`; the rate limit of a tier is no such error.
    `day` counts days since 1970; `priced` counts requests with a known cost, `compared` those with
    a `similarity`. `net_usd` excludes the cost of dismissed tiers; `net_usd_squared` is the sum of
    its squares."""

    day: int
    namespace: str
    tier: str
    state: str
    shots: int
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_usd: float
    priced: int
    seconds: float
    similarity: float
    compared: int
    net_usd: float
    net_usd_squared: float
