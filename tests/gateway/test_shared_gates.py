"""Gates and cold starts of gateways that share a ledger; of a single gateway also in a file."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import ShadowSample
from bottega.gateway.ports import RequestRecord
from bottega.gateway.request.reading import DecodeBudget
from bottega.gateway.running.caches import NamespaceOpener
from bottega.gateway.running.tiers import build_tiers
from bottega.gateway.state.gates import SharedGates
from bottega.gateway.telemetry.metrics import Metrics
from bottega.parsing import COMPARISON_RULES
from bottega.routing import AgreementPair, BenefitGate
from bottega.routing.benefit_gate import PairedSample
from bottega.types import Candidate, Example, Query
from tests.gateway.gateways import ENVIRONMENT, gateway_config
from tests.gateway.test_shared_gateways import gateways
from tests.gateway.test_shared_ledger import until
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


def record(
    ledger: Ledger, sample: PairedSample, namespace: str = "a", retrieve: str = "nearest"
) -> None:
    ledger.record_shadow(ShadowSample(0.0, "r", namespace, *sample, retrieve=retrieve))
    ledger.flush()
    wait_for_other_transactions(ledger)


def wait_for_other_transactions(ledger: Ledger) -> None:
    """Gates read a sample once every earlier transaction of the server has ended, also those of
    other databases, in which other tests run."""
    newest = ledger.read("SELECT coalesce(max(transaction), 0) FROM gateway_shadows")[0][0]
    pending = f"SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint <= {newest}"
    until(lambda: not ledger.read(pending)[0][0])


def samples(number: int, seed: int = 0) -> list[PairedSample]:
    rng = random.Random(seed)
    return [
        PairedSample(rng.random(), float(rng.random() < 0.9), float(rng.random() < 0.4))
        for _ in range(number)
    ]


async def test_gates_of_all_gateways_are_equal(ledgers: list[Ledger]) -> None:
    """Each gateway measures a third, and all decide from all samples."""
    gates = [SharedGates(ledger) for ledger in ledgers]
    opened = [await asyncio.to_thread(one.open, "a", "nearest") for one in gates]
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
    late = await asyncio.to_thread(SharedGates(ledgers[2]).open, "a", "nearest")
    assert late.state() == single.state()
    other = await asyncio.to_thread(SharedGates(ledgers[2]).open, "b", "nearest")
    assert other.state()["samples"] == []


async def test_each_retrieval_method_has_a_gate(ledgers: list[Ledger]) -> None:
    first, second, third = samples(3)
    gates = SharedGates(ledgers[0])
    await asyncio.to_thread(record, ledgers[0], first, retrieve="image")
    await asyncio.to_thread(record, ledgers[0], second, retrieve="none")
    by_image = await asyncio.to_thread(gates.open, "a", "image")
    configured = await asyncio.to_thread(gates.open, "a", "nearest")
    assert by_image.state()["samples"] == [list(first)]
    assert configured.state()["samples"] == []
    await asyncio.to_thread(record, ledgers[1], third)
    await gates.update()
    assert by_image.state()["samples"] == [list(first)]
    assert configured.state()["samples"] == [list(third)]
    await asyncio.to_thread(ledgers[0].flush)
    # A gateway that starts now reads the stored states.
    late = SharedGates(ledgers[2])
    for one, retrieve in ((by_image, "image"), (configured, "nearest")):
        opened = await asyncio.to_thread(late.open, "a", retrieve)
        assert opened.state() == one.state()


async def test_gate_outlives_its_samples(ledgers: list[Ledger]) -> None:
    """The ledger deletes old samples; what the gates have learned from them is stored."""
    [first] = samples(1)
    gates = SharedGates(ledgers[0])
    opened = await asyncio.to_thread(gates.open, "a", "nearest")
    await asyncio.to_thread(record, ledgers[0], first)
    await gates.update()
    await asyncio.to_thread(ledgers[0].flush)
    assert await asyncio.to_thread(ledgers[0].prune, 1.0) == 1
    late = await asyncio.to_thread(SharedGates(ledgers[1]).open, "a", "nearest")
    assert late.state() == opened.state()
    assert late.state()["samples"] == [list(first)]


async def test_sample_of_a_slow_transaction_is_not_skipped(
    ledgers: list[Ledger], database: str
) -> None:
    """Transactions commit in another order than they begin."""
    import asyncpg

    gates = [SharedGates(ledgers[0]), SharedGates(ledgers[1])]
    opened = [await asyncio.to_thread(one.open, "a", "nearest") for one in gates]
    slow = await asyncpg.connect(database)
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute(
        "INSERT INTO gateway_shadows (time, request_id, namespace, similarity, with_score,"
        " without_score, id, retrieve, sampled, was_shown, rules, judge)"
        " VALUES (0, 'r', 'a', 0.25, 1, 0, 'slow', 'nearest', true, true, $1, 0)",
        COMPARISON_RULES,
    )
    ledgers[0].record_shadow(ShadowSample(0.0, "r", "a", 0.5, 1.0, 0.0, retrieve="nearest"))
    await asyncio.to_thread(ledgers[0].flush)
    await gates[0].update()
    assert opened[0].state()["samples"] == []  # not before the earlier one has ended
    await transaction.commit()
    await slow.close()
    await asyncio.to_thread(wait_for_other_transactions, ledgers[0])
    for one in gates:
        await one.update()
    expected = [[0.25, 1.0, 0.0], [0.5, 1.0, 0.0]]
    assert [gate.state()["samples"] for gate in opened] == [expected, expected]


@pytest.fixture(params=["file", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("database")
        return url
    return str(tmp_path / "gateway.db")


class Gates:
    """Gates of one gateway, opened and fed as its namespaces do it."""

    def __init__(self, ledger: Ledger, folder: Path) -> None:
        config = gateway_config(folder, "http://localhost:9/v1")
        tiers, metrics = build_tiers(config, ENVIRONMENT), Metrics(["small"])
        shared = SharedGates(ledger) if ledger.shared is not None else None
        self._ledger = ledger
        self._opener = NamespaceOpener(
            config, tiers, metrics, ledger, DecodeBudget(1), shared_gates=shared
        )

    def open(self, namespace: str) -> BenefitGate:
        return self._opener._gate(namespace, "nearest")

    def measure(self, namespace: str, sample: PairedSample) -> None:
        """Learn as `ShadowSampler` does, then store the sample."""
        near = Candidate(Example(Query("q"), "a", id="1"), sample.similarity)
        self.open(namespace).learn([near], sample.shown, sample.hidden)
        record = RequestRecord("r", namespace=namespace)
        pair = AgreementPair(sample.shown, sample.hidden, True)
        self._opener.record_shadow_sample(record, sample.similarity, pair, False)
        self._ledger.flush()
        if (shared := self._opener.shared_gates) is not None:
            wait_for_other_transactions(self._ledger)
            asyncio.run(shared.update())
            self._ledger.flush()


def test_each_sample_counts_once_in_its_namespace(location: str, tmp_path: Path) -> None:
    with closing(Ledger(location)) as ledger:
        gates = Gates(ledger, tmp_path)
        for number, sample in enumerate(samples(6)):
            gates.measure("ab"[number % 2], sample)
        for number, name in enumerate("ab"):
            assert gates.open(name).state()["samples"] == list(map(list, samples(6)[number::2]))
        assert gates.open("c").state()["samples"] == []


def test_restarted_gateway_has_the_same_gate(location: str, tmp_path: Path) -> None:
    with closing(Ledger(location)) as ledger:
        gates = Gates(ledger, tmp_path)
        for sample in samples(25):
            gates.measure("a", sample)
        before = gates.open("a")
        assert before.is_measured
    with closing(Ledger(location)) as ledger:
        gates = Gates(ledger, tmp_path)
        assert gates.open("a").state() == before.state()
        gates.measure("a", samples(1, seed=9)[0])
        assert len(cast(list[object], gates.open("a").state()["samples"])) == 26


def test_damaged_state_does_not_prevent_a_start(location: str, tmp_path: Path) -> None:
    with closing(Ledger(location)) as ledger:
        Gates(ledger, tmp_path).measure("a", samples(1)[0])
        # A file has only the state; PostgreSQL reads the samples again.
        kept = [list(samples(1)[0])] if ledger.shared is not None else []
        for state in ("[", "{}", '{"cursor": [1, 2]}', '{"cursor": 5}'):
            ledger.set_gate("a", "nearest", state)
            gates = Gates(ledger, tmp_path)
            assert gates.open("a").state()["samples"] == kept
            assert not gates.open("a").is_measured


def test_cold_start_is_claimed_once(ledgers: list[Ledger]) -> None:
    with ThreadPoolExecutor(9) as pool:
        tables = [ledger.shared for ledger in ledgers if ledger.shared is not None]
        claims = [pool.submit(tables[i % 3].claim_cold_start, "a", 3, 20) for i in range(60)]
        assert sum(claim.result() for claim in claims) == 17
    assert tables[0].claim_cold_start("b", 0, 1)
    assert not tables[1].claim_cold_start("b", 0, 1)


async def test_gateways_agree_on_variants_and_their_replies(
    endpoint: Server, tmp_path: Path, database: str
) -> None:
    """Each question has the same variant in all gateways, whose replies are repeated within it; the
    cold start counts the requests of all variants in all gateways."""
    tiers = (
        TIERS
        + """
        [route]
        router = "fixed"
        cold_start = 4
        [experiment]
        name = "shared"
        [experiment.b.cache]
        retrieve = "bm25"
        [experiment.b.route]
        router = "coverage"
        master_rate = 0.0
        [limits]
        images = 0
        """
    )
    state = f"[state]\ndatabase_env = 'DATABASE'\n#{database}"
    with gateways(endpoint, tmp_path, state, tiers, count=2) as two:
        headers = {"Authorization": f"Bearer {two.key}"}

        async def ask(session: aiohttp.ClientSession, gateway: int, text: str) -> tuple[str, str]:
            body = {"model": "bottega", "messages": [{"role": "user", "content": text}]}
            url = f"{two.urls[gateway]}/chat/completions"
            async with session.post(url, json=body, headers=headers) as response:
                found = response.headers
                return found["x-bottega-variant"], found["x-bottega-cache"]

        async with aiohttp.ClientSession() as session:
            asked = [await ask(session, n % 2, f"question {n}") for n in range(12)]
            again = [await ask(session, (n + 1) % 2, f"question {n}") for n in range(12)]
    assert {variant for variant, _ in asked} == {"shared:a", "shared:b"}
    assert [variant for variant, _ in again] == [variant for variant, _ in asked]
    assert {cache for _, cache in again} == {"replayed"}
    models = [body["model"] for body in endpoint.bodies if body]
    assert (models.count("huge"), models.count("qwen")) == (4, 8)


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
