"""Prometheus metrics at `/metrics`, with bounded labels and microseconds of cost per request."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Protocol

import prometheus_client
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from bottega.gateway.accounting.ledger_schema import Entry, Feedback
from bottega.routing.benefit_gate import agreement_range

# How to merge the gauges. `live` excludes workers that have ended.
GAUGE_MODES = {
    "bottega_requests_in_flight": "livesum",
    "bottega_cache_entries": "livemostrecent",  # all workers count the same examples
    "bottega_breaker_state": "livemax",
    "bottega_ledger_rows_lost": "sum",
    "bottega_ready": "livemin",
}

LabelValues = tuple[str, ...]
COMPARED = {"yes": 1.0, "no": 0.0, "undecided": None}
AGREEMENT = "bottega_agreement"
CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
STAGE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
FAR, NEAR = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85), (0.9, 0.92, 0.94, 0.96, 0.98, 0.99)
SIMILARITY = (*FAR, *NEAR, 0.995)  # similarities of images of one kind differ by a few per cent
RATINGS = (0, 0.25, 0.5, 0.75, 1)
SHOTS = (0, 1, 2, 4, 8, 16, 32)
NAMESPACES = 100
OTHER = "other"
BREAKER = {"closed": 0, "half-open": 1, "open": 2}
_Key = tuple[str, str, str, int]  # namespace, route, state, status


class Histogram:
    """Histogram with fixed bucket bounds. One event loop writes; any thread may read."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        # A reader in another thread may see the count without the sum, until the next scrape.
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    @contextmanager
    def time(self) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.observe(perf_counter() - start)

    def include(self, other: Histogram) -> None:
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative count of each bound, and the sum."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum


