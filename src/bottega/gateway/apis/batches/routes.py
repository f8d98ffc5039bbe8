"""Endpoints for files and batches, in the format of the OpenAI API."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from bottega.errors import BottegaError
from bottega.gateway.accounting.access import Access
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.apis.batches.batch_records import COMPLETION_WINDOW, BatchStatus
from bottega.gateway.apis.batches.execution import DAY, HOUR
from bottega.gateway.apis.batches.store import BatchStore, storage_full
from bottega.gateway.apis.embeddings import EMBEDDINGS
from bottega.gateway.apis.text_completions import COMPLETIONS
from bottega.gateway.apis.translation import (
    FieldNames,
    optional_field,
    text_field,
    typed,
    unsupported,
    wrong_value,
)
from bottega.gateway.config.gateway_settings import MB, BatchSettings
from bottega.gateway.errors import FINAL, to_api_error
from bottega.gateway.request.chat import Gateway
from bottega.gateway.request.reading import limited, too_large
from bottega.openai_api.errors import ApiError

log = logging.getLogger(__name__)

ENDPOINTS = ("/v1/chat/completions", "/v1/responses", EMBEDDINGS[0], COMPLETIONS[0])
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
MAX_FORM_FIELD = MAX_BODY = 64 * 1024
MAX_UNFINISHED = 100  # batches of one key
MAX_METADATA, MAX_METADATA_NAME, MAX_METADATA_VALUE = 16, 64, 512  # pairs, characters
PAGE, MAX_PAGE = 20, 100
FILE_PAGE, MAX_FILE_PAGE = 1000, 10_000
MIN_SECONDS = 3600
FIELDS = FieldNames({}, "", "batches reference")
BATCH_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")
BatchHandler = Callable[[Request, Account, BatchStore], Awaitable[object]]
UPLOAD = 'send a multipart form with the fields file and purpose="batch"'


def batch_routes(
    gateway: Gateway, store: BatchStore | None, settings: BatchSettings, wake: Callable[[], None]
) -> list[BaseRoute]:
    """Return the routes for files and batches. `wake` is called after a batch was added or
    cancelled. Without a `store`, all routes return 501."""
    handlers = _BatchHandlers(gateway.access, settings, wake)
    endpoints: list[tuple[str, str, BatchHandler]] = [
        ("POST", "/files", handlers.upload),
        ("GET", "/files", handlers.list_files),
        ("GET", "/files/{id}", handlers.show_file),
        ("DELETE", "/files/{id}", handlers.delete_file),
        ("GET", "/files/{id}/content", handlers.content),
        ("POST", "/batches", handlers.create),
        ("GET", "/batches", handlers.list_batches),
        ("GET", "/batches/{id}", handlers.show_batch),
        ("POST", "/batches/{id}/cancel", handlers.cancel),
    ]
    return [
        Route(f"/v1{path}", _handle(gateway, store, handler), methods=[method])
        for method, path, handler in endpoints
    ]


def _handle(
    gateway: Gateway, store: BatchStore | None, handler: BatchHandler
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        account = gateway.check_key(request.headers)
        if store is None:
            raise ApiError(
                "files and batches are not available: they are off, or the state is shared",
                status=501,
                code="batches_unavailable",
                headers=FINAL,
                hint="ask the operator for a gateway without [state] and with"
                " batches.concurrency above 0, or send the requests one by one",
            )
        await gateway.check_rate(account)
        try:
            found = await handler(request, account, store)
        except ApiError as error:
            raise FIELDS.renamed(error, None) from error
        except BottegaError as error:
            log.warning("%s %s failed: %s", request.method, request.url.path[:100], error)
            raise to_api_error(error) from error
        if isinstance(found, Response):
            return found
        return Response(orjson.dumps(found), 200, HEADERS, "application/json")

    return handle


@dataclass(frozen=True)
class _BatchHandlers:
    access: Access
    settings: BatchSettings
    wake: Callable[[], None]

    async def upload(self, request: Request, account: Account, store: BatchStore) -> object:
        self.access.enter(account)
        try:
            return await self._store_upload(request, account, store)
        finally:
            self.access.leave(account)

    async def _store_upload(self, request: Request, account: Account, store: BatchStore) -> object:
        max_bytes, storage = self.settings.file_mb * MB, self.settings.storage_mb * MB
        used = await asyncio.to_thread(store.used_bytes, account.id)
        length = request.headers.get("content-length", "0")
        # Before the upload is received; `add_file` checks the exact size.
        if used + int(length if length.isdecimal() else 0) > storage + MAX_FORM_FIELD:
            raise storage_full(storage)
        error = too_large("the file", f"{max_bytes:,} bytes", "split it into several batches")
        receive = limited(request.receive, max_bytes + MAX_FORM_FIELD, error)
        try:
            form = await Request(request.scope, receive).form(
                max_files=1, max_fields=8, max_part_size=MAX_FORM_FIELD
            )
        except HTTPException as error:
            raise ApiError(f"the form is invalid: {error.detail}", hint=UPLOAD) from error
        try:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise ApiError("Missing required parameter: 'file'.", param="file", hint=UPLOAD)
            if form.get("purpose") != "batch":
                wrong_value("purpose", "batch", form.get("purpose"))
            stored = await asyncio.to_thread(
                store.add_file,
                account.id,
                file.filename or "batch.jsonl",
                file.file,
                limit=storage,
                lifetime=_lifetime(form, self.settings.keep_days * DAY),
                max_files=self.settings.max_files,
            )
        finally:
            await form.close()
        return stored.json()

    async def list_files(self, request: Request, account: Account, store: BatchStore) -> object:
        query = request.query_params
        found, more = await asyncio.to_thread(
            store.files,
            account.id,
            purpose=query.get("purpose"),
            after=query.get("after"),
            limit=_limit(request, FILE_PAGE, MAX_FILE_PAGE),
            ascending=query.get("order") == "asc",
        )
        return _page([file.json() for file in found], more)

    async def show_file(self, request: Request, account: Account, store: BatchStore) -> object:
        return (await asyncio.to_thread(store.file, account.id, _id(request))).json()

    async def delete_file(self, request: Request, account: Account, store: BatchStore) -> object:
        await asyncio.to_thread(store.delete_file, account.id, _id(request))
        return {"id": _id(request), "object": "file", "deleted": True}

    async def content(self, request: Request, account: Account, store: BatchStore) -> object:
        file = await asyncio.to_thread(store.file, account.id, _id(request))
        return FileResponse(store.path(file.id), 200, HEADERS, "application/octet-stream")

    async def create(self, request: Request, account: Account, store: BatchStore) -> object:
        given = await _body(request)
        for name in given:
            if name not in BATCH_FIELDS:
                message = f"'{name[:64]}' is not supported"
                raise unsupported(message, name[:64], f"use {', '.join(BATCH_FIELDS)}")
        input_file = text_field(given, "input_file_id")
        endpoint = text_field(given, "endpoint")
        if endpoint not in ENDPOINTS:
            wrong_value("endpoint", f"one of {', '.join(ENDPOINTS)}", endpoint)
        if given.get("completion_window") != COMPLETION_WINDOW:
            wrong_value("completion_window", COMPLETION_WINDOW, given.get("completion_window"))
        batch = await asyncio.to_thread(
            store.add_batch,
            account.id,
            endpoint,
            input_file,
            _metadata(given),
            expires=time.time() + self.settings.expire_hours * HOUR,
            limit=MAX_UNFINISHED,
            max_batches=self.settings.max_files,
        )
        self.wake()
        return batch.json()

    async def list_batches(self, request: Request, account: Account, store: BatchStore) -> object:
        found, more = await asyncio.to_thread(
            store.batches,
            account.id,
            after=request.query_params.get("after"),
            limit=_limit(request, PAGE, MAX_PAGE),
        )
        return _page([batch.json() for batch in found], more)

    async def show_batch(self, request: Request, account: Account, store: BatchStore) -> object:
        return (await asyncio.to_thread(store.batch, account.id, _id(request))).json()

    async def cancel(self, request: Request, account: Account, store: BatchStore) -> object:
        batch = await asyncio.to_thread(store.batch, account.id, _id(request))
        before: tuple[BatchStatus, ...] = ("validating", "in_progress")
        if not await asyncio.to_thread(store.change_status, batch.id, "cancelling", before=before):
            batch = await asyncio.to_thread(store.batch, account.id, batch.id)
            if batch.status not in ("cancelling", "cancelled"):
                message = f"the batch cannot be cancelled, its status is {batch.status}"
                raise ApiError(message, status=409, code="batch_ended", hint="read its results")
        self.wake()
        return (await asyncio.to_thread(store.batch, account.id, batch.id)).json()


async def _body(request: Request) -> dict[str, Any]:
    error = too_large("the body", f"{MAX_BODY:,} bytes", "send less metadata")
    raw = await Request(request.scope, limited(request.receive, MAX_BODY, error)).body()
    try:
        return typed(orjson.loads(raw), dict, "", "an object")
    except orjson.JSONDecodeError as error:
        message = f"We could not parse the JSON body of your request: {error.msg}."
        raise ApiError(message, code="invalid_json", hint="send one JSON object") from error


def _lifetime(form: FormData, longest: float) -> float:
    """Return the seconds until a file expires."""
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return longest
    if anchor != "created_at":
        wrong_value("expires_after.anchor", "created_at", anchor)
    if not (isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 12):
        wrong_value("expires_after.seconds", "a whole number", seconds)
    return min(max(int(seconds), MIN_SECONDS), longest)


def _metadata(given: dict[str, Any]) -> dict[str, str] | None:
    metadata = optional_field(given, "metadata", dict)
    if metadata is not None and len(metadata) > MAX_METADATA:
        wrong_value("metadata", f"at most {MAX_METADATA} pairs", len(metadata))
    for name, value in (metadata or {}).items():
        where = f"metadata.{name[:MAX_METADATA_NAME]}"
        if len(name) > MAX_METADATA_NAME:
            wrong_value(where, f"a name of at most {MAX_METADATA_NAME} characters", len(name))
        if len(typed(value, str, where)) > MAX_METADATA_VALUE:
            wrong_value(where, f"at most {MAX_METADATA_VALUE} characters", len(value))
    return metadata


def _limit(request: Request, default: int, largest: int) -> int:
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 0 < int(text) <= largest):
        wrong_value("limit", f"a whole number from 1 to {largest}", text[:40])
    return int(text)


def _page(data: list[dict[str, object]], more: bool) -> object:
    ids = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, **ids, "has_more": more}


def _id(request: Request) -> str:
    return str(request.path_params["id"])
