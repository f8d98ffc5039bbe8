"""Export of spans and metrics to an OpenTelemetry collector by OTLP over HTTP."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from bottega.errors import SettingError
from bottega.telemetry.tracer import NAME, OpenTelemetryTracer

PROTOCOL = "http/protobuf"
TRACES, METRICS = "TRACES", "METRICS"
CLOSE_SECONDS = 3.0


@dataclass(frozen=True)
class Exporter:
    """Tracer whose spans and metrics go to the collector that the environment variables of
    OpenTelemetry name. Threads of the two providers send them."""

    tracer: OpenTelemetryTracer
    _traces: TracerProvider
    _meters: MeterProvider

    @classmethod
    def open(cls, *, capture_content: bool = False) -> Exporter:
        """Start exporting. Raises `SettingError` for an exporter or protocol other than OTLP over
        HTTP."""
        signals = exported_signals(os.environ)
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: NAME}))
        # `close` ends the providers: their own exit handlers would end them again.
        traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        if TRACES in signals:
            traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        exporters = [OTLPMetricExporter()] if METRICS in signals else []
        readers = [PeriodicExportingMetricReader(one) for one in exporters]
        meters = MeterProvider(readers, resource, shutdown_on_exit=False)
        tracer = OpenTelemetryTracer(traces, meters, capture_content=capture_content)
        return cls(tracer, traces, meters)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send the remaining spans and metrics. Blocks for at most `seconds`: those that the
        collector has not accepted by then are lost."""
        # Shutdown itself repeats each export for up to OTEL_EXPORTER_OTLP_TIMEOUT seconds.
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=provider.shutdown, name="bottega-telemetry", daemon=True)
            for provider in (self._traces, self._meters)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


def exported_signals(environment: Mapping[str, str]) -> Collection[str]:
    """Return those of `TRACES` and `METRICS` that are exported. Raises `SettingError` for an
    unsupported exporter or protocol."""
    return [one for one in (TRACES, METRICS) if _is_exported(one, environment)]


def _is_exported(signal: str, environment: Mapping[str, str]) -> bool:
    variable = f"OTEL_{signal}_EXPORTER"
    exporter = environment.get(variable) or "otlp"
    if exporter not in ("otlp", "none"):
        raise SettingError(
            f"{variable} must be otlp or none, got {exporter!r}", hint=f"unset {variable}"
        )
    general, own = "OTEL_EXPORTER_OTLP_PROTOCOL", f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    variable = own if environment.get(own) else general
    protocol = environment.get(variable) or PROTOCOL
    if exporter == "otlp" and protocol != PROTOCOL:
        raise SettingError(
            f"{variable} must be {PROTOCOL}, got {protocol!r}",
            hint=f"set {variable}={PROTOCOL} and the collector's HTTP port, usually 4318",
        )
    return exporter == "otlp"
