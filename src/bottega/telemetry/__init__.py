"""OpenTelemetry: spans of the pipeline's steps, and spans and metrics of model calls.

`pip install 'bottega-vlm[otel]'` installs what this package needs. OpenTelemetry is imported by
`instrument` and `open_exporter`, not with this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from bottega.errors import needs_extra
from bottega.pipeline import Pipeline

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

    from bottega.telemetry.export import Exporter

__all__ = ["DEFAULT_ENDPOINT", "ENDPOINT", "check_exporter", "instrument", "open_exporter"]

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEFAULT_ENDPOINT = "http://localhost:4318"


def instrument(
    pipeline: Pipeline,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    capture_content: bool = False,
) -> Pipeline:
    """Return the pipeline with a span for each query, each of its steps and each model call.

    The providers default to the global ones of OpenTelemetry, which the application configures.
    With `capture_content` the spans of model calls contain the texts of prompts and answers. Raises
    `MissingDependencyError` without the extra `[otel]`.
    """
    with needs_extra("otel"):
        from bottega.telemetry.tracer import OpenTelemetryTracer
    tracer = OpenTelemetryTracer(tracer_provider, meter_provider, capture_content=capture_content)
    return replace(pipeline, tracer=tracer)


def open_exporter(*, capture_content: bool = False) -> Exporter:
    """Return a tracer whose spans and metrics are sent to a collector. Raises `SettingError` and
    `MissingDependencyError`."""
    with needs_extra("otel"):
        from bottega.telemetry.export import Exporter
    return Exporter.open(capture_content=capture_content)


def check_exporter(environment: Mapping[str, str]) -> None:
    """Raise what `open_exporter` would raise."""
    with needs_extra("otel"):
        from bottega.telemetry.export import exported_signals
    exported_signals(environment)