class LazyCollector(Collector):
    """Collector that builds its metrics only when Prometheus reads them."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()

    def describe(self) -> Iterable[Metric]:
        return ()


def counter(
    name: str, help: str, labels: Sequence[str], rows: Mapping[LabelValues, float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"bottega_{name}", help, labels=labels)
    for values, count in rows.items():
        family.add_metric(values, count)
    return family


def histogram(
    name: str, help: str, labels: Sequence[str], rows: Mapping[LabelValues, Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"bottega_{name}", help, labels=labels)
    for values, measured in rows.items():
        family.add_metric(values, *measured.read())
    return family


def agreement(families: Iterable[Metric]) -> GaugeMetricFamily:
    """Return the range of agreement by the counts of comparisons among these families."""
    samples = [sample for family in families for sample in family.samples]
    counts = {
        one.labels["agreement"]: int(one.value)
        for one in samples
        if one.name == "bottega_shadow_total"
    }
    scores = [score for name, score in COMPARED.items() for _ in range(counts.get(name, 0))]
    bounds = GaugeMetricFamily(
        AGREEMENT,
        "Agreement of sampled answers with the master's: least and most with all undecided ones"
        " different or the same, low and high of the 95 % interval",
        labels=["bound"],
    )
    if scores:
        found = agreement_range(scores)
        for name in ("low", "least", "most", "high"):
            bounds.add_metric([name], getattr(found, name))
    return bounds


class BreakerState(Protocol):
    @property
    def state(self) -> str: ...


class Metrics:
    """Metrics of one gateway, in a separate registry.

    A client cannot create labels: routes are the operator's tiers, and any other route is
    `other`; only the first hundred namespaces have their own label. One event loop writes; any
    thread may read.
    """

    def __init__(self, routes: Iterable[str] = (), *, namespaces: int = NAMESPACES) -> None:
        self._registry = CollectorRegistry()
        self._routes = {*routes, ""}
        self._max_namespaces = namespaces
        self._namespaces: set[str] = set()
        self._tallies: dict[_Key, _Tally] = {}
        self.upstream = Histogram(SECONDS)
        self.retrieval, self.store = Histogram(STAGE_SECONDS), Histogram(STAGE_SECONDS)
        self.in_flight = self._gauge("requests_in_flight", "Requests in flight")
        self._entries = self._gauge("cache_entries", "Examples in the cache", "namespace")
        self._breaker = self._gauge("breaker_state", "0 closed, 1 half-open, 2 open", "route")
        # Sampled answers by their agreement with the master's, None if it is undecided.
        self.compared = Counter[float | None]()
        self.warned = self._counter("warnings", "Non-fatal problems while answering", "reason")
        self._feedback = self._counter("feedback", "Feedback of clients", "kind")
        self._ratings = {route: Histogram(RATINGS) for route in (*self._routes, OTHER)}
        self._registry.register(LazyCollector(self._families))

    def observe(self, entry: Entry) -> None:
        """Count a request that has ended."""
        key = (entry.namespace, entry.tier, entry.state, entry.status)
        (self._tallies.get(key) or self._tally(*key)).add(entry)

    def feedback(self, feedback: Feedback) -> None:
        """Count feedback, and the rating of the route that answered."""
        for kind in ("rating", "correction", "comment"):
            if getattr(feedback, kind) is not None:
                self._feedback.labels(kind).inc()
        if feedback.rating is not None:
            self._ratings[self._route_label(feedback.tier)].observe(feedback.rating)

    def cache_entries(self, namespace: str, count: int) -> None:
        if (label := self._namespace_label(namespace)) != OTHER:
            self._entries.labels(label).set(count)

    def breaker(self, route: str, breaker: BreakerState) -> None:
        """Export the breaker's state, read at each scrape."""
        self._breaker.labels(self._route_label(route)).set_function(lambda: BREAKER[breaker.state])

    def lost_rows(self, count: Callable[[], float]) -> None:
        """Export the number of lost ledger rows, read at each scrape."""
        gauge = self._gauge("ledger_rows_lost", "Requests that the ledger could not write")
        gauge.set_function(count)

    def ready(self, is_ready: Callable[[], bool]) -> None:
        """Export whether the gateway is ready, read at each scrape."""
        gauge = self._gauge("ready", "1 while the gateway can answer, else 0")
        gauge.set_function(lambda: float(is_ready()))

    def exposition(self) -> bytes:
        """Return the metrics as Prometheus text. Blocks for a few milliseconds."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics with their current values."""
        return self._registry.collect()

    def _tally(self, namespace: str, route: str, state: str, status: int) -> _Tally:
        code = status if 100 <= status < 600 else 0
        key = (self._namespace_label(namespace), self._route_label(route), state, code)
        return self._tallies.setdefault(key, _Tally())

    def _namespace_label(self, namespace: str) -> str:
        if namespace not in self._namespaces:
            if len(self._namespaces) >= self._max_namespaces:
                return OTHER
            self._namespaces.add(namespace)
        return namespace

    def _route_label(self, route: str) -> str:
        return route if route in self._routes else OTHER

    def _families(self) -> Iterator[Metric]:
        """Yield the metrics, with the tallies summed over the labels that a metric lacks."""
        requests, tokens = Counter[LabelValues](), Counter[LabelValues]()
        unpriced, by_namespace = Counter[LabelValues](), Counter[LabelValues]()
        cost, spent = defaultdict[LabelValues, float](float), defaultdict[LabelValues, float](float)
        seconds: dict[LabelValues, Histogram] = {}
        similarity, shots = Histogram(SIMILARITY), Histogram(SHOTS)
        # Alerts need series that exist from the start.
        empty = [(("", route, "", 0), _Tally()) for route in sorted(self._routes - {""})]
        for (namespace, route, state, status), tally in [*empty, *self._tallies.items()]:
            if state:
                requests[route, state, str(status or OTHER)] += tally.requests
                by_namespace[namespace,] += tally.requests
                spent[namespace,] += tally.cost
            tokens[route, "prompt"] += tally.prompt
            tokens[route, "completion"] += tally.completion
            tokens[route, "cached"] += tally.cached
            cost[route,] += tally.cost
            unpriced[route,] += tally.unpriced
            seconds.setdefault((route,), Histogram(SECONDS)).include(tally.seconds)
            similarity.include(tally.similarity)
            if state == "answered":
                shots.include(tally.shots)
        by_outcome = ("route", "state", "status")
        yield counter("requests", "Requests by route, state and status", by_outcome, requests)
        yield histogram("request_seconds", "Duration of requests", ["route"], seconds)
        yield counter("tokens", "Tokens as reported by upstreams", ["route", "kind"], tokens)
        yield counter("cost_usd", "Cost in US dollars of priced requests", ["route"], cost)
        yield counter("unpriced_requests", "Requests without a price", ["route"], unpriced)
        yield counter("namespace_requests", "Requests", ["namespace"], by_namespace)
        yield counter("namespace_cost_usd", "Cost in US dollars", ["namespace"], spent)
        best = "Similarity of the best example found, shown or not"
        yield histogram("similarity", best, (), {(): similarity})
        shown = "Demonstrations of an answered request"
        yield histogram("demonstrations", shown, (), {(): shots})
        yield (shadows := self._shadows())
        yield agreement([shadows])
        ratings: dict[LabelValues, Histogram] = {
            (route,): rated for route, rated in self._ratings.items() if rated.count
        }
        yield histogram("rating", "Ratings of answers, from 0 to 1", ["route"], ratings)
        yield histogram("upstream_seconds", "Duration of upstream calls", (), {(): self.upstream})
        stages: dict[LabelValues, Histogram] = {
            ("retrieval",): self.retrieval,
            ("store",): self.store,
        }
        yield histogram("stage_seconds", "Duration of stages", ["stage"], stages)

    def _shadows(self) -> CounterMetricFamily:
        counts: dict[LabelValues, float] = {
            (name,): self.compared[score] for name, score in COMPARED.items()
        }
        return counter("shadow", "Comparisons with the master's answer", ["agreement"], counts)

    def _counter(self, name: str, help: str, *labels: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(
            name, help, labels, namespace="bottega", registry=self._registry
        )

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(name, help, labels, namespace="bottega", registry=self._registry)


class _Tally:
    """Sums over the requests with the same labels."""

    def __init__(self) -> None:
        self.requests = self.unpriced = self.prompt = self.completion = self.cached = 0
        self.cost = 0.0
        self.seconds = Histogram(SECONDS)
        self.similarity, self.shots = Histogram(SIMILARITY), Histogram(SHOTS)

    def add(self, entry: Entry) -> None:
        self.requests += 1
        self.prompt += entry.prompt_tokens
        self.completion += entry.completion_tokens
        self.cached += entry.cached_tokens
        self.seconds.observe(entry.seconds)
        self.shots.observe(entry.shots)
        if entry.cost_usd is None:
            self.unpriced += 1
        else:
            self.cost += entry.cost_usd
        if entry.similarity is not None:
            self.similarity.observe(entry.similarity)


class WorkerMetrics:
    """Files with the metrics of one worker. `worker` must be unique within the folder, even for a
    worker that replaces another one, whose counts must remain."""

    def __init__(self, folder: Path, worker: str, collect: Callable[[], Iterable[Metric]]) -> None:
        self._folder, self._worker, self._collect = folder, worker, collect
        self._files: dict[str, MmapedDict] = {}
        self._lock = Lock()

    def write(self) -> None:
        """Write the current values."""
        now = time.time()
        with self._lock:
            for family in self._collect():
                if family.name == AGREEMENT:  # computed from the counts of all workers
                    continue
                file = self._file(family)
                for sample in _additive(family):
                    key = mmap_key(
                        family.name,
                        sample.name,
                        list(sample.labels),
                        list(sample.labels.values()),
                        family.documentation,
                    )
                    file.write_value(key, sample.value, now)

    def exposition(self) -> bytes:
        """Return the metrics of all workers as Prometheus text."""
        self.write()
        registry = CollectorRegistry()
        merged = MultiProcessCollector(registry, str(self._folder))
        registry.register(LazyCollector(lambda: [agreement(merged.collect())]))
        return generate_latest(registry)

    def close(self) -> None:
        self.write()
        for file in self._files.values():
            file.close()

    def _file(self, family: Metric) -> MmapedDict:
        kind = family.type
        if kind == "gauge":
            kind = f"gauge_{GAUGE_MODES[family.name]}"
        if kind not in self._files:
            self._files[kind] = MmapedDict(str(self._folder / f"{kind}_{self._worker}.db"))
        return self._files[kind]


def remove_gauges(folder: Path, worker: str) -> None:
    """Delete the gauges of a worker that has ended. Its counters remain."""
    mark_process_dead(worker, str(folder))


def _additive(family: Metric) -> Iterator[Sample]:
    """Yield the samples in the file format: the buckets of a histogram are not cumulative, and the
    count is omitted because the reader computes it from them."""
    below = 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            yield sample._replace(value=sample.value - below)
            below = 0.0 if sample.labels["le"] == "+Inf" else sample.value
        elif not sample.name.endswith(("_count", "_created")):
            yield sample
