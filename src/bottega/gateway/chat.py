"""How a chat completion goes: who asks, was it asked before, who answers, what is kept."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from time import perf_counter

from bottega.errors import BottegaError, EmbeddingError, StoreError
from bottega.gateway.accounting.access import Access
from bottega.gateway.accounting.accounts import Account
from bottega.gateway.accounting.limiter import Limiter
from bottega.gateway.completion import Answered, Answering, Asked, Question, Streaming
from bottega.gateway.decode_budget import CLIENT, DecodeBudget
from bottega.gateway.endpoint import ANONYMOUS, Reply, RequestRecord
from bottega.gateway.errors import to_api_error, unknown_key
from bottega.gateway.fields import allowed_fields
from bottega.gateway.finalization import Finalizer
from bottega.gateway.images import Fetch, is_web, pictures, with_fetched
from bottega.gateway.limits import Limits
from bottega.gateway.origins import check_origin
from bottega.gateway.overrides import PREFIX, Overrides, read_overrides
from bottega.gateway.ports import Call, Tenants
from bottega.gateway.reply import again, headers_of, replayed
from bottega.gateway.requests import BACKGROUND, Chat, read_chat
from bottega.gateway.response_cache.keys import Identity, exact_key, image_digest
from bottega.gateway.response_cache.memory import (
    Asked as AskedBefore,
)
from bottega.gateway.response_cache.memory import (
    Bodies,
    Flights,
    Remembered,
    Repeats,
    may_be_repeated,
)
from bottega.gateway.response_cache.replay import StoredRepeats
from bottega.gateway.shadow import ShadowRunner
from bottega.image import Image
from bottega.openai_api.chunks import count_tokens, from_chunks, has_only_usage
from bottega.openai_api.errors import ApiError
from bottega.openai_api.response import ChatCompletion
from bottega.openai_api.sse import DONE_EVENT, to_event

Land = Callable[[Remembered], None]


@dataclass(frozen=True)
class Replaying:
    """What an exact repeat is, and what is remembered for it."""

    repeats: Repeats
    bodies: Bodies
    flights: Flights
    identity: Identity = "bytes"
    sampled: bool = False


@dataclass
class Gateway:
    """`models` maps the model ids that clients may use to tiers, "" for the router's choice.
    Without `authenticate` everybody may ask: for loopback only."""

    answering: Answering
    tenants: Tenants
    settle: Finalizer
    models: Mapping[str, str]
    limits: Limits = field(default_factory=Limits)
    shadowing: ShadowRunner | None = None
    authenticate: Callable[[str | None], Account | None] | None = None
    limiter: Limiter | None = None
    access: Access | None = None
    replaying: Replaying | None = None
    stored: StoredRepeats | None = None
    fetch: Fetch | None = None
    allowed_hosts: Collection[str] = ()
    decoding: DecodeBudget = field(default_factory=DecodeBudget)
    more_fields: frozenset[str] = frozenset()
    background: re.Pattern[str] = field(default_factory=lambda: re.compile(BACKGROUND))

    def __post_init__(self) -> None:
        # Most clients ask in one manner only; what they may write is bounded here.
        self._overrides = lru_cache(1024)(
            lambda model, given: read_overrides(model, dict(given), self.models)
        )

    async def answer(
        self,
        record: RequestRecord,
        headers: Mapping[str, str],
        body: Callable[[], Awaitable[bytes]],
    ) -> Reply:
        """Raises `ApiError` and the errors of tiers."""
        self._admit(record, headers)
        raw = await body()
        given = {name: value for name, value in headers.items() if name.startswith(PREFIX)}
        told = (f"{name}={value}" for name, value in sorted(given.items()))
        # A repeat skips the checks below, so everything that they depend on is part of its key.
        tiers = self.access.tiers_of(record.account) if self.access is not None else ()
        rights = f"admin={record.account.admin} tiers={','.join(tiers)}"
        scope = (record.namespace, rights, *told)
        if known := self._known(raw, scope):
            return replayed(record, *known)
        allowed = allowed_fields(self.limits.read(raw), self.more_fields)
        chat = read_chat(allowed, background=self.background)
        overrides = self._overrides(chat.model, tuple(given.items()))
        namespace = _namespace(record.account, overrides)
        await self._check_access(record.account, overrides, namespace)
        # Set after the checks: metrics and ledger must not count refused names.
        record.namespace = namespace
        found = await self._pictures(chat, overrides)
        if any(map(is_web, found)):
            body_with_fetched = partial(asyncio.to_thread, with_fetched, chat.body, found)
            fetched = await self.decoding.run(found.values(), body_with_fetched, Image.wire_cost)
            chat = replace(chat, body=fetched)
        question = await self._question(chat, overrides, record, found)
        key = await self._key(chat, overrides, record.namespace, found)
        bill = self.settle.bill(record, chat)
        may_use_master = self._may_use_master(record.account)
        asked = Asked(chat, overrides, bill, question, key, may_use_master)
        if key is None or self.replaying is None:
            return await self._fresh(record, asked, ExitStack(), _ignore)
        before = AskedBefore(key, chat.stream, chat.include_usage, record.namespace)
        self.replaying.bodies.put(raw, scope, before, [image.url for image in chat.images])
        reply = self.replaying.repeats.get(key)
        if reply is None and question is not None:
            reply = await self._stored(key, question)
        # No other await before `lead`: otherwise two identical requests would both lead.
        reply = reply or await self.replaying.flights.wait(key)
        if reply is not None:
            return replayed(record, before, reply)
        leading = ExitStack()
        land = leading.enter_context(self.replaying.flights.lead(key))
        return await self._fresh(record, asked, leading, self._lander(key, land))

    def check_key(self, headers: Mapping[str, str]) -> Account:
        """Whose key the headers bear. Raises `ApiError`."""
        if self.authenticate is None:
            check_origin(headers.get("origin"), self.allowed_hosts)
            return ANONYMOUS
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else ""
        account = self.authenticate(key or None)
        if account is None:
            raise unknown_key(key)
        return account

    def models_of(self, account: Account) -> list[str]:
        """Return the model ids that the key may request."""
        access = self.access
        if access is None or account is ANONYMOUS:
            return list(self.models)
        tiers = self.models.items()
        return [id for id, tier in tiers if not tier or access.may_choose(account, tier)]

    def _admit(self, record: RequestRecord, headers: Mapping[str, str]) -> None:
        account = self.check_key(headers)
        record.account, record.namespace = account, account.namespace
        CLIENT.set(account.id)
        if self.access is not None and account is not ANONYMOUS:
            self.access.enter(account)
            record.entered = True
        if self.limiter is None:
            return
        wait = self.limiter.admit(account)
        if wait is not None:
            raise ApiError(
                "this key has asked too often",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={
                    "retry-after": str(math.ceil(wait)),
                    "retry-after-ms": f"{wait * 1000:.0f}",
                },
                hint="wait, or ask the operator for more requests per minute",
            )
        record.hold = self.limiter.hold(account)

    def _may_use_master(self, account: Account) -> bool:
        master = self.answering.served[-1].name
        if self.access is None or account is ANONYMOUS:
            return True
        return self.access.may_reach(account, master)

    async def _check_access(self, account: Account, overrides: Overrides, namespace: str) -> None:
        if self.access is None or account is ANONYMOUS:
            return
        if overrides.tier is not None:
            self.access.check_tiers(account, [overrides.tier])
        if overrides.master_rate is not None:  # picks the first or the last tier at random
            served = self.answering.served
            self.access.check_tiers(account, [served[0].name, served[-1].name])
        await self.access.check_namespace(account, namespace)

    def _known(self, raw: bytes, scope: tuple[str, ...]) -> tuple[AskedBefore, Remembered] | None:
        """A body that was understood before, and whose reply is remembered."""
        if self.replaying is None:
            return None
        before = self.replaying.bodies.get(raw, scope)
        reply = self.replaying.repeats.get(before.key) if before is not None else None
        return None if before is None or reply is None else (before, reply)

    async def _pictures(self, chat: Chat, overrides: Overrides) -> dict[str, Image]:
        """What must be looked at: nobody decodes the images of what passes straight through."""
        replays = self.replaying is not None and overrides.replay
        wanted = chat.passes is None and (replays or self._may_ask(chat, overrides))
        parts = [one for one in chat.images if wanted or is_web(one.url)]
        found = await pictures(parts, self.fetch, self.limits, chat.body) if parts else {}
        self.limits.check_fetched(found.values(), "messages")
        if found:
            await asyncio.to_thread(self.decoding.check, found.values())
        return found

    def _may_ask(self, chat: Chat, overrides: Overrides) -> bool:
        """Whether anything is looked up or kept for this request."""
        return chat.passes is None and (
            overrides.retrieve
            or overrides.store
            or overrides.tier is None
            or any(one.prompt is not None for one in self.answering.served)
        )

    async def _question(
        self, chat: Chat, overrides: Overrides, record: RequestRecord, found: Mapping[str, Image]
    ) -> Question | None:
        if not self._may_ask(chat, overrides):
            return None
        try:
            tenant = await self.tenants.open(record.namespace)
        except (StoreError, EmbeddingError) as error:  # examples are not worth an answer
            self.settle.warn("the cache cannot be opened", error)
            return None
        query = chat.query([found[one.url] for one in chat.images])
        query = replace(query, choices=tenant.pipeline.choices)
        return Question(query, tenant, found)

    async def _key(
        self, chat: Chat, overrides: Overrides, namespace: str, found: Mapping[str, Image]
    ) -> str | None:
        replaying = self.replaying
        if replaying is None or not overrides.replay or chat.passes is not None:
            return None
        if replaying.identity == "pixels":
            decoded = partial(asyncio.to_thread, _digests, found, replaying.identity)
            digests = await self.decoding.run(found.values(), decoded, Image.strips_cost)
        else:
            digests = _digests(found, replaying.identity)
        # What is asked for by the model's name or by headers, however it is said.
        scope = (namespace, repr(replace(overrides, store=True, namespace=None)))
        body = {name: value for name, value in chat.body.items() if name != "model"}
        return exact_key(body, digests, scope=scope, sampled=replaying.sampled)

    async def _stored(self, key: str, question: Question) -> Remembered | None:
        if self.stored is None or self.replaying is None:
            return None
        try:
            found = await asyncio.to_thread(self.stored.find, key, question.tenant.example)
        except StoreError as error:
            self.settle.warn("stored repeats not read", error)
            return None
        if found is None:
            return None
        reply, age = found
        self.replaying.repeats.put(key, reply, age)
        return reply

    def _lander(self, key: str, land: Land) -> Land:
        assert self.replaying is not None
        repeats = self.replaying.repeats

        def remember(reply: Remembered) -> None:
            repeats.put(key, reply)
            land(reply)

        return remember

    async def _fresh(
        self, record: RequestRecord, asked: Asked, leading: ExitStack, remember: Land
    ) -> Reply:
        chat = asked.chat
        record.state, record.why = ("passed", chat.passes) if chat.passes else ("answered", "")
        with leading:
            if chat.stream and not self.answering.may_go_on(asked):
                streaming = await self.answering.stream(asked)
                self._begun(record, asked, streaming.call, streaming.failed)
                events = self._events(record, asked, streaming, leading.pop_all(), remember)
                return Reply(headers_of(record), events=events)
            answered = await self.answering.complete(asked)
            self._begun(record, asked, answered.call, answered.failed)
            await self._settled(record, asked, answered)
            headers = headers_of(record)
            _land(answered.completed, record, remember)
        payload = answered.completed.payload
        if chat.stream:
            return Reply(headers, events=again(payload, chat.include_usage))
        return Reply(headers, payload)

    async def _settled(self, record: RequestRecord, asked: Asked, answered: Answered) -> None:
        await self.settle(record, asked, answered)
        if self.shadowing is not None:
            self.shadowing.after(record, asked, answered)

    def _begun(
        self, record: RequestRecord, asked: Asked, call: Call, failed: Sequence[str]
    ) -> None:
        record.route, record.model = call.served.name, call.served.upstream.model
        record.shots, record.similarity = len(call.shown), call.similarity
        if record.similarity is None and asked.question is not None:
            record.similarity = asked.question.tenant.best(asked.question.query)
        record.fallback = ",".join(failed)

    async def _events(
        self,
        record: RequestRecord,
        asked: Asked,
        streaming: Streaming,
        leading: ExitStack,
        remember: Land,
    ) -> AsyncGenerator[bytes]:
        steps: list[bytes] = []
        first_text: float | None = None  # on the clock of `streaming.started`
        completed: ChatCompletion | None = None
        has_failed = False
        with leading:
            try:
                async for payload in streaming.events:
                    steps.append(payload)
                    if first_text is None and count_tokens([payload]):
                        first_text = perf_counter()
                    if asked.chat.include_usage or not has_only_usage(payload):
                        yield to_event(payload)
                completed = from_chunks(steps)
                asked.bill.paid(streaming.call, completed.usage)
            except BottegaError as error:
                has_failed = True
                refusal = to_api_error(error)
                record.state, record.status = "failed", refusal.status
                record.why = refusal.code or type(error).__name__
                yield to_event(refusal.body)
                return
            finally:
                if completed is None:
                    # Only a client that left pays for time: a stalled upstream may take minutes.
                    silent = (first_text or perf_counter()) - streaming.started
                    seconds = 0.0 if has_failed else silent
                    asked.bill.cut_off(streaming.call, seconds, steps)
                await streaming.events.aclose()
            await self._settled(record, asked, Answered(streaming.call, completed))
            _land(completed, record, remember)
        if record.stored is not None:  # a comment: clients do not see it
            yield f": stored {record.stored}\n\n".encode()
        yield DONE_EVENT


def _ignore(reply: Remembered) -> None:
    pass


def _land(completed: ChatCompletion, record: RequestRecord, remember: Land) -> None:
    if may_be_repeated(completed.completions):
        remember(Remembered(completed.payload, record.route, record.model))


def _digests(found: Mapping[str, Image], identity: Identity) -> dict[str, str]:
    return {url: image_digest(image, identity) for url, image in found.items()}


def _namespace(account: Account, overrides: Overrides) -> str:
    """A key sees its own namespace and what it names below it; an operator's key sees all."""
    own, wanted = account.namespace, overrides.namespace
    if wanted is None or wanted == own:
        return own
    if account is ANONYMOUS or account.admin or (own and wanted.startswith(f"{own}/")):
        return wanted
    raise ApiError(
        f"this key has no access to the namespace {wanted[:100]!r}",
        status=403,
        type="permission_error",
        code="namespace_forbidden",
        hint=f"leave it out, or name one below {own!r}/" if own else "leave it out",
    )
