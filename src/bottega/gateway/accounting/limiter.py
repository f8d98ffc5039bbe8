"""Limits of an account: concurrency, tiers, namespaces, request rate and monthly cost."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from bottega.gateway.accounting.ledger_schema import Account
from bottega.openai_api.errors import ApiError
from bottega.types import Usage

# Until an upstream has reported a usage, its tokenizer, chat template and image token counts are
# unknown: a short prompt may count a thousand tokens. Later, this limits how much one prompt
# adds to the reservations of all others.
UNSEEN_PROMPT = 8192
UNSEEN_FACTOR = 4
TOKENS_PER_SECOND = 50.0
DECAY = 0.95  # factor on the sums of earlier calls at each new call


@dataclass
class _PromptSums:
    """Decaying sums over the texts, or the images, of the prompts of one model."""

    expected: float = 0.0
    bound: float = 0.0
    prompt: float = 0.0

    def add(self, expected: float, bound: float, prompt: float) -> None:
        self.expected = self.expected * DECAY + expected
        self.bound = self.bound * DECAY + bound
        self.prompt = self.prompt * DECAY + max(0.0, prompt)

    @property
    def ratio(self) -> float:
        return self.prompt / self.expected if self.expected else 1.0

    @property
    def max_ratio(self) -> float:
        return max(1.0, self.prompt / self.bound) if self.bound else 1.0


@dataclass
class _UsageSums:
    """Decaying sums over the calls to one model. The tokens of `images` are those that the texts of
    their prompts leave."""

    text: _PromptSums = field(default_factory=_PromptSums)
    images: _PromptSums = field(default_factory=_PromptSums)
    shortfall: float = 0.0
    completion: float = 0.0
    seconds: float = 0.0
    longest: float = 0.0


class TokenEstimates:
    """Token estimates per model, corrected by the usage that its upstream has reported.

    `expected` is the estimate of the prompt's tokens from its characters and images, which fits
    English; `image_tokens` are those of its images, whose true number differs by model. Prompts
    without images correct the text, the others the images. `non_ascii_bytes` are the UTF-8 bytes of
    the prompt's text outside ASCII. Byte-level tokenizers need at most one token per byte.
    """

    def __init__(self) -> None:
        self._models: defaultdict[str, _UsageSums] = defaultdict(_UsageSums)

    def update(
        self,
        model: str,
        expected: int,
        usage: Usage,
        seconds: float | None = None,
        *,
        choices: int = 1,
        non_ascii_bytes: int = 0,
        image_tokens: int = 0,
    ) -> None:
        """Update the estimates. `seconds` is the time of a complete reply, None for a stream;
        `choices` share the completion tokens."""
        one = self._models[model]
        bound = expected + non_ascii_bytes
        if image_tokens:
            left = usage.prompt_tokens - (expected - image_tokens) * one.text.ratio
            one.images.add(image_tokens, image_tokens + non_ascii_bytes, left)
        else:
            one.text.add(expected, bound, usage.prompt_tokens)
        shortfall = min(usage.prompt_tokens - bound, UNSEEN_PROMPT)
        one.shortfall = max(one.shortfall * DECAY, shortfall)
        # Maxima decay too: one odd reply must not raise all later reservations.
        one.longest = max(one.longest * DECAY, usage.completion_tokens / choices)
        if seconds is not None:
            one.completion = one.completion * DECAY + usage.completion_tokens
            one.seconds = one.seconds * DECAY + seconds

    def prompt(self, model: str, expected: int, image_tokens: int = 0) -> int:
        """Return the most likely prompt token count."""
        one = self._models[model]
        text = expected - image_tokens
        return round(text * one.text.ratio + image_tokens * one.images.ratio)

    def max_prompt(
        self, model: str, expected: int, non_ascii_bytes: int, image_tokens: int = 0
    ) -> int:
        """Return a cautious upper estimate of the prompt tokens, for a reservation."""
        one = self._models[model]
        if not (one.images if image_tokens else one.text).expected:
            return max(UNSEEN_PROMPT, UNSEEN_FACTOR * expected) + non_ascii_bytes
        text = (expected - image_tokens) * one.text.max_ratio
        likely = text + image_tokens * one.images.max_ratio
        return round(max(likely, expected + one.shortfall)) + non_ascii_bytes

    def longest(self, model: str) -> int:
        """Return the completion tokens of the longest choice, which decays with each later call."""
        return math.ceil(self._models[model].longest)

    def generated(self, model: str, seconds: float) -> int:
        """Estimate the completion tokens of an unseen reply from its seconds of generation."""
        one = self._models[model]
        rate = one.completion / one.seconds if one.seconds else TOKENS_PER_SECOND
        return math.ceil(rate * seconds)


# Tolerates rounding of float sums: 0.1 + 0.2 must fit into a budget of 0.3.
ROUNDING = 1 + 1e-9


class Spending(Protocol):
    """Spending of each account in US dollars in this calendar month, UTC. Read at every request,
    so it must not block."""

    def spent_this_month(self, account: str, /) -> float: ...


@dataclass(slots=True)
class _TokenBucket:
    tokens: float
    at: float


class AccountBudgetError(ApiError):
    """The key's monthly budget does not allow another upstream call."""


