"""Administration API under /admin, for admin keys only: keys, savings and caches."""

from __future__ import annotations

import asyncio
import logging
import math
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from bottega._util.caching import CLIENT
from bottega.errors import BottegaError, NotFoundError
from bottega.gateway.accounting.access import bearer_token
from bottega.gateway.accounting.accounts import TOKEN, Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.accounting.savings import savings
from bottega.gateway.errors import status_of
from bottega.gateway.request.cached_examples import (
    Forget,
    delete_example,
    export_jsonl,
    fields_of,
    import_jsonl,
)
from bottega.gateway.request.reading import limited, too_large
from bottega.knowledge import And, Contains, Eq, Filter, KnowledgeBase
from bottega.openai_api.errors import ApiError

log = logging.getLogger(__name__)

HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
# Stored bytes may be HTML or SVG: browsers must not execute them.
IMAGE_HEADERS = {**HEADERS, "content-security-policy": "default-src 'none'; sandbox"}
MAX_IMPORT = 256 * 1024 * 1024
MAX_KEY_BODY = 64 * 1024
KEY_FIELDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "namespace": (str,),
    "admin": (bool,),
    "can_store": (bool,),
    "requests_per_minute": (int,),
    "usd_per_month": (int, float),
    "max_concurrent": (int,),
    "tiers": (list,),
    "max_namespaces": (int,),
    "expires": (int, float),
    "viewer": (bool,),
}
KEPT_SECONDS = {"keep_seconds": (int, float)}
PAGE, MAX_PAGE = 20, 200
MAX_OFFSET = 2**53
MAX_REPORTED = 100
IN_MEMORY = 1024 * 1024

# A handler runs in a thread and returns a response or a document for JSON.
AdminHandler = Callable[[Request], object]
AsyncHandler = Callable[[Request, Account], Awaitable[object]]


def admin_routes(
    accounts: Accounts,
    ledger: Ledger,
    open_cache: Callable[[str], KnowledgeBase],
    *,
    forget: Forget = lambda namespace: None,
    max_import: int = MAX_IMPORT,
) -> list[BaseRoute]:
    """Return the routes for keys, savings and caches. `open_cache` returns the gateway's own
    knowledge base of a namespace, which the handlers do not close. `forget` is called with a
    namespace after a deletion, since the response cache may still contain the deleted answers.
    Both are called in threads. The handlers raise `ApiError`."""
    admin = _Admin(accounts, ledger, open_cache, forget, max_import)

    def threaded(handler: AdminHandler) -> AsyncHandler:
        return lambda request, _: asyncio.to_thread(handler, request)

    handlers: list[tuple[str, str, AsyncHandler]] = [
        ("GET", "/keys", threaded(admin.list_keys)),
        ("POST", "/keys", admin.add_key),
        ("PATCH", "/keys/{id}", admin.change_key),
        ("POST", "/keys/{id}/rotate", admin.rotate_key),
        ("DELETE", "/keys/{id}", threaded(admin.revoke_key)),
        ("GET", "/savings", threaded(admin.savings)),
        ("GET", "/stats", threaded(admin.stats)),
        ("GET", "/cache", threaded(admin.browse)),
        ("GET", "/cache/{id}", threaded(admin.show)),
        ("DELETE", "/cache/{id}", threaded(admin.delete)),
        ("GET", "/cache/{id}/images/{number:int}", threaded(admin.image)),
        ("POST", "/cache/{id}/pin", threaded(admin.pin)),
        ("POST", "/cache/{id}/unpin", threaded(admin.unpin)),
        ("POST", "/import", admin.import_),
        ("GET", "/export", threaded(admin.export)),
    ]
    return [
        Route(f"/admin{path}", _require_admin(accounts, handler, path), methods=[method])
        for method, path, handler in handlers
    ]


