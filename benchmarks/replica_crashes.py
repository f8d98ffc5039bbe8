"""Crash tests of benchmarks/replicas.py: load while a gateway is killed and PostgreSQL restarts."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp

from benchmarks.peers.counting_upstream import expected_reply
from benchmarks.processes import await_ready
from benchmarks.replica_client import Client, Requirement, ledger_rows
from benchmarks.replica_servers import kill
from tests.postgres import PostgresServer

CLIENTS = 12
CLEAR_SECONDS = 5.0
"""Allowed duration of errors after PostgreSQL accepts connections again."""
DOWN_SECONDS = 2.0
SETTLE_SECONDS = 3.0


@dataclass
class LoadResult:
    """Result of the load: `errors` are times and descriptions of failed requests, `acknowledged`
    the ids of answered requests and `stored` the ids of their examples."""

    stored: set[str] = field(default_factory=set)
    acknowledged: list[str] = field(default_factory=list)
    wrong: int = 0
    errors: list[tuple[float, str]] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[str]:
        return [text for moment, text in self.errors if start <= moment < end]


async def crash_requirements(
    client: Client, postgres: PostgresServer | None, seconds: float
) -> AsyncIterator[Requirement]:
    """Send different questions for `seconds`. After a quarter of that time, kill a gateway and
    restart it; after half, restart PostgreSQL."""
    cluster, result = client.cluster, LoadResult()
    stop = asyncio.Event()
    numbers = itertools.count()
    load = [asyncio.create_task(_send(client, result, numbers, stop)) for _ in range(CLIENTS)]
    await asyncio.sleep(seconds / 4)
    victim = cluster.gateways[1]
    killed = time.monotonic()
    await asyncio.to_thread(kill, victim)
    await asyncio.sleep(seconds / 8)
    cluster.gateways[1] = cluster.launch(1, victim.port)
    # Its port opens earlier, but until it is ready, it needs PostgreSQL.
    await asyncio.to_thread(await_ready, cluster.gateways[1])
    await asyncio.sleep(seconds / 8)
    down, up = await _restart(postgres)
    await asyncio.sleep(max(seconds / 2, 2 * CLEAR_SECONDS))
    stop.set()
    await asyncio.gather(*load)
    await asyncio.sleep(SETTLE_SECONDS)
    total = len(result.acknowledged) + len(result.errors)
    yield Requirement(
        "wrong replies under crashes", f"{result.wrong} of {total}", "0", result.wrong == 0
    )
    rows = await asyncio.to_thread(ledger_rows, cluster)
    lost = sum(id not in rows for id in result.acknowledged)
    value = f"{lost} of {len(result.acknowledged)} lost"
    yield Requirement("ledger rows of acknowledged replies", value, "0 lost", lost == 0)
    examples = await client.example_ids("crash")
    lost = len(result.stored - examples)
    value = f"{lost} of {len(result.stored)} lost"
    yield Requirement("stored answers of acknowledged replies", value, "0 lost", lost == 0)
    at_kill = result.between(killed, killed + CLEAR_SECONDS)
    value = f"{len(at_kill)} {_summary(at_kill)}"
    limit = f"<= {CLIENTS} in flight"
    yield Requirement("errors after kill -9 of a gateway", value, limit, len(at_kill) <= CLIENTS)
    if postgres is not None:
        during = result.between(down, up + CLEAR_SECONDS)
        after = len(result.errors) - len(at_kill) - len(during)
        value = f"{len(during)} while down, {after} else"
        yield Requirement(
            f"errors outside {CLEAR_SECONDS:.0f} s of a restart", value, "0", after <= 0
        )
    elif result.errors:
        others = [text for _, text in result.errors if text not in at_kill]
        yield Requirement("other errors", f"{len(others)} {_summary(others)}", "0", not others)


async def _restart(postgres: PostgresServer | None) -> tuple[float, float]:
    """Restart PostgreSQL. Return the times when it went down and accepted connections again."""
    down = time.monotonic()
    if postgres is not None:
        await asyncio.to_thread(postgres.stop)
        await asyncio.sleep(DOWN_SECONDS)
        await asyncio.to_thread(postgres.start)
    return down, time.monotonic()


async def _send(
    client: Client, result: LoadResult, numbers: itertools.count[int], stop: asyncio.Event
) -> None:
    while not stop.is_set():
        question = f"crash {next(numbers)}"
        try:
            reply = await client.ask("crash", question)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            result.errors.append((time.monotonic(), repr(error)))
        else:
            if reply.status != 200:
                result.errors.append((time.monotonic(), f"{reply.status} {reply.text}"))
                await asyncio.sleep(0.1)
                continue
            result.acknowledged.append(reply.headers["x-request-id"])
            if "x-bottega-stored" in reply.headers:
                result.stored.add(reply.headers["x-bottega-stored"])
            result.wrong += reply.text != expected_reply(question)


def _summary(errors: list[str]) -> str:
    kinds = sorted({" ".join(re.sub("<[^>]*>", " ", one).split())[:40] for one in errors})
    return f"({'; '.join(kinds)[:60]})" if kinds else ""
