"""OTLP/HTTP collector in this process, which decodes what an exporter sends."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    id: str
    parent: str
    trace: str
    kind: str
    failed: bool
    attributes: dict[str, Any]
    tracestate: str = ""


@dataclass
class Collector:
    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    # Sum and count of each histogram, by name and attributes.
    histograms: list[tuple[str, dict[str, Any], float, int]] = field(default_factory=list)
    raw: bytes = b""

    def receive(self, path: str, body: bytes) -> None:
        self.raw += body
        if path == "/v1/traces":
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(_attributes(group.resource.attributes))
                for scope in group.scope_spans:
                    self.spans += [_span(one) for one in scope.spans]
        elif path == "/v1/metrics":
            for metrics in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for scope_metrics in metrics.scope_metrics:
                    for metric in scope_metrics.metrics:
                        self.histograms += [
                            (metric.name, _attributes(point.attributes), point.sum, point.count)
                            for point in metric.histogram.data_points
                        ]

    def named(self, name: str) -> ReceivedSpan:
        [found] = [one for one in self.spans if one.name == name]
        return found

    def children(self, of: ReceivedSpan) -> list[str]:
        """Return the names of the span's children in the order in which they ended."""
        return [one.name for one in self.spans if one.parent == of.id]


def _span(span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        span.name,
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_id.hex(),
        KINDS[span.kind],
        span.status.code == 2,
        _attributes(span.attributes),
        span.trace_state,
    )


def _attributes(rows: Any) -> dict[str, Any]:
    return {row.key: _value(row.value) for row in rows if isinstance(row, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, str(kind))


@contextmanager
def running_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            collector.receive(self.path, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        collector.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