def _require_admin(
    accounts: Accounts, handler: AsyncHandler, path: str
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        account = _check_admin(accounts, request)
        try:
            result = await handler(request, account)
        except BottegaError as error:
            raise _api_error(error) from error
        if request.method not in ("GET", "HEAD"):
            log.info("admin %s: %s /admin%s", account.id, request.method, path)
        return result if isinstance(result, Response) else _json_response(result)

    return handle


def _check_admin(accounts: Accounts, request: Request) -> Account:
    account = accounts.authenticate(bearer_token(request.headers) or None)
    if account is None:
        raise ApiError(
            "the administration API needs an admin key",
            status=401,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
            hint="create one with bottega keys add NAME --admin;"
            " send it as Authorization: Bearer KEY",
        )
    reads = request.method in ("GET", "HEAD")
    if not account.admin and not (account.viewer and reads):
        raise ApiError(
            "this key is not an admin key",
            status=403,
            code="not_an_admin",
            hint="create an admin key with bottega keys add NAME --admin",
        )
    CLIENT.set(account.id)  # of this task only: fair turns
    return account


def _json_response(document: object, status: int = 200) -> Response:
    headers = {**HEADERS, "content-type": "application/json"}
    return Response(orjson.dumps(document), status, headers)


def _api_error(error: BottegaError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    status = status_of(error)
    headers = {"retry-after": "1"} if error.retryable else {}
    return ApiError(str(error), status=status, headers=headers, hint=error.hint)


@dataclass(frozen=True)
class _Admin:
    accounts: Accounts
    ledger: Ledger
    open_cache: Callable[[str], KnowledgeBase]
    forget: Forget
    max_import: int

    def list_keys(self, request: Request) -> object:
        self.ledger.refresh_spending()  # other processes may have spent since the last write
        return {"keys": [self._describe_key(account) for account in self.accounts.list()]}

    async def add_key(self, request: Request, _: Account) -> object:
        """Create a key. No other response contains it."""
        fields = await _read_object(request, KEY_FIELDS)
        account, token = await asyncio.to_thread(self.accounts.add, **{"name": "", **fields})
        return _json_response({"key": token, "account": self._describe_key(account)}, 201)

    async def change_key(self, request: Request, _: Account) -> object:
        """Change the fields that the body has; null removes a limit."""
        fields = await _read_object(request, KEY_FIELDS, keep_null=True)
        account = await asyncio.to_thread(lambda: self.accounts.update(_id(request), **fields))
        return self._describe_key(account)

    async def rotate_key(self, request: Request, _: Account) -> object:
        """Replace a key. No other response contains the new one."""
        fields = await _read_object(request, KEPT_SECONDS)
        keep = fields.get("keep_seconds", 0.0)
        account, token = await asyncio.to_thread(
            self.accounts.rotate, _id(request), keep_seconds=keep
        )
        return {"key": token, "account": self._describe_key(account)}

    def revoke_key(self, request: Request) -> object:
        if TOKEN.fullmatch(_id(request)):
            raise ApiError(
                "keys are revoked by id, got a key",
                hint="use the id from GET /admin/keys: paths appear in logs",
            )
        return self._describe_key(self.accounts.revoke(_id(request)))

    def savings(self, request: Request) -> object:
        params = request.query_params
        return savings(
            self.ledger,
            namespace=params.get("namespace"),
            since=_since(params.get("since")),
            master=params.get("master"),
        )

    def _describe_key(self, account: Account) -> dict[str, object]:
        spent = self.ledger.spent_this_month(account.id)
        return {**asdict(account), "spent_this_month_usd": spent}

    def stats(self, request: Request) -> object:
        cache = self._cache(request)
        counted = asdict(cache.stats())
        del counted["path"]
        return {**counted, "namespaces": cache.namespaces()}

    def browse(self, request: Request) -> object:
        """List examples, newest first."""
        limit = _query_number(request, "limit", PAGE, MAX_PAGE)
        offset = _query_number(request, "offset", 0, MAX_OFFSET)
        cache = self._cache(request)
        found = cache.ids(where=_filter(request))[::-1]
        examples = []
        for id in found[offset : offset + limit]:
            with suppress(NotFoundError):  # deleted or evicted meanwhile
                examples.append(_describe_example(cache, id))
        return {"total": len(found), "offset": offset, "examples": examples}

    def show(self, request: Request) -> object:
        return _describe_example(self._cache(request), _id(request))

    def image(self, request: Request) -> object:
        """Return the stored bytes of an image."""
        example = self._cache(request).get(_id(request))
        images, number = example.query.images, int(request.path_params["number"])
        if number >= len(images):
            raise NotFoundError(
                f"image {number} does not exist, the example has {len(images)}",
                hint="use a number from 0, below the number of images",
            )
        return Response(images[number].data, 200, IMAGE_HEADERS, images[number].media_type)

    def delete(self, request: Request) -> object:
        cache = self._cache(request)
        removed = delete_example(cache, _namespace(request), _id(request), self.forget)
        return {"removed": removed, "examples": len(cache)}

    def pin(self, request: Request) -> object:
        cache = self._cache(request)
        return {"changed": cache.pin([_id(request)]), "pinned": cache.stats().pinned}

    def unpin(self, request: Request) -> object:
        cache = self._cache(request)
        return {"changed": cache.unpin([_id(request)]), "pinned": cache.stats().pinned}

    async def import_(self, request: Request, account: Account) -> object:
        """Import JSON lines and report the skipped ones. See `import_jsonl`."""
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as file:
            async for chunk in _limited(request, self.max_import).stream():
                await asyncio.to_thread(file.write, chunk)
            file.seek(0)
            return await asyncio.to_thread(self._import, file, request, account)

    def _import(self, lines: Iterable[bytes], request: Request, account: Account) -> object:
        cache = self._cache(request)
        report = import_jsonl(cache, lines, account.name)
        bad = report.skipped[:MAX_REPORTED]
        named = [{"reason": str(error), "hint": error.hint} for error in bad]
        return {
            "new": report.new,
            "duplicates": report.duplicates,
            "bad": len(report.skipped),
            "skipped": named,
            "examples": len(cache),
        }

    def export(self, request: Request) -> object:
        """Stream the examples as JSON lines."""
        headers = {**HEADERS, "content-disposition": 'attachment; filename="cache.jsonl"'}
        lines = export_jsonl(self._cache(request))
        return StreamingResponse(lines, 200, headers, "application/x-ndjson")

    def _cache(self, request: Request) -> KnowledgeBase:
        return self.open_cache(_namespace(request))


def _limited(request: Request, max_bytes: int) -> Request:
    error = too_large("the body", f"{max_bytes:,} bytes", "send it in several parts")
    return Request(request.scope, limited(request.receive, max_bytes, error))


async def _read_object(
    request: Request, fields: Mapping[str, tuple[type, ...]], *, keep_null: bool = False
) -> dict[str, Any]:
    """Read a JSON object with no other fields than these. A field with null counts as absent unless
    `keep_null`. Raises `ApiError`."""
    try:
        row = orjson.loads(await _limited(request, MAX_KEY_BODY).body())
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error.msg}", hint="send an object") from error
    if not isinstance(row, dict):
        raise ApiError("the body is not an object", hint=f"send an object with {', '.join(fields)}")
    for name, value in row.items():
        if name not in fields:
            raise ApiError(f"{name[:40]!a} is not a field", hint=f"use {', '.join(fields)}")
        # An exact comparison, since isinstance(True, int).
        if value is not None and type(value) not in fields[name]:
            raise ApiError(
                f"{name} has the wrong type, got {type(value).__name__}",
                param=name,
                hint="use the type in docs/administration.md",
            )
    return {name: value for name, value in row.items() if keep_null or value is not None}


def _query_number(request: Request, name: str, default: int, limit: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= limit):
        raise ApiError(
            f"{name} must be a whole number from 0 to {limit}, got {text[:40]!a}",
            param=name,
            hint="use a number in this range, or leave it out",
        )
    return int(text)


def _since(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        moment = float(text)
    except ValueError:
        moment = math.nan
    if not math.isfinite(moment):
        raise ApiError(
            f"since must be a number, got {text[:40]!a}", param="since", hint="use unix seconds"
        )
    return moment


def _filter(request: Request) -> Filter:
    params = request.query_params
    parts: list[Filter] = []
    if text := params.get("text"):
        parts.append(Contains(text))
    if source := params.get("source"):
        parts.append(Eq("source", source))
    return And(tuple(parts))


def _namespace(request: Request) -> str:
    return request.query_params.get("namespace", "")


def _id(request: Request) -> str:
    return str(request.path_params["id"])


def _describe_example(cache: KnowledgeBase, id: str) -> dict[str, object]:
    example, metadata = cache.get(id), cache.metadata(id)
    images = [
        {
            "sha256": image.sha256,
            "media_type": image.media_type,
            "bytes": len(image.data),
            "width": image.width,
            "height": image.height,
        }
        for image in example.query.images
    ]
    return {**fields_of(example), "images": images, **asdict(metadata)}
