"""Counts that cost a fraction of a microsecond, and their form when Prometheus reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labelled = tuple[str, ...]


class Histogram:
    """For one event loop; any thread may read it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

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
        """How many were up to each bound, and the sum."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._counts), strict=True)), self._sum


class Reading(Collector):
    """What is only put together when somebody reads it."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families()

    def describe(self) -> Iterable[Metric]:
        return ()


def counter(
    name: str, what: str, labels: Sequence[str], rows: Mapping[Labelled, float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"bottega_{name}", what, labels=labels)
    for values, count in rows.items():
        family.add_metric(values, count)
    return family


def histogram(
    name: str, what: str, labels: Sequence[str], rows: Mapping[Labelled, Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"bottega_{name}", what, labels=labels)
    for values, one in rows.items():
        family.add_metric(values, *one.read())
    return family
