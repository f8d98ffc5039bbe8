"""Crash tests of benchmarks/replicas.py: load while a gateway is killed and PostgreSQL restarts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp

from benchmarks.peers.counting_upstream import expected_reply
from benchmarks.processes import await_ready
from benchmarks.replica_client import (
    APPRENTICE,
    CENT,
    MASTER,
    Client,
    Requirement,
    ledger_rows,
)
from benchmarks.replica_servers import APPRENTICE_MODEL, Cluster, cost_of, kill
from bottega.gateway.accounting.ledger import Ledger
from tests.postgres import PostgresServer

FREE, BUDGETED = "crash", "crash-budget"
CLIENTS = {FREE: 8, BUDGETED: 4}
# Only the key with a budget calls the apprentice, whose calls are its spending.
MODELS = {FREE: MASTER, BUDGETED: APPRENTICE}
REFUSAL = "limits_unavailable"
CLEAR_SECONDS = 5.0
"""Allowed duration of errors after PostgreSQL accepts connections again."""
DOWN_SECONDS = 2.0
SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class FailedRequest:
    time: float
    key: str
    problem: str


@dataclass
class LoadResult:
    """Result of the load: the `errors` of failed requests, and by key the ids of answered requests.
    `stored` are the ids of their examples."""

    stored: set[str] = field(default_factory=set)
    acknowledged: dict[str, list[str]] = field(default_factory=lambda: {key: [] for key in CLIENTS})
    wrong: int = 0
    errors: list[FailedRequest] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [id for ids in self.acknowledged.values() for id in ids]

    def between(self, start: float, end: float) -> list[FailedRequest]:
        return [one for one in self.errors if start <= one.time < end]


async def crash_requirements(
    client: Client, postgres: PostgresServer | None, seconds: float
) -> AsyncIterator[Requirement]:
    """Send different questions for `seconds`. After a quarter of that time, kill a gateway and
    restart it; after half, restart PostgreSQL."""
    cluster, result = client.cluster, LoadResult()
    stop = asyncio.Event()
    numbers = itertools.count()
    calls = cluster.calls()[APPRENTICE_MODEL]
    load = [
        asyncio.create_task(_send(client, key, result, numbers, stop))
        for key, number in CLIENTS.items()
        for _ in range(number)
    ]
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
    total = len(result.ids) + len(result.errors)
    yield Requirement(
        "wrong replies under crashes", f"{result.wrong} of {total}", "0", result.wrong == 0
    )
    rows = await asyncio.to_thread(ledger_rows, cluster)
    lost = sum(id not in rows for id in result.ids)
    value = f"{lost} of {len(result.ids)} lost"
    yield Requirement("ledger rows of acknowledged replies", value, "0 lost", lost == 0)
    examples = await client.example_ids(FREE)
    lost = len(result.stored - examples)
    value = f"{lost} of {len(result.stored)} lost"
    yield Requirement("stored answers of acknowledged replies", value, "0 lost", lost == 0)
    at_kill = result.between(killed, killed + CLEAR_SECONDS)
    value, clients = f"{len(at_kill)} {_summary(at_kill)}", sum(CLIENTS.values())
    limit = f"<= {clients} in flight"
    yield Requirement("errors after kill -9 of a gateway", value, limit, len(at_kill) <= clients)
    if postgres is not None:
        during = result.between(down, up + CLEAR_SECONDS)
        after = len(result.errors) - len(at_kill) - len(during)
        value = f"{len(during)} while down, {after} else"
        yield Requirement(
            f"errors outside {CLEAR_SECONDS:.0f} s of a restart", value, "0", after <= 0
        )
        refused = [one for one in during if one.key == BUDGETED]
        others = [one for one in refused if REFUSAL not in one.problem]
        value = f"{len(refused)} while down, {len(others)} with another error"
        met = bool(refused) and not others
        yield Requirement("a key with a budget is refused", value, f"503 {REFUSAL}", met)
    elif result.errors:
        others = [one for one in result.errors if one not in at_kill]
        yield Requirement("other errors", f"{len(others)} {_summary(others)}", "0", not others)
    calls = cluster.calls()[APPRENTICE_MODEL] - calls
    yield await asyncio.to_thread(_spending, cluster, len(result.acknowledged[BUDGETED]), calls)


def _spending(cluster: Cluster, acknowledged: int, calls: int) -> Requirement:
    """Compare the spending of the key with a budget with the ledger, its replies and its calls. A
    killed gateway leaves calls without a reply and without an entry."""
    cost = cost_of(APPRENTICE_MODEL)
    with contextlib.closing(Ledger(cluster.location, create=False)) as ledger:
        ledger.refresh_spending()
        spent = ledger.spent_this_month(cluster.accounts[BUDGETED])
        rows = ledger.read(
            "SELECT sum(cost_usd) FROM gateway_entries WHERE namespace = ?1", BUDGETED
        )
        written = float(rows[0][0])
    most = min(calls, acknowledged + CLIENTS[BUDGETED])
    met = abs(spent - written) < CENT / 2 and acknowledged * cost - CENT / 2 < written
    met = met and written < most * cost + CENT / 2
    limit = f"${acknowledged * cost:.2f} to ${most * cost:.2f}"
    value = f"${spent:.3f}, ledger ${written:.3f}"
    return Requirement("spending of a key with a budget", value, limit, met)


async def _restart(postgres: PostgresServer | None) -> tuple[float, float]:
    """Restart PostgreSQL. Return the times when it went down and accepted connections again."""
    down = time.monotonic()
    if postgres is not None:
        await asyncio.to_thread(postgres.stop)
        await asyncio.sleep(DOWN_SECONDS)
        await asyncio.to_thread(postgres.start)
    return down, time.monotonic()


async def _send(
    client: Client,
    key: str,
    result: LoadResult,
    numbers: itertools.count[int],
    stop: asyncio.Event,
) -> None:
    while not stop.is_set():
        question = f"crash {next(numbers)}"
        try:
            reply = await client.ask(key, question, model=MODELS[key])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            result.errors.append(FailedRequest(time.monotonic(), key, repr(error)))
        else:
            if reply.status != 200:
                problem = f"{reply.status} {reply.text}"
                result.errors.append(FailedRequest(time.monotonic(), key, problem))
                await asyncio.sleep(0.1)
                continue
            result.acknowledged[key].append(reply.headers["x-request-id"])
            if "x-bottega-stored" in reply.headers:
                result.stored.add(reply.headers["x-bottega-stored"])
            result.wrong += reply.text != expected_reply(question)


def _summary(errors: list[FailedRequest]) -> str:
    texts = (re.sub("<[^>]*>", " ", one.problem) for one in errors)
    kinds = sorted({" ".join(text.split())[:40] for text in texts})
    return f"({'; '.join(kinds)[:60]})" if kinds else ""