class LimitsUnavailableError(AccountBudgetError):
    """A server that the limits of the key need does not answer."""


class Limiter(Protocol):
    """Token bucket and monthly budget of each account. A bucket holds a minute's requests: a rested
    account may send them all at once. Use it from one event loop.

    Every upstream call first reserves its expected cost. It is rejected unless the amount spent,
    the reservations of other requests and its own fit into the budget. A request is always admitted
    if no other request has a reservation and some budget is left. As long as no call costs more
    than its reservation, spending exceeds the budget by less than the cost of one request.
    """

    async def admit(self, account: Account) -> float | None:
        """Return None for an admitted request, else the seconds to wait. Raises
        `AccountBudgetError`."""
        ...

    async def reserve(self, reservation: Reservation, usd: float) -> None: ...

    def release(self, reservation: Reservation) -> None: ...

    def reservation(self, account: Account) -> Reservation:
        return Reservation(self, account)


class LocalLimiter(Limiter):
    """Limiter of one process, which keeps buckets and reservations in memory."""

    def __init__(self, spending: Spending, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spending = spending
        self._clock = clock
        self._buckets: dict[str, _TokenBucket] = {}
        self._reservations: defaultdict[str, set[Reservation]] = defaultdict(set)

    async def admit(self, account: Account) -> float | None:
        # First: a request whose budget is spent takes no token from the bucket.
        if account.usd_per_month is not None:
            self._check_spent(account, 0.0)
        if (limit := account.requests_per_minute) is None:
            return None
        now = self._clock()
        bucket = self._buckets.setdefault(account.id, _TokenBucket(limit, now))
        bucket.tokens = min(limit, bucket.tokens + (now - bucket.at) * limit / 60)
        bucket.at = now
        if bucket.tokens < 1:
            return (1 - bucket.tokens) * 60 / limit
        bucket.tokens -= 1
        return None

    async def reserve(self, reservation: Reservation, usd: float) -> None:
        account, budget = reservation.account, reservation.account.usd_per_month
        if budget is None:
            return
        # Paid calls of requests in progress have no ledger entry yet: add those of this request
        # here, and those of others below through `usd`.
        spent = self._check_spent(account, reservation.paid)
        others = sum(one.usd for one in self._reservations[account.id] if one is not reservation)
        # Without other reservations any call is admitted: else a large one would never fit.
        if others > 0 and spent + others + usd > budget * ROUNDING:
            raise budget_reserved(account)
        reservation.reserved = usd
        self._reservations[account.id].add(reservation)

    def release(self, reservation: Reservation) -> None:
        self._reservations[reservation.account.id].discard(reservation)
        if not self._reservations[reservation.account.id]:
            del self._reservations[reservation.account.id]

    def _check_spent(self, account: Account, paid: float) -> float:
        spent = self._spending.spent_this_month(account.id) + paid
        if account.usd_per_month is not None and spent >= account.usd_per_month:
            raise budget_spent(account)
        return spent


def budget_reserved(account: Account) -> AccountBudgetError:
    return AccountBudgetError(
        "this key's other requests have reserved the rest of its budget of"
        f" {account.usd_per_month:g} USD",
        status=429,
        type="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"retry-after": "1", "retry-after-ms": "1000"},
        hint="wait until they end, or send a lower max_tokens to reserve less",
    )


def budget_spent(account: Account) -> AccountBudgetError:
    return AccountBudgetError(
        f"this key's budget of {account.usd_per_month:g} USD for this month is spent",
        status=429,
        type="insufficient_quota",
        code="insufficient_quota",
        headers={"x-should-retry": "false"},
        hint="wait for the next month (UTC), or ask the operator for a higher budget",
    )


class Reservation:
    """Reservation of one request in its account's budget: `reserved` for the upstream call in
    progress and `paid` for earlier ones, in US dollars. Call `release` once the ledger entry of the
    request exists, which then counts instead."""

    def __init__(self, limiter: Limiter, account: Account) -> None:
        self.account = account
        self.reserved = 0.0
        self.paid = 0.0
        self._limiter = limiter

    @property
    def has_budget(self) -> bool:
        return self.account.usd_per_month is not None

    @property
    def usd(self) -> float:
        return self.reserved + self.paid

    async def reserve(self, usd: float) -> None:
        """Reserve the expected cost of the next upstream call. Raises `AccountBudgetError` if it
        does not fit."""
        await self._limiter.reserve(self, usd)

    def settle(self, usd: float) -> None:
        """Replace the reserved amount with the cost of the call in US dollars, 0 if it failed."""
        self.reserved, self.paid = 0.0, self.paid + usd

    def pay(self, usd: float) -> None:
        """Count the cost of one of several calls that were reserved together."""
        self.reserved, self.paid = max(0.0, self.reserved - usd), self.paid + usd

    def release(self) -> None:
        """End the reservation."""
        self._limiter.release(self)

    def sibling(self) -> Reservation:
        """Return a reservation for another request of the same account, such as a shadow sample."""
        return Reservation(self._limiter, self.account)


ALL = "*"


@dataclass(frozen=True)
class KeyDefaults:
    """Limits of keys that were created without their own."""

    max_concurrent: int = 128
    tiers: tuple[str, ...] = ()
    max_namespaces: int = 16


@dataclass
class Access:
    """Checker of the limits of keys. Use it from the event loop; it counts the requests of this
    process only. `claim` records that an account uses a namespace, up to a maximum number of them;
    it returns False at the maximum, and blocks."""

    claim: Callable[[str, str, int], bool] = lambda account, namespace, limit: True
    defaults: KeyDefaults = field(default_factory=KeyDefaults)
    _in_flight: Counter[str] = field(default_factory=Counter)
    _claimed: set[tuple[str, str]] = field(default_factory=set)

    def enter(self, account: Account) -> None:
        """Count a request of the key; call `leave` when it ends. Raises `ApiError` (429)."""
        limit = account.max_concurrent or self.defaults.max_concurrent
        if self._in_flight[account.id] >= limit:
            raise ApiError(
                f"this key has reached its limit of concurrent requests, {limit}",
                status=429,
                type="rate_limit_error",
                code="too_many_concurrent_requests",
                headers={"retry-after": "1"},
                hint="wait until one ends, or ask the operator for a higher limit",
            )
        self._in_flight[account.id] += 1

    def leave(self, account: Account) -> None:
        self._in_flight[account.id] -= 1
        if self._in_flight[account.id] <= 0:
            del self._in_flight[account.id]

    def tiers_of(self, account: Account) -> tuple[str, ...]:
        if account.admin:
            return (ALL,)
        return self.defaults.tiers if account.tiers is None else account.tiers

    def may_choose(self, account: Account, tier: str) -> bool:
        chosen = self.tiers_of(account)
        return tier in chosen or ALL in chosen

    def may_reach(self, account: Account, tier: str) -> bool:
        """Return whether the gateway may send a request with tools, audio or no question to the
        tier. All tiers are allowed unless the operator has set tiers for the key or as a default:
        the built-in default, none, limits only the choices of clients."""
        return (not self.tiers_of(account) and account.tiers is None) or self.may_choose(
            account, tier
        )

    def check_tiers(self, account: Account, tiers: Collection[str]) -> None:
        """Raise `ApiError` (403) for a tier that the key may not choose."""
        for tier in tiers:
            if not self.may_choose(account, tier):
                raise ApiError(
                    f"this key may not choose the tier {tier!r}",
                    status=403,
                    type="permission_error",
                    code="tier_forbidden",
                    hint="use the model bottega, or ask the operator for a key with --tiers",
                )

    async def check_namespace(self, account: Account, namespace: str) -> None:
        """Raise `ApiError` (403) if the key may use no further namespace."""
        claimed = (account.id, namespace)
        # An empty id is no key, so there is nothing to count.
        if account.admin or not account.id or namespace == account.namespace:
            return
        if claimed in self._claimed:
            return
        limit = account.max_namespaces
        limit = self.defaults.max_namespaces if limit is None else limit
        # The database counts, since other processes claim namespaces of the same key.
        if not await asyncio.to_thread(self.claim, account.id, namespace, limit):
            raise ApiError(
                f"this key has reached its limit of namespaces below its own, {limit}",
                status=403,
                type="permission_error",
                code="too_many_namespaces",
                hint="use one of them, or ask the operator for a key with --max-namespaces",
            )
        # Claims are never taken back, so a success needs no second look at the database.
        self._claimed.add(claimed)
