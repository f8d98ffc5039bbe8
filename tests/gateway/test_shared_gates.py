"""Gates and cold starts of several gateways that share a ledger."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest

from bottega.gateway.accounting.database import ShadowSample
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.state.gates import SharedGates
from bottega.routing import BenefitGate
from bottega.routing.benefit_gate import PairedSample
from tests.gateway.test_shared_gateways import gateways
from tests.server import Server

TIERS = """
[tiers.small]
model = "openai:qwen"
base_url = "{url}"
price = [1.0, 1.0]
[tiers.large]
model = "openai:huge"
base_url = "{url}"
api_key_env = "LARGE_KEY"
price = [10.0, 10.0]
"""


@pytest.fixture
def database(gateway_database: str) -> str:
    return gateway_database


@pytest.fixture
def ledgers(database: str) -> Iterator[list[Ledger]]:
    made = [Ledger(database) for _ in range(3)]
    yield made
    for ledger in made:
        ledger.close()


def record(ledger: Ledger, sample: PairedSample, namespace: str = "a") -> None:
    ledger.record_shadow(ShadowSample(0.0, "r", namespace, *sample))
    ledger.flush()


def samples(number: int, seed: int = 0) -> list[PairedSample]:
    rng = random.Random(seed)
    return [
        PairedSample(rng.random(), float(rng.random() < 0.9), float(rng.random() < 0.4))
        for _ in range(number)
    ]


async def test_gates_of_all_gateways_are_equal(ledgers: list[Ledger]) -> None:
    """Each gateway measures a third, and all decide from all samples."""
    gates = [SharedGates(ledger) for ledger in ledgers]
    opened = [await asyncio.to_thread(one.open, "a") for one in gates]
    single = BenefitGate()
    for number, sample in enumerate(samples(90)):
        await asyncio.to_thread(record, ledgers[number % 3], sample)
        single.add(sample)
        if number % 30 == 29:
            await asyncio.gather(*(one.update() for one in gates))
    assert opened[0].is_measured
    for gate in opened:
        assert gate.state() == single.state()
    # A gateway that starts now, with a stored state and samples after it.
    await asyncio.to_thread(ledgers[0].flush)
    last = samples(1, seed=9)[0]
    await asyncio.to_thread(record, ledgers[1], last)
    single.add(last)
    late = await asyncio.to_thread(SharedGates(ledgers[2]).open, "a")
    assert late.state() == single.state()
    assert (await asyncio.to_thread(SharedGates(ledgers[2]).open, "b")).state()["samples"] == []


async def test_own_samples_count_once(ledgers: list[Ledger]) -> None:
    gates = SharedGates(ledgers[0])
    gate = await asyncio.to_thread(gates.open, "a")
    gate.learn([], 1.0, 0.0)
    await asyncio.to_thread(record, ledgers[0], samples(1)[0])
    await gates.update()
    await gates.update()
    assert gate.state()["samples"] == [list(samples(1)[0])]


async def test_sample_of_a_slow_transaction_is_not_skipped(
    ledgers: list[Ledger], database: str
) -> None:
    """Transactions commit in another order than they begin."""
    import asyncpg

    gates = [SharedGates(ledgers[0]), SharedGates(ledgers[1])]
    opened = [await asyncio.to_thread(one.open, "a") for one in gates]
    slow = await asyncpg.connect(database)
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute(
        "INSERT INTO gateway_shadows (time, request_id, namespace, similarity, with_score,"
        " without_score, id) VALUES (0, 'r', 'a', 0.25, 1, 0, 'slow')"
    )
    await asyncio.to_thread(record, ledgers[0], PairedSample(0.5, 1.0, 0.0))
    await gates[0].update()
    assert opened[0].state()["samples"] == []  # not before the earlier one has ended
    await transaction.commit()
    await slow.close()
    for one in gates:
        await one.update()
    expected = [[0.25, 1.0, 0.0], [0.5, 1.0, 0.0]]
    assert [gate.state()["samples"] for gate in opened] == [expected, expected]


def test_damaged_state_is_read_again(ledgers: list[Ledger]) -> None:
    record(ledgers[0], samples(1)[0])
    for state in ("[", "{}", '{"cursor": [1, 2]}', '{"cursor": 5}'):
        ledgers[0].set_gate("a", state)
        assert len(SharedGates(ledgers[0]).open("a").state()["samples"]) == 1  # type: ignore[arg-type]


def test_cold_start_is_claimed_once(ledgers: list[Ledger]) -> None:
    with ThreadPoolExecutor(9) as pool:
        tables = [ledger.tables for ledger in ledgers if ledger.tables is not None]
        claims = [pool.submit(tables[i % 3].claim_cold_start, "a", 3, 20) for i in range(60)]
        assert sum(claim.result() for claim in claims) == 17
    assert tables[0].claim_cold_start("b", 0, 1)
    assert not tables[1].claim_cold_start("b", 0, 1)


async def test_cold_start_asks_the_master_once_for_all(
    endpoint: Server, tmp_path: Path, database: str
) -> None:
    tiers = TIERS + '[route]\nrouter = "fixed"\ncold_start = 20\n[replay]\nseconds = 0\n'
    state = f"[state]\ndatabase_env = 'DATABASE'\n#{database}"
    with gateways(endpoint, tmp_path, state, tiers) as three:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(
                *(three.post(session, n, f"question {n}") for n in range(60)),
            )
    models = [body["model"] for body in endpoint.bodies if body]
    assert (models.count("huge"), models.count("qwen")) == (20, 40)
