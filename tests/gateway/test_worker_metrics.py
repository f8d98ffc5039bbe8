"""Metrics of several workers, merged from their files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bottega.gateway.accounting.ledger_schema import Entry
from bottega.gateway.telemetry.metrics import (
    AGREEMENT,
    GAUGE_MODES,
    Metrics,
    WorkerMetrics,
    remove_gauges,
)


def entry(seconds: float) -> Entry:
    return Entry(
        0.0, "req_1", "", "team", "master", "mock", "answered", shots=2, similarity=0.95,
        prompt_tokens=10, completion_tokens=3, cost_usd=0.25, seconds=seconds,
    )  # fmt: skip


Start = Callable[..., tuple[Metrics, WorkerMetrics]]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a worker with requests of these durations."""
    with ExitStack() as opened:

        def start(name: str, *seconds: float) -> tuple[Metrics, WorkerMetrics]:
            metrics = Metrics(["master"])
            for one in seconds:
                metrics.observe(entry(one))
            files = opened.enter_context(closing(WorkerMetrics(tmp_path, name, metrics.collect)))
            return metrics, files

        yield start


def values(exposition: bytes) -> dict[str, float]:
    rows = re.findall(r"^(bottega_\S+) (\S+)$", exposition.decode(), re.MULTILINE)
    return {name: float(value) for name, value in rows}


def test_the_sum_of_workers_equals_one_process(worker: Start) -> None:
    (one, first), (two, second) = worker("1", 0.02, 3.0), worker("2", 0.02)
    both = Metrics(["master"])
    for seconds in (0.02, 3.0, 0.02):
        both.observe(entry(seconds))
    for metrics, score in ((one, 1.0), (one, 0.0), (two, None), (two, 1.0)):
        metrics.compared[score] += 1
        both.compared[score] += 1
    second.write()
    merged, expected = values(first.exposition()), values(both.exposition())
    assert {n: v for n, v in expected.items() if "_created" not in n} == pytest.approx(merged)
    assert merged['bottega_request_seconds_bucket{le="0.025",route="master"}'] == 2
    assert merged['bottega_request_seconds_count{route="master"}'] == 3
    bounds = [merged[f'bottega_agreement{{bound="{name}"}}'] for name in ("least", "most")]
    assert bounds == [0.5, 0.75]


def test_repeated_writes_count_once(worker: Start) -> None:
    metrics, files = worker("1", 0.02)
    files.write()
    metrics.observe(entry(0.02))
    files.write()
    merged = values(files.exposition())
    assert merged['bottega_cost_usd_total{route="master"}'] == 0.5


def test_gauges_of_an_ended_worker_are_left_out(tmp_path: Path, worker: Start) -> None:
    (one, first), (two, second) = worker("1", 0.02), worker("2", 0.02)
    for metrics, lost in ((one, 3), (two, 4)):
        metrics.in_flight.set(5)
        metrics.cache_entries("team", 7)
        metrics.lost_rows(lambda lost=lost: lost)  # type: ignore[misc]
    second.write()
    merged = values(first.exposition())
    assert merged["bottega_requests_in_flight"] == 10
    assert merged['bottega_cache_entries{namespace="team"}'] == 7
    remove_gauges(tmp_path, "2")
    merged = values(first.exposition())
    assert merged["bottega_requests_in_flight"] == 5
    assert merged["bottega_ledger_rows_lost"] == 7
    assert merged['bottega_requests_total{route="master",state="answered",status="200"}'] == 2


def test_every_gauge_has_a_mode() -> None:
    metrics = Metrics(["master"])
    metrics.lost_rows(lambda: 0)
    metrics.ready(lambda: True)
    gauges = {family.name for family in metrics.collect() if family.type == "gauge"}
    assert gauges == {*GAUGE_MODES, AGREEMENT}
