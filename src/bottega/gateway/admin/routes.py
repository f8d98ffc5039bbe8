"""Routes of the administration API under /admin, for admin keys only."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from bottega.errors import BottegaError
from bottega.gateway.accounting.accounts import TOKEN, Account, Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.savings import savings
from bottega.gateway.admin.caches import (
    CacheAdmin,
    OpenCache,
    api_error,
    json_response,
    read_object,
)
from bottega.openai_api.errors import ApiError

log = logging.getLogger(__name__)

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
}
Handler = Callable[[Request, Account], Awaitable[Response]]


def admin_routes(
    accounts: Accounts,
    ledger: Ledger,
    open_cache: OpenCache,
    *,
    forget: Callable[[str], None] = lambda namespace: None,
    max_import: int = MAX_IMPORT,
) -> list[BaseRoute]:
    """Return the routes for keys, savings and caches. `open_cache` returns the gateway's own
    knowledge base of a namespace, which the handlers do not close. `forget` is called with a
    namespace after a deletion, since the response cache may still contain the deleted answers.
    Both are called in threads. The handlers raise `ApiError`."""
    admin = _KeyAdmin(accounts, ledger)
    caches = CacheAdmin(open_cache, forget, max_import)
    handlers: list[tuple[str, str, Handler]] = [
        ("GET", "/keys", admin.list_keys),
        ("POST", "/keys", admin.add_key),
        ("DELETE", "/keys/{id}", admin.revoke_key),
        ("GET", "/savings", admin.savings),
        ("GET", "/stats", caches.stats),
        ("GET", "/cache", caches.browse),
        ("GET", "/cache/{id}", caches.show),
        ("DELETE", "/cache/{id}", caches.delete),
        ("GET", "/cache/{id}/images/{number:int}", caches.image),
        ("POST", "/cache/{id}/pin", caches.pin),
        ("POST", "/cache/{id}/unpin", caches.unpin),
        ("POST", "/import", caches.import_),
        ("GET", "/export", caches.export),
    ]
    return [
        Route(f"/admin{path}", _require_admin(accounts, handler, path), methods=[method])
        for method, path, handler in handlers
    ]


def _require_admin(
    accounts: Accounts, handler: Handler, path: str
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        account = _check_admin(accounts, request)
        try:
            response = await handler(request, account)
        except BottegaError as error:
            raise api_error(error) from error
        if request.method not in ("GET", "HEAD"):
            log.info("admin %s: %s /admin%s", account.id, request.method, path)
        return response

    return handle


def _check_admin(accounts: Accounts, request: Request) -> Account:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    account = accounts.authenticate(token.strip() if scheme.lower() == "bearer" else None)
    if account is None:
        raise ApiError(
            "the administration API needs an admin key",
            status=401,
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
            hint="create one with bottega keys add NAME --admin;"
            " send it as Authorization: Bearer KEY",
        )
    if not account.admin:
        raise ApiError(
            "this key is not an admin key",
            status=403,
            type="permission_error",
            code="not_an_admin",
            hint="create an admin key with bottega keys add NAME --admin",
        )
    return account


@dataclass(frozen=True)
class _KeyAdmin:
    """Handlers of the routes for keys and savings."""

    accounts: Accounts
    ledger: Ledger

    async def list_keys(self, request: Request, _: Account) -> Response:
        found = await asyncio.to_thread(self.accounts.list)
        return json_response({"keys": [self._describe(account) for account in found]})

    async def add_key(self, request: Request, _: Account) -> Response:
        """Create a key. No other response contains it."""
        fields: dict[str, Any] = await read_object(request, KEY_FIELDS, MAX_KEY_BODY)
        account, token = await asyncio.to_thread(self.accounts.add, **{"name": "", **fields})
        return json_response({"key": token, "account": self._describe(account)}, 201)

    async def revoke_key(self, request: Request, _: Account) -> Response:
        id = request.path_params["id"]
        if TOKEN.fullmatch(id):
            raise ApiError(
                "keys are revoked by id, got a key",
                hint="use the id from GET /admin/keys: paths appear in logs",
            )
        account = await asyncio.to_thread(self.accounts.revoke, id)
        return json_response(self._describe(account))

    async def savings(self, request: Request, _: Account) -> Response:
        params = request.query_params
        found = await asyncio.to_thread(
            savings,
            self.ledger,
            namespace=params.get("namespace"),
            since=_since(params.get("since")),
            master=params.get("master"),
        )
        return json_response(found)

    def _describe(self, account: Account) -> dict[str, object]:
        spent = self.ledger.spent_this_month(account.id)
        return {**asdict(account), "spent_this_month_usd": spent}


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
