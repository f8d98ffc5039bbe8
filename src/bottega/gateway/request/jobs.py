"""Chat requests while they are completed: jobs, results and streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from bottega.gateway.config.overrides import Overrides
from bottega.gateway.ports import RequestRecord, Tenant, UpstreamCall
from bottega.gateway.request.calls import Bill
from bottega.image import Image
from bottega.openai_api.request import Body, ChatRequest
from bottega.openai_api.response import ChatCompletion
from bottega.openai_api.streams import to_chunks
from bottega.pipeline import Pipeline
from bottega.types import Query


@dataclass(slots=True)
class ChatJob:
    """One request. `bypass` is the reason why it gets no demonstrations. Without a `query`, the
    client's body is forwarded unchanged; without a `key`, the reply is not repeated.
    `may_use_master`: whether a request without a query may reach the master."""

    request: ChatRequest
    overrides: Overrides
    bill: Bill
    bypass: str | None
    may_use_master: bool
    query: TenantQuery | None = None
    key: str | None = None

    @property
    def record(self) -> RequestRecord:
        return self.bill.record

    @property
    def escalates(self) -> bool:
        """Whether the pipeline may send this request on to another tier after an answer."""
        return (
            self.query is not None
            and self.query.pipeline.escalate is not None
            and self.overrides.tier is None
            and self.request.body.get("n") in (None, 1)
        )

    @property
    def confidence_fields(self) -> Mapping[str, Body]:
        """Request fields by tier that report the confidence of an answer, if it may escalate."""
        if self.query is None or not self.escalates:
            return {}
        return self.query.tenant.confidence_fields


@dataclass(slots=True)
class TenantQuery:
    """Query of a request and the tenant whose examples it may get, as the variant of the request
    sees it. `images` are all images of the request by URL. `opened` is the tenant that the pool
    returned, which keeps the namespace open."""

    query: Query
    tenant: Tenant
    images: Mapping[str, Image]
    opened: Tenant

    @property
    def pipeline(self) -> Pipeline:
        return self.tenant.pipeline


@dataclass(slots=True)
class ChatResult:
    """Complete reply. `dismissed` are the earlier replies of tiers that were not confident
    enough, `failed` the names of tiers that failed."""

    call: UpstreamCall
    completed: ChatCompletion
    dismissed: tuple[tuple[UpstreamCall, ChatCompletion], ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(slots=True)
class ChatStream:
    """Stream of a reply that has begun; `chunks` includes the first chunk. `started` is the
    `perf_counter` time at which the upstream call started."""

    call: UpstreamCall
    chunks: AsyncGenerator[bytes]
    started: float
    failed: tuple[str, ...] = ()


async def replayed_chunks(payload: bytes) -> AsyncGenerator[bytes]:
    """Yield the chunks of a complete reply, with its usage."""
    for chunk in to_chunks(payload, include_usage=True):
        yield chunk
