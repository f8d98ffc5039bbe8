from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from bottega import errors
from bottega._util.event_loops import for_each
from bottega._util.executor import Executor, batched, computed_ahead
from bottega._util.ray_executor import CONNECTIONS, RETRIES, RayExecutor, check_address, join
from bottega.errors import (
    BatchError,
    BottegaError,
    EmbedderMismatchError,
    EndpointError,
    MissingDependencyError,
    SettingError,
    WorkerError,
)
from tests.actors import CountingFactory, Done, FailingFactory, LockedFactory, Work
from tests.ray_clusters import WORKERS

SLOW = (pytest.mark.slow, pytest.mark.timeout(300))  # the first test starts the cluster
CLUSTERS = [pytest.param(name, marks=SLOW) for name in ("ray", "client")]
everywhere = pytest.mark.parametrize("executor", ["local", *CLUSTERS], indirect=True)
on_clusters = pytest.mark.parametrize("executor", CLUSTERS, indirect=True)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition is a file of another process
            await asyncio.sleep(0.02)


def files(folder: Path, pattern: str) -> list[str]:
    return [path.name for path in folder.glob(pattern)]


@everywhere
async def test_each_item_gets_its_own_result(executor: Executor, tmp_path: Path) -> None:
    workers = executor.start(CountingFactory(tmp_path), concurrency=4)
    done: dict[int, Done] = {}

    async def work(number: int) -> None:
        done[number] = await workers(Work(number))

    await for_each(range(20), work, limit=8)
    await workers.aclose()
    assert {number: one.number for number, one in done.items()} == {n: n for n in range(20)}


@everywhere
async def test_actor_is_built_once_per_worker(executor: Executor, tmp_path: Path) -> None:
    workers = executor.start(CountingFactory(tmp_path), concurrency=4)
    done = await asyncio.gather(*(workers(Work(number)) for number in range(20)))
    await workers.aclose()
    processes = {one.process for one in done}
    assert len(processes) == len(files(tmp_path, "built-*")) == executor.count
    assert {int(name.split("-")[1]) for name in files(tmp_path, "closed-*")} == processes


@everywhere
async def test_error_of_an_item_leaves_the_others(executor: Executor, tmp_path: Path) -> None:
    workers = executor.start(CountingFactory(tmp_path), concurrency=4)
    items = [Work(number, fails=number == 2) for number in range(5)]
    results = await asyncio.gather(*map(workers, items), return_exceptions=True)
    await workers.aclose()
    error = results.pop(2)
    assert isinstance(error, EmbedderMismatchError)
    assert (error.stored, error.given, error.hint) == ("one", "another", "item 2")
    assert error.__notes__ == ["hint: item 2"]
    assert [one.number for one in results if isinstance(one, Done)] == [0, 1, 3, 4]


@everywhere
async def test_error_of_a_factory_is_raised(executor: Executor) -> None:
    with pytest.raises(SettingError, match="the model does not exist") as caught:
        async with aclosing(executor.start(FailingFactory(), concurrency=1)) as workers:
            await workers(Work())
    assert caught.value.hint == "check its name"


@everywhere
async def test_cancelled_call_cancels_the_work(executor: Executor, tmp_path: Path) -> None:
    workers = executor.start(CountingFactory(tmp_path), concurrency=4)
    call = asyncio.ensure_future(workers(Work(waits=tmp_path)))
    await eventually((tmp_path / "started").exists)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await eventually((tmp_path / "cancelled").exists)
    assert (await workers(Work(7))).number == 7
    await workers.aclose()


@on_clusters
async def test_killed_worker_repeats_its_item(ray_cluster: RayExecutor, tmp_path: Path) -> None:
    workers = ray_cluster.start(CountingFactory(tmp_path), concurrency=4)
    marker = tmp_path / "killed"
    done = await asyncio.gather(*(workers(Work(n, kills_once=marker)) for n in range(4)))
    await workers.aclose()
    assert [one.number for one in done] == [0, 1, 2, 3]
    assert len(files(tmp_path, "built-*")) > WORKERS


