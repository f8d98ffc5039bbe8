"""Stored responses of the Responses API, for `previous_response_id`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import orjson

from bottega._util.sql_tables import storable_text
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.config.gateway_settings import MB, ResponseSettings
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import Body

DAY, HOUR = 86_400.0, 3600.0
INSERT = (
    "INSERT INTO gateway_responses (id, account, time, size, previous, input, response)"
    " VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (id) DO NOTHING"
)
# Of one account the newest responses stay, up to a total size and a number.
TRIM = """
DELETE FROM gateway_responses WHERE account = ?1 AND id IN (SELECT id FROM (
    SELECT id, CAST(sum(size) OVER latest AS BIGINT) AS total, row_number() OVER latest AS place
    FROM gateway_responses WHERE account = ?1 WINDOW latest AS (ORDER BY time DESC, id)
) AS ranked WHERE total > ?2 OR place > ?3)
"""
CHAIN = """
WITH RECURSIVE chain (id, previous, input, response, depth) AS (
    SELECT id, previous, input, response, 1 FROM gateway_responses
        WHERE id = ?1 AND account = ?2 AND time > ?3
    UNION ALL
    SELECT r.id, r.previous, r.input, r.response, depth + 1
        FROM chain JOIN gateway_responses AS r ON r.id = chain.previous
        WHERE r.account = ?2 AND r.time > ?3 AND depth < ?4
) SELECT id, previous, input, response FROM chain ORDER BY depth DESC
"""


@dataclass
class ResponseStore:
    """Responses in the database of the ledger, of which each account sees its own. Methods raise
    `StoreError`, and `ApiError` for responses that do not exist or belong to another account."""

    ledger: Ledger
    settings: ResponseSettings
    clock: Callable[[], float] = time.time
    _pruned: float = field(default=0.0)

    async def add(
        self, account: str, previous: str | None, items: Sequence[Body], response: bytes
    ) -> None:
        """Store a response and the input items of its request, and delete the oldest ones above the
        limits of the account."""
        await asyncio.to_thread(self._add, account, previous, items, response)

    async def conversation(self, account: str, id: str, limit: int) -> list[Body]:
        """Return the items of a response and of those before it: input and output of each, the
        oldest first."""
        return await asyncio.to_thread(self._conversation, account, id, limit)

    async def get(self, account: str, id: str) -> bytes:
        """Return the JSON of a response."""
        statement = (
            "SELECT response FROM gateway_responses WHERE id = ?1 AND account = ?2 AND time > ?3"
        )
        values = (storable_text(id), account, self._oldest)
        rows = await asyncio.to_thread(self.ledger.read, statement, *values)
        if not rows:
            raise unknown_response(id)
        return str(rows[0][0]).encode()

    async def delete(self, account: str, id: str) -> None:
        await self.get(account, id)
        statement = "DELETE FROM gateway_responses WHERE id = ?1 AND account = ?2"
        await asyncio.to_thread(self.ledger.execute, statement, storable_text(id), account)

    @property
    def _oldest(self) -> float:
        return self.clock() - self.settings.keep_days * DAY

    def _add(
        self, account: str, previous: str | None, items: Sequence[Body], response: bytes
    ) -> None:
        given, largest = orjson.dumps(items), self.settings.mb_per_key * MB
        size = len(given) + len(response)
        if size > largest:
            return
        id = orjson.loads(response)["id"]
        values = (id, account, self.clock(), size, previous, given.decode(), response.decode())
        self.ledger.execute(INSERT, *values)
        self.ledger.execute(TRIM, account, largest, self.settings.max_per_key)
        if self.clock() - self._pruned > HOUR:
            self._pruned = self.clock()
            self.ledger.execute("DELETE FROM gateway_responses WHERE time <= ?1", self._oldest)

    def _conversation(self, account: str, id: str, limit: int) -> list[Body]:
        rows = self.ledger.read(CHAIN, storable_text(id), account, self._oldest, limit)
        if not rows:
            raise unknown_response(id, "previous_response_id")
        if rows[0][1] is not None:
            raise ApiError(
                f"the beginning of the conversation is no longer stored: {rows[0][1]!r}",
                status=404,
                code="not_found",
                param="previous_response_id",
                hint="send the whole conversation as input",
            )
        items: list[Body] = []
        for _, _, given, response in rows:
            items += [*orjson.loads(given), *orjson.loads(response)["output"]]
        return items


def unknown_response(id: str, param: str | None = None) -> ApiError:
    return ApiError(
        f"no such response: {id[:100]!r}",
        status=404,
        code="not_found",
        param=param,
        hint="it may be older than responses.keep_days, deleted, of another key, or sent with"
        " store = false",
    )


def not_stored(param: str | None = None, status: int = 404) -> ApiError:
    return ApiError(
        "responses are not stored",
        status=status,
        code="unsupported_parameter" if param else "not_found",
        param=param,
        hint="send the whole conversation as input, or ask the operator to set"
        " [responses] store = true",
    )
