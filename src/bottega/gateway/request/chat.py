"""Gateway: admission, response cache, completion and finalization of chat requests."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from time import perf_counter

import orjson

from bottega._util.caching import CLIENT, LeaderFlight
from bottega._util.progress import plural
from bottega.errors import BottegaError, EmbeddingError, SettingError, StoreError
from bottega.gateway.accounting.access import (
    ALL,
    ANONYMOUS,
    Access,
    KeyDefaults,
    Limiter,
    bearer_token,
    check_origin,
    namespace_of,
)
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.config.overrides import PREFIX, Experiment, Overrides, read_overrides
from bottega.gateway.errors import note_failure, unknown_key
from bottega.gateway.ports import (
    HttpReply,
    ReadBody,
    RequestRecord,
    Tenants,
    UpstreamCall,
    as_stream,
    headers_of,
)
from bottega.gateway.request.completion import Completer
from bottega.gateway.request.finalization import Finalizer
from bottega.gateway.request.image_fetcher import check_passed_urls
from bottega.gateway.request.jobs import (
    BACKGROUND,
    ChatJob,
    ChatResult,
    ChatStream,
    TenantQuery,
    bypass_reason,
    to_query,
)
from bottega.gateway.request.reading import (
    DecodeBudget,
    Fetch,
    Limits,
    allowed_fields,
    embed_fetched,
    is_web,
    read_images,
)
from bottega.gateway.request.reasoning import ReceivedChunks
from bottega.gateway.request.response_store import ResponseStore
from bottega.gateway.request.shadow_calls import ShadowRunner
from bottega.gateway.state.repeats import SharedRepeats
from bottega.gateway.state.response_cache import (
    BodyCache,
    CachedReply,
    Identity,
    RepeatedRequest,
    ReplyCache,
    StoredReplies,
    exact_key,
    image_digest,
    is_repeatable,
)
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import ChatRequest
from bottega.openai_api.response import ChatCompletion
from bottega.openai_api.streams import DONE_EVENT, from_chunks, has_only_usage, to_event

Land = Callable[[CachedReply], None]


@dataclass(frozen=True)
class ResponseCache:
    """Cache of replies and bodies. `identity` decides which images are equal; with `sampled`,
    replies to requests with a temperature above 0 are repeated, too. Without `enabled` no request
    has a key, so the cache stays empty."""

    replies: ReplyCache
    bodies: BodyCache
    flights: LeaderFlight[str, CachedReply] = field(default_factory=LeaderFlight)
    identity: Identity = "bytes"
    sampled: bool = False
    enabled: bool = True


@dataclass
class Gateway:
    """Gateway of chat completions. `models` maps the model ids that clients may use to tiers, ""
    for the router's choice. Without `authenticate` no key is needed: for loopback only. `commit` is
    awaited with the record of each reply before the reply ends. `repeats` has the replies of all
    gateways that share state. Without a `response_store` responses are not stored."""

    completer: Completer
    tenants: Tenants
    finalizer: Finalizer
    models: Mapping[str, str]
    response_cache: ResponseCache
    limiter: Limiter
    limits: Limits = field(default_factory=Limits)
    shadow: ShadowRunner | None = None
    authenticate: Callable[[str | None], Account | None] | None = None
    access: Access = field(default_factory=lambda: Access(defaults=KeyDefaults(tiers=(ALL,))))
    stored: StoredReplies | None = None
    fetch: Fetch | None = None
    allowed_hosts: Collection[str] = ()
    allowed_origins: Collection[str] = ()
    decoding: DecodeBudget = field(default_factory=DecodeBudget)
    more_fields: frozenset[str] = frozenset()
    background: re.Pattern[str] = field(default_factory=lambda: re.compile(BACKGROUND))
    commit: Callable[[RequestRecord], Awaitable[None]] | None = None
    repeats: SharedRepeats | None = None
    response_store: ResponseStore | None = None
    experiment: Experiment | None = None

    def __post_init__(self) -> None:
        # Most clients send the same overrides with every request.
        self._overrides = lru_cache(1024)(
            lambda model, given: read_overrides(model, dict(given), self.models)
        )

    async def answer(
        self, record: RequestRecord, headers: Mapping[str, str], body: ReadBody
    ) -> HttpReply:
        """Return the reply to a request. Raises `ApiError` and the errors of tiers, before the
        status of a stream is sent."""
        try:
            reply = await self._reply(record, headers, body)
            if self.commit is not None and not reply.is_live:
                await self.commit(record)
        except Exception as error:
            if not record.streamed:
                raise
            return HttpReply({}, events=_error_event(note_failure(record, error)))
        return reply

    async def _reply(
        self, record: RequestRecord, headers: Mapping[str, str], body: ReadBody
    ) -> HttpReply:
        # Before the body is read: a client without a valid key must not fill the memory.
        await self.admit(record, headers)
        raw = await body()
        given = overrides_of(headers)
        options = (f"{name}={value}" for name, value in sorted(given.items()))
        # A repeat skips the checks below, so everything that they depend on is part of its key.
        tiers = self.access.tiers_of(record.account)
        rights = f"admin={record.account.admin} tiers={','.join(tiers)}"
        split = self.experiment.body_scope(record.account) if self.experiment else ()
        scope, cache = (record.namespace, rights, *options, *split), self.response_cache
        repeated = cache.bodies.get(raw, scope)
        if repeated is not None and (reply := cache.replies.get(repeated.key)) is not None:
            return replayed(record, repeated, reply)
        request, overrides = await self._read(record, raw, given)
        namespace = record.namespace
        bypass = bypass_reason(request, self.background)
        if self._passes_urls(request):
            request.keeps_image_urls, bypass = True, bypass or "image urls"
        if self.experiment is not None and bypass is None:
            # After the checks: the options of a variant are the operator's.
            record.variant, overrides = self.experiment.assign(
                overrides, record.account, namespace, request
            )
        job = ChatJob(
            request,
            overrides,
            self.finalizer.bill(record, request),
            bypass,
            self.access.may_reach(record.account, self.completer.served[-1].name),
        )
        images = await self._images(job)
        if any(map(is_web, images)):  # tiers never fetch
            embed = partial(asyncio.to_thread, embed_fetched, request, images)
            job.request = await self.decoding.run(images.values(), embed, Image.wire_cost)
        job.query = await self._query(job, images)
        job.key = await self._key(job, images)
        if job.key is None:
            return await self._answer(job, AsyncExitStack(), lambda reply: None)
        repeated = RepeatedRequest(
            job.key, request.stream, request.include_usage, record.namespace, record.variant
        )
        cache.bodies.put(raw, scope, repeated, [image.url for image in request.images])
        return await self._repeat_or_answer(job, repeated)

    async def _repeat_or_answer(self, job: ChatJob, repeated: RepeatedRequest) -> HttpReply:
        """Return the reply to an identical request, that of one in progress included. Without one,
        answer this one, whose reply others may wait for."""
        record, cache, key = job.record, self.response_cache, repeated.key
        # Other bytes may mean the same request: other order of fields, streamed or not.
        if (reply := cache.replies.get(key)) is None and job.query is not None:
            reply = await self._stored(key, job.query)
        # No other await before `lead`: otherwise two identical requests would both lead.
        reply = reply or await cache.flights.wait(key)
        if reply is not None:
            return replayed(record, repeated, reply)
        async with AsyncExitStack() as leading:
            land = leading.enter_context(cache.flights.lead(key))
            flight = None if self.repeats is None else await self.repeats.begin(key)
            if isinstance(flight, tuple):  # another gateway has the reply
                cache.replies.put(key, *flight)
                land(flight[0])
                return replayed(record, repeated, flight[0])
            if flight is not None:
                leading.push_async_callback(flight.end)

            generation = cache.replies.generation

            def remember(reply: CachedReply) -> None:
                cache.replies.put(key, reply, generation=generation)
                land(reply)
                if flight is not None:
                    flight.reply = reply

            return await self._answer(job, leading.pop_all(), remember)

    async def _read(
        self, record: RequestRecord, raw: bytes, given: Mapping[str, str]
    ) -> tuple[ChatRequest, Overrides]:
        """Return the request and its overrides by model name and headers. Raises `ApiError`."""
        request = self.limits.read(raw)
        request.body = allowed_fields(request.body, self.more_fields)
        overrides = self._overrides(request.model, tuple(given.items()))
        namespace = namespace_of(record.account, overrides.namespace)
        await self._check_access(record.account, overrides, namespace)
        # Set after the checks: metrics and ledger must not count rejected names.
        record.namespace, record.wants_stream = namespace, request.stream
        return request, overrides

    async def count_tokens(
        self, record: RequestRecord, headers: Mapping[str, str], body: ReadBody
    ) -> HttpReply:
        """Return an estimate of a request's prompt tokens, `input_tokens`, without demonstrations
        and without a call. Raises `ApiError`."""
        await self.admit(record, headers)
        request, overrides = await self._read(record, await body(), overrides_of(headers))
        tiers = {served.name: served for served in self.completer.served}
        served = tiers.get(overrides.tier or "", self.completer.served[-1])
        record.state, record.reason = "counted", "token count"
        estimates, model = self.finalizer.estimates, served.upstream.model
        tokens = max(1, estimates.prompt(model, request.prompt_tokens, request.image_tokens))
        return HttpReply({}, orjson.dumps({"input_tokens": tokens}))

    def check_key(self, headers: Mapping[str, str], *, may_view: bool = False) -> Account:
        """Return the account of the key in the headers, and make it the client of this task. The
        key of a viewer needs `may_view`. Raises `ApiError`."""
        if self.authenticate is None:
            check_origin(headers.get("origin"), self.allowed_hosts, self.allowed_origins)
            return ANONYMOUS
        key = bearer_token(headers)
        account = self.authenticate(key or None)
        if account is None:
            raise unknown_key(key)
        if account.viewer and not may_view:
            raise ApiError(
                "this key may only view the console",
                status=403,
                code="viewer_key",
                hint="use another key for requests",
            )
        CLIENT.set(account.id)
        return account

    def models_of(self, account: Account) -> list[str]:
        """Return the model ids that the key may request."""
        tiers = self.models.items()
        return [id for id, tier in tiers if not tier or self.access.may_choose(account, tier)]

    async def admit(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        """Check the key and its limits, unless the request has entered already. Raises
        `ApiError`."""
        if not record.entered:
            await self.enter(record, self.check_key(headers))

    async def enter(self, record: RequestRecord, account: Account) -> None:
        """Check the limits of an account. Raises `ApiError`."""
        record.account, record.namespace = account, account.namespace
        CLIENT.set(account.id)  # of this task only: fair turns
        self.access.enter(account)
        # Only after `enter`: a rejected request must not lower the count when it ends.
        record.entered = True
        await self._check_limits(account)
        record.reservation = self.limiter.reservation(account)

    async def check_rate(self, account: Account) -> None:
        """Count a request that costs nothing, such as one for a file, towards the rate of its key.
        Raises `ApiError`."""
        await self._check_limits(replace(account, usd_per_month=None))

    async def _check_limits(self, account: Account) -> None:
        if (wait := await self.limiter.admit(account)) is not None:
            raise ApiError(
                f"this key may send {plural(account.requests_per_minute or 0, 'request')} per"
                f" minute; the next one is admitted in {math.ceil(wait)} s",
                status=429,
                code="rate_limit_exceeded",
                headers={
                    "retry-after": str(math.ceil(wait)),
                    "retry-after-ms": f"{wait * 1000:.0f}",
                },
                hint="wait, or ask the operator for more requests per minute",
            )

    async def _check_access(self, account: Account, overrides: Overrides, namespace: str) -> None:
        if overrides.tier is not None:
            self.access.check_tiers(account, [overrides.tier])
        if overrides.master_rate is not None:  # picks the first or the last tier at random
            served = self.completer.served
            self.access.check_tiers(account, [served[0].name, served[-1].name])
        await self.access.check_namespace(account, namespace)

    async def _images(self, job: ChatJob) -> dict[str, Image]:
        """Return the images that this request needs, by URL. Images of a request that is forwarded
        unchanged are not decoded."""
        if not job.request.images:
            return {}
        may_repeat = self.response_cache.enabled and job.overrides.replay
        wanted = job.bypass is None and (may_repeat or self._needs_pipeline(job))
        fetches = not job.request.keeps_image_urls
        parts = [part for part in job.request.images if wanted or (fetches and is_web(part.url))]
        images = await read_images(parts, self.fetch, self.limits) if parts else {}
        if images:
            await self.decoding.check(images.values())
        return images

    def _passes_urls(self, request: ChatRequest) -> bool:
        """Return whether an upstream fetches images: the gateway cannot. Raises `ApiError`."""
        if not request.images:
            return False
        web = [part for part in request.images if is_web(part.url)]
        able = any(served.capabilities.image_urls for served in self.completer.served)
        if not web or not able or self.fetch is not None:
            return False
        check_passed_urls(web)
        return True

    def _needs_pipeline(self, job: ChatJob) -> bool:
        """Return whether anything is retrieved, stored or routed for this request."""
        return job.bypass is None and (
            job.overrides.retrieve
            or job.overrides.store
            or job.overrides.tier is None
            or any(served.prompt is not None for served in self.completer.served)
        )

    async def _query(self, job: ChatJob, images: Mapping[str, Image]) -> TenantQuery | None:
        if not self._needs_pipeline(job):
            return None
        try:
            tenant = await self.tenants.open(job.record.namespace)
        except (StoreError, EmbeddingError, SettingError) as error:  # answer without examples
            job.record.degraded = True
            self.finalizer.warn("the cache cannot be opened", error)
            return None
        shown = [images[part.url] for part in job.request.images]
        query = to_query(job.request, shown, tenant.pipeline.choices)
        chosen = tenant.variants.get(job.record.variant, tenant)
        return TenantQuery(query, chosen, images, tenant)

    async def _key(self, job: ChatJob, images: Mapping[str, Image]) -> str | None:
        cache = self.response_cache
        if not (cache.enabled and job.overrides.replay) or job.bypass is not None:
            return None
        if any(map(is_web, images)):  # another image may be there next time
            return None

        def digest_all() -> dict[str, str]:
            return {url: image_digest(image, cache.identity) for url, image in images.items()}

        if cache.identity == "pixels":
            work = partial(asyncio.to_thread, digest_all)
            digests = await self.decoding.run(images.values(), work, Image.strips_cost)
        else:
            digests = digest_all()
        # Overrides by the model's name and by headers are equivalent.
        overrides = replace(job.overrides, store=True, namespace=None)
        body = {name: value for name, value in job.request.body.items() if name != "model"}
        request = replace(job.request, body=body)
        variant = self.experiment.reply_scope(job.record.variant) if self.experiment else ()
        scope = (job.record.namespace, repr(overrides), *variant)
        return exact_key(request, digests, scope=scope, sampled=cache.sampled)

    async def _stored(self, key: str, query: TenantQuery) -> CachedReply | None:
        if self.stored is None:
            return None
        try:
            found = await asyncio.to_thread(self.stored.find, key, query.tenant.example)
        except StoreError as error:
            self.finalizer.warn("stored repeats not read", error)
            return None
        if found is None:
            return None
        self.response_cache.replies.put(key, *found)
        return found[0]

    async def _answer(self, job: ChatJob, leading: AsyncExitStack, remember: Land) -> HttpReply:
        try:
            return await self._answer_of_tier(job, leading, remember)
        except BottegaError:
            await self.finalizer.failed(job)
            raise

    async def _answer_of_tier(
        self, job: ChatJob, leading: AsyncExitStack, remember: Land
    ) -> HttpReply:
        record, request = job.record, job.request
        record.state, record.reason = (
            ("passed_through", job.bypass) if job.bypass else ("answered", "")
        )
        async with leading:
            if request.stream and not self.completer.needs_full_answer(job):
                stream = await self.completer.stream(job)
                self._note_call(job, stream.call, stream.failed)
                # The stream outlives this call, and identical requests wait until it ends.
                events = self._events(job, stream, leading.pop_all(), remember)
                return HttpReply(headers_of(record), events=events, is_live=True)
            result = await self.completer.complete(job)
            self._note_call(job, result.call, result.failed)
            await self._finalize(job, result)
            # After `_finalize`, which sets the example that the headers name.
            headers = headers_of(record)
            _land(result.completed, record, remember)
        payload = result.completed.payload
        if request.stream:
            return HttpReply(headers, events=as_stream(payload, request.include_usage))
        return HttpReply(headers, payload)

    async def _finalize(self, job: ChatJob, result: ChatResult) -> None:
        await self.finalizer(job, result)
        if self.shadow is not None:
            self.shadow.after(job, result)

    def _note_call(self, job: ChatJob, call: UpstreamCall, failed: Sequence[str]) -> None:
        record = job.record
        record.route, record.model = call.served.name, call.served.upstream.model
        record.shots, record.similarity = len(call.shown), call.similarity
        if record.similarity is None and job.query is not None:
            record.similarity = job.query.tenant.best(job.query.query)
        record.fallback = ",".join(failed)

    async def _events(
        self, job: ChatJob, stream: ChatStream, leading: AsyncExitStack, remember: Land
    ) -> AsyncGenerator[bytes]:
        record, call = job.record, stream.call
        received = ReceivedChunks()
        completed: ChatCompletion | None = None
        has_failed = False
        async with leading:
            try:
                async for chunk in stream.chunks:
                    received.add(chunk)
                    if job.request.include_usage or not has_only_usage(chunk):
                        yield to_event(chunk)
                completed = from_chunks(received.chunks)
                job.bill.paid(call, completed.usage)
            except BottegaError as error:
                has_failed = True
                record.tier_errors.append(f"{call.served.name}: {error}")
                api_error = note_failure(record, error, call.served.name)
                await self.finalizer.failed(job)
                # The status 200 is sent already, so the error is an event of the stream.
                yield to_event(api_error.body)
                return
            finally:
                if completed is None:
                    # Only a client that left pays for time: a stalled upstream may take minutes.
                    silent = (received.first_text or perf_counter()) - stream.started
                    job.bill.cut_off(call, 0.0 if has_failed else silent, received.chunks)
                await stream.chunks.aclose()
            # Before `[DONE]`: a client that has read it finds the stored example.
            await self._finalize(job, ChatResult(call, completed))
            _land(completed, record, remember)
        if self.commit is not None:
            await self.commit(record)
        if record.stored is not None:  # a comment: clients do not see it
            yield f": stored {record.stored}\n\n".encode()
        yield DONE_EVENT


async def _error_event(error: ApiError) -> AsyncGenerator[bytes]:
    yield to_event(error.body)


def overrides_of(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith(PREFIX)}


def _land(completed: ChatCompletion, record: RequestRecord, remember: Land) -> None:
    if is_repeatable(completed.completions) and not record.degraded:
        remember(CachedReply(completed.payload, record.route, record.model))


def replayed(record: RequestRecord, repeated: RepeatedRequest, reply: CachedReply) -> HttpReply:
    record.state, record.namespace = "replayed", repeated.namespace
    record.variant = repeated.variant
    record.route, record.model = reply.route, reply.model
    headers = headers_of(record)
    if repeated.stream:
        return HttpReply(headers, events=as_stream(reply.payload, repeated.include_usage))
    return HttpReply(headers, reply.payload)
