"""Metrics of several worker processes, summed at each scrape.

Each worker writes its metrics every second into files in the format of prometheus_client's
multiprocess mode, and `/metrics` of any worker merges the files. Requests cost nothing extra,
because the counters stay in the worker's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Lock

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.samples import Sample

from bottega.gateway.telemetry.metrics import AGREEMENT, LazyCollector, agreement

# How to merge the gauges. `live` excludes workers that have ended.
GAUGE_MODES = {
    "bottega_requests_in_flight": "livesum",
    "bottega_cache_entries": "livemostrecent",  # all workers count the same examples
    "bottega_breaker_state": "livemax",
    "bottega_ledger_rows_lost": "sum",
    "bottega_ready": "livemin",
}


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