@on_clusters
async def test_item_that_kills_each_worker_fails_alone(
    ray_cluster: RayExecutor, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    workers = ray_cluster.start(CountingFactory(tmp_path), concurrency=4)
    with pytest.raises(WorkerError, match=f"ended {RETRIES + 1} times"):
        await workers(Work(kills=True))
    assert (await workers(Work(5))).number == 5
    await workers.aclose()
    assert "".join(capfd.readouterr()) == ""  # Ray prints nothing


@on_clusters
async def test_error_that_cannot_be_pickled_keeps_its_text(
    ray_cluster: RayExecutor, tmp_path: Path
) -> None:
    workers = ray_cluster.start(CountingFactory(tmp_path), concurrency=1)
    with pytest.raises(RuntimeError, match="UnpicklableError: item 3 is broken"):
        await workers(Work(3, raises_unpicklable=True))
    await workers.aclose()


@on_clusters
async def test_factory_that_cannot_be_pickled_is_rejected(
    ray_cluster: RayExecutor, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=r"cannot be sent to Ray workers.*lock"):
        ray_cluster.start(LockedFactory(tmp_path), concurrency=1)


@on_clusters
def test_more_workers_than_cpus_are_rejected(ray_cluster: RayExecutor) -> None:
    with pytest.raises(SettingError, match=f"has {WORKERS} CPUs, got {WORKERS + 1} workers"):
        RayExecutor("ray", WORKERS + 1)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
@pytest.mark.slow
def test_cluster_listens_on_loopback_only(ray_cluster: RayExecutor) -> None:
    import ray

    nodes: Any = ray.nodes  # has no types
    port = f":{nodes()[0]['NodeManagerPort']:04X}"
    lines = [line.split() for name in ("tcp", "tcp6") for line in table(name)]
    listening = [address for _, address, _, state, *_ in lines if state == LISTENING]
    addresses = [one.removesuffix(port) for one in listening if one.endswith(port)]
    assert addresses
    assert all(address.endswith("0100007F") for address in addresses)  # 127.0.0.1


LISTENING = "0A"


def table(name: str) -> list[str]:
    return Path("/proc/net", name).read_text().splitlines()[1:]


@pytest.mark.parametrize("address", ["", "dask", "ray:", "ray://", "ray://host", "ray://host:x"])
def test_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(SettingError, match="--on must be local, ray or ray://HOST:PORT"):
        check_address(address)


class DyingServer:
    """Stand-in for the module `ray`: the process for a client dies a number of times."""

    def __init__(self, deaths: int) -> None:
        self.deaths, self.calls = deaths, 0

    def init(self, address: str, **settings: Any) -> None:
        self.calls += 1
        if self.calls <= self.deaths:
            raise ConnectionAbortedError(address)


def test_connection_is_repeated_if_the_server_of_a_client_dies() -> None:
    ray = DyingServer(deaths=2)
    join(ray, "ray://host:1", {})
    assert ray.calls == 3
    ray = DyingServer(deaths=100)
    with pytest.raises(ConnectionAbortedError):
        join(ray, "ray://host:1", {})
    assert ray.calls == CONNECTIONS


def test_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.errors.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as caught:
        RayExecutor("ray")
    assert "pip install 'bottega-vlm[batch]'" in caught.value.hint


def test_ray_is_imported_only_when_used() -> None:
    code = "import sys, bottega.cli.eval, bottega._util.ray_executor; print('ray' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_items_are_computed_ahead_and_yielded_in_order() -> None:
    started, both = [0], threading.Barrier(2, timeout=30)

    def compute(item: int) -> int:
        started.append(item)
        if item < 2:
            both.wait()  # fails unless the second item starts before the first one is yielded
        return item * item

    made = [(item, result()) for item, result in computed_ahead(range(6), compute, 2)]
    assert made == [(item, item * item) for item in range(6)]


def test_no_item_is_computed_ahead_in_one_process() -> None:
    threads: list[int] = []

    def compute(item: int) -> int:
        threads.append(threading.get_ident())
        return item

    computed = computed_ahead(iter([3, 4]), compute, 1)
    item, result = next(computed)
    assert (item, threads) == (3, [])
    assert (result(), threads) == (3, [threading.get_ident()])


def test_error_of_a_computed_item_is_raised_at_its_turn() -> None:
    def compute(item: int) -> int:
        if item == 1:
            raise SettingError("item 1 is wrong")
        return item

    computed = computed_ahead(range(3), compute, 2)
    results = [result for _, result in computed]
    assert (results[0](), results[2]()) == (0, 2)
    with pytest.raises(SettingError, match="item 1 is wrong"):
        results[1]()


def test_batches_hold_all_items() -> None:
    assert list(batched(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(batched([], 2)) == []


EXAMPLES: list[BottegaError] = [
    MissingDependencyError("torch", "local"),
    BatchError([None, "b"], {0: ValueError("bad")}),
    EmbedderMismatchError("a", "b"),
    EndpointError("busy", hint="wait", status=503, retry_after=2.0),
]


def test_errors_keep_their_content_when_pickled() -> None:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    plain = [one for one in kinds if issubclass(one, BottegaError) and one not in OTHER]
    assert len(plain) > 20
    for error in (*EXAMPLES, *(kind("problem", hint="solution") for kind in plain)):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.hint) == (type(error), str(error), error.hint)
        state = {name: repr(value) for name, value in vars(copy).items()}
        assert state == {name: repr(value) for name, value in vars(error).items()}


OTHER = {MissingDependencyError, BatchError, EmbedderMismatchError}
