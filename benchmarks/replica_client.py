"""Client, requirements and ledger reader of benchmarks/replicas.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable
from dataclasses import dataclass

import aiohttp

from benchmarks.replica_servers import Cluster
from bottega.gateway.accounting.ledger import Ledger

MASTER, APPRENTICE = "bottega/master", "bottega/apprentice"
PAGE = 200
CENT = 0.01


@dataclass(frozen=True)
class Requirement:
    name: str
    value: str
    limit: str
    met: bool

    def __str__(self) -> str:
        verdict = "met" if self.met else "MISSED"
        return f"{self.name:52} {self.value:34} {self.limit:24} {verdict}"


@dataclass(frozen=True)
class Reply:
    status: int
    text: str
    headers: dict[str, str]


class Client:
    """Client of the gateways. Requests go to nginx unless a URL is given."""

    def __init__(self, session: aiohttp.ClientSession, cluster: Cluster) -> None:
        self.session, self.cluster = session, cluster

    async def ask(
        self,
        key: str,
        question: str,
        *,
        model: str = MASTER,
        url: str = "",
        headers: dict[str, str] | None = None,
    ) -> Reply:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 100,
        }
        async with self.session.post(
            f"{url or self.cluster.url}/v1/chat/completions",
            json=body,
            headers={**self._authorization(key), **(headers or {})},
        ) as response:
            raw = await response.read()
            named = {name.lower(): value for name, value in response.headers.items()}
            text = ""
            if response.status == 200:
                text = json.loads(raw)["choices"][0]["message"]["content"]
            return Reply(response.status, text or raw[:400].decode(errors="replace"), named)

    async def delete(self, key: str, id: str, url: str) -> int:
        path = f"{url}/admin/cache/{id}?namespace={key}"
        async with self.session.delete(path, headers=self._authorization("admin")) as response:
            return response.status

    async def example_ids(self, key: str) -> set[str]:
        """Return the ids of the examples that any gateway has."""
        found = set[str]()
        for url in self.cluster.urls:
            offset, total = 0, 1
            while offset < total:
                path = f"{url}/admin/cache?namespace={key}&limit={PAGE}&offset={offset}"
                headers = self._authorization("admin")
                async with self.session.get(path, headers=headers) as response:
                    page = await response.json()
                found |= {one["id"] for one in page["examples"]}
                offset, total = offset + PAGE, page["total"]
        return found

    def _authorization(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.cluster.keys[key]}"}


async def gathered(calls: list[Awaitable[Reply]], concurrency: int) -> list[Reply]:
    slots = asyncio.Semaphore(concurrency)

    async def one(call: Awaitable[Reply]) -> Reply:
        async with slots:
            return await call

    return await asyncio.gather(*map(one, calls))


def admitted(replies: list[Reply]) -> int:
    for one in replies:
        if one.status not in (200, 429):
            raise SystemExit(f"unexpected status code {one.status}: {one.text}, {one.headers}")
    return sum(one.status == 200 for one in replies)


def ledger_rows(cluster: Cluster) -> dict[str, float]:
    """Return the costs of all ledger entries by request id. Blocks."""
    with contextlib.closing(Ledger(cluster.location, create=False)) as ledger:
        rows = ledger.read("SELECT request_id, coalesce(cost_usd, 0) FROM gateway_entries")
    return {str(id): float(str(cost)) for id, cost in rows}
