"""Span of each request: the parent of its steps, and a child of the client's span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from bottega._util.tracing import Attributes, Tracer, use_tracer
from bottega.gateway.ports import RequestRecord, Scope


@dataclass(frozen=True)
class RequestSpans:
    """Measurement of requests with a tracer, which their steps use, too. The attributes follow
    OpenTelemetry's conventions for HTTP servers; the fields of the log are added as `bottega.*`."""

    tracer: Tracer

    @contextmanager
    def __call__(
        self, record: RequestRecord, scope: Scope, headers: Mapping[str, str]
    ) -> Iterator[None]:
        path = scope["path"]  # one of the gateway's own
        attributes: Attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "url.path": path,
            "url.scheme": scope.get("scheme"),
            "network.protocol.version": scope.get("http_version"),
            "bottega.request_id": record.request_id,
            "bottega.client_request_id": record.client_request_id or None,
        }
        with (
            use_tracer(self.tracer),
            self.tracer.request_span(f"POST {path}", attributes, headers) as span,
        ):
            record.trace_id = span.trace_id
            try:
                yield
            finally:
                span.set(_outcome(record))
                if record.status >= 500:
                    span.fail(record.reason or str(record.status))


def _outcome(record: RequestRecord) -> Attributes:
    return {
        # A stream that fails has sent status 200 before.
        "http.response.status_code": 200 if record.streamed else record.status,
        "bottega.account": record.account.id or None,
        "bottega.namespace": record.namespace or None,
        "bottega.state": record.state,
        "bottega.reason": record.reason or None,
        "bottega.tier": record.route or None,
        "bottega.model": record.model or None,
        "bottega.fallback": record.fallback or None,
        "bottega.demonstrations": record.shots,
        "bottega.similarity": record.similarity,
        "bottega.cost_usd": record.cost_usd,
    }
