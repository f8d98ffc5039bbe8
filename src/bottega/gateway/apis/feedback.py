"""Feedback endpoint: ratings, comments, and corrections that become demonstrations."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from bottega._util.caching import FairSemaphore
from bottega._util.identity import identity, question_digest
from bottega.errors import BottegaError, NotFoundError
from bottega.gateway.accounting.access import may_use
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Account, Entry, Feedback
from bottega.gateway.accounting.reports import add_feedback, find_request
from bottega.gateway.apis.translation import (
    encode_body,
    optional_field,
    typed,
    unsupported,
    wrong_value,
)
from bottega.gateway.config.gateway_settings import FeedbackSettings
from bottega.gateway.config.overrides import MODEL
from bottega.gateway.errors import to_api_error
from bottega.gateway.request.cached_examples import HUMAN, Forget
from bottega.gateway.request.chat import Gateway
from bottega.gateway.request.jobs import to_query
from bottega.gateway.request.reading import MB, limited, read_images
from bottega.knowledge import And, Eq, KnowledgeBase
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import require
from bottega.types import Example, Query

FIELDS = (
    *("request_id", "response_id", "rating", "correction", "comment"),
    *("messages", "response_format"),
)
# Ids of replies that contain the id of their request.
REPLY_ID = re.compile(r"(?:req_|resp_|msg_|cmpl-)([0-9a-f]{32})")
MAX_COMMENT = 10_000


@dataclass(frozen=True)
class FeedbackEndpoint:
    """Handler of feedback. `open_cache` returns the gateway's own knowledge base of a namespace; it
    is None for a gateway without caches. `find_query` returns the stored question of a request by
    its id, with its context. Both block. `forget` is called with a namespace after its answers have
    changed, `observe` with each feedback."""

    gateway: Gateway
    ledger: Ledger
    settings: FeedbackSettings
    open_cache: Callable[[str], KnowledgeBase] | None = None
    find_query: Callable[[str], Query | None] = lambda id: None
    forget: Forget = lambda namespace: None
    observe: Callable[[Feedback], None] = lambda feedback: None
    _turns: FairSemaphore = field(default_factory=lambda: FairSemaphore(1, 1))

    def routes(self) -> list[BaseRoute]:
        return [Route("/v1/feedback", self._handle, methods=["POST"])]

    async def _handle(self, request: Request) -> Response:
        account = self.gateway.check_key(request.headers)
        self.gateway.access.enter(account)
        try:
            await self.gateway.check_rate(account)
            limits = self.gateway.limits
            receive = limited(request.receive, limits.body_mb * MB, limits.too_large)
            body = await Request(request.scope, receive).body()
            given = typed(limits.parse(body), dict, "", "an object")
            reply = await self.answer(account, given)
        except BottegaError as error:
            raise to_api_error(error) from error
        finally:
            self.gateway.access.leave(account)
        return Response(orjson.dumps(reply), media_type="application/json")

    async def answer(self, account: Account, given: dict[str, Any]) -> dict[str, object]:
        """Store the feedback of an account and return it. Raises `ApiError` and `StoreError`."""
        for name in given:
            if name not in FIELDS:
                message = f"'{name[:64]}' is not supported"
                raise unsupported(message, name[:64], f"use {', '.join(FIELDS)}")
        id, rating = _request_id(given), _rating(given.get("rating"))
        correction, comment = _text(given, "correction"), _text(given, "comment")
        if rating is None and correction is None and comment is None:
            raise ApiError("the feedback is empty", hint="send a rating, a correction or a comment")
        found = await self._find_request(account, id)
        example = None
        if correction is not None:
            example = await self._store_correction(account, found, id, correction, given)
        feedback = Feedback(
            *(time.time(), id, account.id, found.namespace, found.tier),
            *(rating, correction, comment, example),
        )
        await asyncio.to_thread(add_feedback, self.ledger, feedback)
        self.observe(feedback)
        shown = ("request_id", "rating", "correction", "comment", "example")
        return {"object": "feedback", **{name: getattr(feedback, name) for name in shown}}

    async def _find_request(self, account: Account, id: str) -> Entry:
        """Return the request if the key may see it. Raises `ApiError`."""
        found = await asyncio.to_thread(find_request, self.ledger, id)
        if found is None:  # its entry may still wait to be written
            await asyncio.to_thread(self.ledger.flush)
            found = await asyncio.to_thread(find_request, self.ledger, id)
        if found is None or not may_use(account, found.namespace):
            raise ApiError(
                f"no such request: {id!r}",
                status=404,
                code="not_found",
                param="request_id",
                hint="send the header x-request-id of a reply in a namespace of this key",
            )
        return found

    async def _store_correction(
        self, account: Account, found: Entry, id: str, answer: str, given: dict[str, Any]
    ) -> str:
        """Store a correction as a pinned demonstration. Return its id. Raises `ApiError`."""
        if self.open_cache is None or not (self.settings.corrections and account.can_store):
            raise ApiError(
                "this key may not correct answers",
                status=403,
                code="corrections_forbidden",
                param="correction",
                hint="ask the operator for a key without --no-store, and for"
                " feedback.corrections = true",
            )
        query = await self._query(found, id, given)
        tenant = await self.gateway.tenants.open(found.namespace)
        base = await asyncio.to_thread(self.open_cache, found.namespace)
        tags = {"context": query.context, "request": id, "provenance": HUMAN}
        if account.id:
            tags["account"] = account.id
        example = Example(query, answer, tags=tags, source=f"corrected by {account.name}")
        # In turn: two corrections must not both take the last place.
        async with self._turns.hold():
            await asyncio.to_thread(self._check_capacity, base, id, example)
            writer = tenant.writer
            stored = None if writer is None else await writer.store(example, pin=True)
        if stored is None or stored != identity(example):
            raise ApiError(
                "the correction cannot be stored",
                param="correction",
                hint="shorten it (cache.max_characters), or see the gateway's log",
            )
        await asyncio.to_thread(self.forget, found.namespace)
        return stored

    def _check_capacity(self, base: KnowledgeBase, id: str, example: Example) -> None:
        """Raise `ApiError` if no further question can be corrected. A second correction of a
        request replaces its first one if its question is the same."""
        limit, is_correction = self.settings.max_corrections, Eq("tags.provenance", HUMAN)
        if len(base.ids(where=is_correction)) < limit:
            return
        earlier = base.get_many(base.ids(where=And((is_correction, Eq("tags.request", id)))))
        if question_digest(example) not in map(question_digest, earlier):
            raise ApiError(
                f"this namespace has reached its limit of corrections, {limit}",
                status=403,
                code="too_many_corrections",
                param="correction",
                hint="ask the operator to unpin or delete some, or to raise"
                " feedback.max_corrections",
            )

    async def _query(self, found: Entry, id: str, given: dict[str, Any]) -> Query:
        """Return the question of the request with its images: from `messages`, from its stored
        trace, or from the example that its answer became."""
        if given.get("messages") is not None:
            return await self._given_query(given)
        stored = await asyncio.to_thread(self.find_query, id)
        if stored is not None:
            return stored
        example = await asyncio.to_thread(self._example, found.namespace, id)
        if example is not None:  # its context is a tag
            return replace(example.query, context=example.tags.get("context", ""))
        raise ApiError(
            "the gateway has not stored the question of this request",
            code="question_not_kept",
            param="correction",
            hint="send the question as messages, as in the request",
        )

    def _example(self, namespace: str, id: str) -> Example | None:
        assert self.open_cache is not None
        base = self.open_cache(namespace)
        while found := base.ids(where=Eq("tags.request", id)):
            with suppress(NotFoundError):  # a newer answer of the request may have replaced it
                return base.get(found[0])
        return None

    async def _given_query(self, given: dict[str, Any]) -> Query:
        gateway = self.gateway
        fields = {name: given[name] for name in ("messages", "response_format") if name in given}
        request = gateway.limits.read(encode_body(fields | {"model": MODEL}))
        if not request.is_single_turn:
            hint = "send the instructions and one question: later turns depend on earlier ones"
            raise unsupported("only questions of one turn can be corrected", "messages", hint)
        images = await read_images(request.images, gateway.fetch, gateway.limits)
        await gateway.decoding.check(images.values())
        return to_query(request, [images[part.url] for part in request.images])


def _request_id(given: dict[str, Any]) -> str:
    name = "response_id" if given.get("response_id") is not None else "request_id"
    require(given, name, "")
    id = typed(given[name], str, name)
    found = REPLY_ID.fullmatch(id)
    if found is None:
        # The id of a chat completion is the upstream's.
        wrong_value(name, "the header x-request-id of a reply, such as req_0a1b...", id[:64])
    return f"req_{found[1]}"


def _rating(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        wrong_value("rating", "true, false or a number from 0 to 1", value)
    return float(value)


def _text(given: dict[str, Any], name: str) -> str | None:
    text = optional_field(given, name, str)
    if text is None:
        return None
    if not text.strip() or len(text) > MAX_COMMENT:
        wrong_value(name, f"a text of 1 to {MAX_COMMENT:,} characters", f"{len(text)} characters")
    return text.strip()
