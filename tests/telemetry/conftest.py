from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.telemetry.collector import Collector, running_collector


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Return a collector to which OTEL_EXPORTER_OTLP_ENDPOINT points."""
    with running_collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running
