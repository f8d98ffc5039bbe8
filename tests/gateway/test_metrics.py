from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("prometheus_client")

from bottega.gateway.telemetry.metrics import Metrics
from tests.gateway.entries import ANSWERED


@dataclass
class Breaker:
    state: str = "closed"


def lines(metrics: Metrics) -> dict[str, float]:
    text = metrics.exposition().decode()
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name.removeprefix("bottega_"): float(value) for name, _, value in pairs}


def new_metrics() -> Metrics:
    return Metrics(["apprentice", "master"])


def test_request_metrics_are_counted() -> None:
    metrics = new_metrics()
    metrics.observe(ANSWERED)
    metrics.observe(replace(ANSWERED, tier="master", cost_usd=None, shots=0, similarity=None))
    metrics.observe(replace(ANSWERED, state="failed", status=502, cost_usd=0.0))
    exported = lines(metrics)
    assert exported['requests_total{route="apprentice",state="answered",status="200"}'] == 1
    assert exported['requests_total{route="apprentice",state="failed",status="502"}'] == 1
    assert exported['tokens_total{kind="prompt",route="apprentice"}'] == 2000
    assert exported['tokens_total{kind="cached",route="master"}'] == 10
    assert exported['cost_usd_total{route="apprentice"}'] == 0.001
    assert exported['unpriced_requests_total{route="master"}'] == 1
    assert exported['namespace_requests_total{namespace="a"}'] == 3
    assert exported['namespace_cost_usd_total{namespace="a"}'] == 0.001
    assert exported['request_seconds_bucket{le="0.25",route="apprentice"}'] == 0
    assert exported['request_seconds_bucket{le="0.5",route="apprentice"}'] == 2
    assert exported["similarity_count"] == 2
    assert exported["demonstrations_count"] == 2
    assert exported["demonstrations_sum"] == 2


def test_other_metrics_are_exported() -> None:
    metrics, lost = new_metrics(), [0]
    metrics.lost_rows(lambda: lost[0])
    lost[0] = 7
    metrics.in_flight.inc()
    metrics.breaker("master", breaker := Breaker())
    breaker.state = "open"
    metrics.cache_entries("a", 12)
    metrics.retrieval.observe(0.002)
    metrics.store.observe(0.004)
    metrics.upstream.observe(1.5)
    metrics.compared[1.0] += 1
    exported = lines(metrics)
    assert exported["ledger_rows_lost"] == 7
    assert exported["requests_in_flight"] == 1
    assert exported['breaker_state{route="master"}'] == 2
    assert 'breaker_state{route="apprentice"}' not in exported
    assert exported['cache_entries{namespace="a"}'] == 12
    assert exported['stage_seconds_count{stage="retrieval"}'] == 1
    assert exported['stage_seconds_sum{stage="store"}'] == 0.004
    assert exported["upstream_seconds_count"] == 1
    assert exported['shadow_total{agreement="yes"}'] == 1
    assert exported['shadow_total{agreement="no"}'] == 0
    assert exported['shadow_total{agreement="undecided"}'] == 0


def test_clients_cannot_create_series() -> None:
    metrics = Metrics(["apprentice"], namespaces=5)
    for number in range(1000):
        metrics.observe(replace(ANSWERED, tier=f"model-{number}", namespace=f"n{number}"))
        metrics.observe(replace(ANSWERED, status=number * 1000))
        metrics.cache_entries(f"n{number}", number)
        metrics.breaker(f"model-{number}", Breaker())
    exported = lines(metrics)
    assert sum("namespace_requests_total" in name for name in exported) == 6
    assert exported['namespace_requests_total{namespace="other"}'] == 1000 - 4
    assert exported['namespace_requests_total{namespace="a"}'] == 1000
    assert sum(name.startswith("requests_total") for name in exported) == 2
    assert sum(name.startswith("cache_entries") for name in exported) <= 6
    assert exported['breaker_state{route="other"}'] == 0
    assert len(exported) < 200


def test_gateways_have_separate_metrics() -> None:
    one, other = new_metrics(), new_metrics()
    one.observe(ANSWERED)
    assert not any(name.startswith("requests_total") for name in lines(other))


def test_observing_takes_microseconds() -> None:
    """About 8 when idle, 20 times a counter increment; load slows both equally."""
    metrics = new_metrics()

    def once(work: Callable[[], None]) -> float:
        clock = time.thread_time()
        for _ in range(1000):
            work()
        return time.thread_time() - clock

    metrics.observe(ANSWERED)
    observing = min(once(lambda: metrics.observe(ANSWERED)) for _ in range(7))
    counting = min(once(metrics.warned.labels("x").inc) for _ in range(7))
    assert observing < 40 * counting
