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

    from bottega.telemetry.exporters import Exporter

__all__ = ["instrument"]

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
DEFAULT_ENDPOINT = "http://localhost:4318"


def instrument(
    pipeline: Pipeline,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    capture_content: bool = False,
) -> Pipeline:
    """Return a copy of the pipeline that records a span for each query, step and model call.

    The providers default to the global ones of OpenTelemetry, which the application configures.
    With `capture_content` the spans of model calls contain the texts of prompts and answers. Raises
    `MissingDependencyError` without the extra `[otel]`.
    """
    with needs_extra("otel"):
        from bottega.telemetry.tracer import OpenTelemetryTracer
    tracer = OpenTelemetryTracer(tracer_provider, meter_provider, capture_content=capture_content)
    return replace(pipeline, tracer=tracer)


def open_exporter(*, capture_content: bool = False) -> Exporter:
    """Return an exporter whose tracer sends spans and metrics to a collector.

    Raises `SettingError` for an unsupported exporter or protocol, and `MissingDependencyError`
    without the extra `[otel]`.
    """
    with needs_extra("otel"):
        from bottega.telemetry.exporters import Exporter
    return Exporter.open(capture_content=capture_content)


def check_exporter(environment: Mapping[str, str]) -> None:
    """Check the variables in `environment` without connecting. Raises the errors of
    `open_exporter`."""
    with needs_extra("otel"):
        from bottega.telemetry.exporters import exported_signals
    exported_signals(environment)
