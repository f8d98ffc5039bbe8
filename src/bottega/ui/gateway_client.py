"""Client that sends the questions of console users to the gateway in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import orjson

from bottega.errors import BottegaError
from bottega.gateway.errors import to_api_error
from bottega.gateway.ports import RequestRecord, Tenant, Tenants
from bottega.gateway.request.chat import Gateway
from bottega.gateway.request.exchange import request_id
from bottega.gateway.running.server import GatewayServer
from bottega.image import Image
from bottega.recording import CompositeRecorder
from bottega.types import Trace
from bottega.ui.sessions import ConsoleUser


@dataclass(frozen=True)
class QuestionOptions:
    """Options of one question: model id, number of demonstrations (None: the tier's), whether the
    cache is searched, and whether the answer is stored. With `variant`, retrieval and router are
    those of a variant of the experiment."""

    model: str = "bottega"
    shots: int | None = None
    retrieve: bool = True
    store: bool = False
    variant: str = ""

    def headers(self, namespace: str) -> dict[str, str]:
        """Return the request headers. Exact repeats are never replayed."""
        switches = ["no-replay"]
        switches += [] if self.retrieve else ["no-retrieve"]
        switches += [] if self.store else ["no-store"]
        headers = {"x-bottega-cache": ",".join(switches)}
        if self.shots is not None:
            headers["x-bottega-shots"] = str(self.shots)
        if namespace:
            headers["x-bottega-namespace"] = namespace
        return headers


@dataclass
class CallOutcome:
    """Answer of the gateway, or its error. `trace` is None if no pipeline answered."""

    settings: QuestionOptions
    record: RequestRecord
    text: str = ""
    error: BottegaError | None = None
    trace: Trace | None = None


@dataclass
class _TracedTenants:
    """Tenants, as a variant sees them, whose pipelines also append to `traces`."""

    tenants: Tenants
    variant: str = ""
    traces: list[Trace] = field(default_factory=list)
    # The pool closes a namespace when nothing holds its tenant.
    _held: list[Tenant] = field(default_factory=list)

    async def open(self, namespace: str, /) -> Tenant:
        tenant = await self.tenants.open(namespace)
        self._held.append(tenant)
        chosen = tenant.variants.get(self.variant, tenant)
        record = CompositeRecorder(chosen.pipeline.record, self._record)
        return replace(chosen, pipeline=replace(chosen.pipeline, record=record))

    async def _record(self, trace: Trace, /) -> None:
        self.traces.append(trace)


@dataclass(frozen=True)
class GatewayClient:
    """Client of a gateway. Its requests count towards the limits and budget of the user's key."""

    server: GatewayServer

    @property
    def gateway(self) -> Gateway:
        return self.server.gateway

    def models(self, user: ConsoleUser) -> list[str]:
        """Return the ids of the models that the user may request."""
        return self.gateway.models_of(user.account)

    def variants(self) -> dict[str, str]:
        """Return the variants with their own retrieval or router by id, and what they have."""
        config = self.server.config
        views = {
            id: config.of_variant(one)
            for id, one in config.experiment.variants.items()
            if one.has_own_settings
        }
        return {
            id: f"variant {id}: {one.cache.retrieve}, router {one.route.router}"
            for id, one in views.items()
        }

    def ask(
        self,
        user: ConsoleUser,
        namespace: str,
        text: str,
        images: Sequence[Image],
        settings: QuestionOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> CallOutcome:
        """Send a question with its images and return the outcome. Blocks: call it from another
        thread than that of `loop`, the event loop of the gateway."""
        work = self._ask(user, namespace, text, images, settings)
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    async def _ask(
        self,
        user: ConsoleUser,
        namespace: str,
        text: str,
        images: Sequence[Image],
        settings: QuestionOptions,
    ) -> CallOutcome:
        parts: list[object] = [
            {"type": "image_url", "image_url": {"url": await asyncio.to_thread(_data_url, image)}}
            for image in images
        ]
        parts.append({"type": "text", "text": text})
        body = {"model": settings.model, "messages": [{"role": "user", "content": parts}]}
        raw = orjson.dumps(body)

        async def read() -> bytes:
            self.gateway.limits.check_size(len(raw))
            return raw

        tenants = _TracedTenants(self.gateway.tenants, settings.variant)
        protected = self.gateway.authenticate is not None
        gateway = replace(
            self.gateway,
            tenants=tenants,
            authenticate=(lambda _: user.account) if protected else None,
            experiment=None,  # questions of the console are not part of it
        )
        record = RequestRecord(request_id())
        outcome = CallOutcome(settings, record)
        try:
            reply = await gateway.answer(record, settings.headers(namespace), read)
            choice = orjson.loads(reply.payload)["choices"][0]
            outcome.text = choice["message"].get("content") or ""
        except BottegaError as error:
            record.state, record.status = "failed", to_api_error(error).status
            # The user may be a client: details of upstreams appear in the log only.
            outcome.error = to_api_error(error)
        finally:
            self.server.recorder(record)
        outcome.trace = next(iter(tenants.traces), None)
        return outcome


def _data_url(image: Image) -> str:
    return image.data_url
