"""What Prometheus reads at `/metrics`: bounded labels, and microseconds a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
SIMILARITY = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
SHOTS = (0, 1, 2, 4, 8, 16, 32)
NAMESPACES = 100
OTHER = "other"
BREAKER = {"closed": 0, "half-open": 1, "open": 2}


class Observed(Protocol):
    """Of the ledger's entry what is counted."""

    @property
    def namespace(self) -> str: ...
    @property
    def route(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def shots(self) -> int: ...
    @property
    def similarity(self) -> float | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def cost_usd(self) -> float | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def status(self) -> int: ...


class Breaks(Protocol):
    @property
    def state(self) -> str: ...


class Metrics:
    """The counters of one gateway, in a registry of its own.

    Nothing that a client says becomes a label: routes are the operator's tiers (any other is
    `other`), and of namespaces only the first hundred are told apart. Looking a label up costs
    microseconds, so the children are kept. Threads may share it.
    """

    def __init__(self, routes: Iterable[str] = (), *, namespaces: int = NAMESPACES) -> None:
        self._registry = CollectorRegistry()
        self._routes = {*routes, ""}
        self._most_namespaces = namespaces
        self._by_outcome: dict[tuple[str, str, int], Counter] = {}
        self._by_route: dict[str, _Route] = {}
        self._by_namespace: dict[str, tuple[Counter, Counter]] = {}
        self._make()

    def _make(self) -> None:
        self._requests = self._counter(
            "requests", "Requests by route, state and status", "route", "state", "status"
        )
        self._seconds = self._histogram("request_seconds", "Whole requests", SECONDS, "route")
        self._tokens = self._counter("tokens", "Tokens as upstreams counted them", "route", "kind")
        self._cost = self._counter("cost_usd", "US dollars, where the price is known", "route")
        self._unpriced = self._counter("unpriced_requests", "Of no known price", "route")
        self._of_namespace = self._counter("namespace_requests", "Requests", "namespace")
        self._usd_of_namespace = self._counter("namespace_cost_usd", "US dollars", "namespace")
        self._similarity = self._histogram(
            "similarity", "Of the best demonstration, where one was looked for", SIMILARITY
        )
        self._shots = self._histogram("demonstrations", "Shown with an answered request", SHOTS)
        self._entries = self._gauge("cache_entries", "Examples in the cache", "namespace")
        self._breaker = self._gauge("breaker_state", "0 closed, 1 half-open, 2 open", "route")
        shadows = self._counter("shadow", "Comparisons with the master's answer", "agreement")
        stages = self._histogram("stage_seconds", "Parts of a request", SHORT, "stage")
        self.in_flight = self._gauge("requests_in_flight", "Requests under way")
        self.agreed, self.differed = shadows.labels("yes"), shadows.labels("no")
        self.upstream = self._histogram("upstream_seconds", "Calls to upstreams", SECONDS)
        self.retrieval, self.store = stages.labels("retrieval"), stages.labels("store")
        for route in self._routes - {""}:  # a series that is there from the start can be alerted on
            self._counted(route)

    def observe(self, entry: Observed) -> None:
        """Once for each request, after its end."""
        route, state, status = entry.route, entry.state, entry.status
        outcome = self._by_outcome.get((route, state, status))
        (outcome or self._outcome(route, state, status)).inc()
        self._counted(route).add(entry)
        requests, dollars = self._by_namespace.get(entry.namespace) or self._named(entry.namespace)
        requests.inc()
        if (cost := entry.cost_usd) is not None and cost > 0:
            dollars.inc(cost)
        if entry.similarity is not None:
            self._similarity.observe(entry.similarity)
        if state == "answered":
            self._shots.observe(entry.shots)

    def cache_entries(self, namespace: str, count: int) -> None:
        if namespace in self._by_namespace or len(self._by_namespace) < self._most_namespaces:
            self._named(namespace)
            self._entries.labels(namespace).set(count)

    def breaker(self, route: str, breaker: Breaks) -> None:
        """Asked whenever the metrics are read."""
        self._breaker.labels(self._known(route)).set_function(lambda: BREAKER[breaker.state])

    def lost_rows(self, count: Callable[[], float]) -> None:
        """Asked whenever the metrics are read."""
        gauge = self._gauge("ledger_rows_lost", "Requests that the ledger could not write")
        gauge.set_function(count)

    def exposition(self) -> bytes:
        """Blocks for a millisecond or a few."""
        return generate_latest(self._registry)

    def _outcome(self, route: str, state: str, status: int) -> Counter:
        known = self._known(route)
        code = str(status) if 100 <= status < 600 else OTHER
        made = self._requests.labels(known, state, code)
        if known == route and code != OTHER:  # what is not known has no bound
            self._by_outcome[(route, state, status)] = made
        return made

    def _counted(self, route: str) -> _Route:
        if (found := self._by_route.get(route)) is not None:
            return found
        known = self._known(route)
        if known not in self._by_route:
            self._by_route[known] = _Route(
                known, self._seconds, self._tokens, self._cost, self._unpriced
            )
        return self._by_route[known]

    def _named(self, namespace: str) -> tuple[Counter, Counter]:
        full = len(self._by_namespace) >= self._most_namespaces
        known = OTHER if full and namespace not in self._by_namespace else namespace
        if known not in self._by_namespace:
            self._by_namespace[known] = (
                self._of_namespace.labels(known),
                self._usd_of_namespace.labels(known),
            )
        return self._by_namespace[known]

    def _known(self, route: str) -> str:
        return route if route in self._routes else OTHER

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, namespace="bottega", registry=self._registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(name, what, labels, namespace="bottega", registry=self._registry)

    def _histogram(
        self, name: str, what: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            name, what, labels, namespace="bottega", registry=self._registry, buckets=buckets
        )


class _Route:
    """The children of one route."""

    def __init__(
        self, name: str, seconds: Histogram, tokens: Counter, cost: Counter, unpriced: Counter
    ) -> None:
        self.seconds = seconds.labels(name)
        self.prompt = tokens.labels(name, "prompt")
        self.completion = tokens.labels(name, "completion")
        self.cached = tokens.labels(name, "cached")
        self.cost, self.unpriced = cost.labels(name), unpriced.labels(name)

    def add(self, entry: Observed) -> None:
        self.seconds.observe(entry.seconds)
        if entry.prompt_tokens > 0:
            self.prompt.inc(entry.prompt_tokens)
        if entry.completion_tokens > 0:
            self.completion.inc(entry.completion_tokens)
        if entry.cached_tokens > 0:
            self.cached.inc(entry.cached_tokens)
        if entry.cost_usd is None:
            self.unpriced.inc()
        elif entry.cost_usd > 0:
            self.cost.inc(entry.cost_usd)
