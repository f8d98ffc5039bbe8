from __future__ import annotations

import gc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from bottega.gateway.request.jobs import ChatJob
from bottega.gateway.running import server as server_module
from bottega.gateway.running.build import build
from bottega.gateway.running.process import unmap_large_blocks
from bottega.retrieval import SharedRetriever
from bottega.types import Candidate, Query
from tests.builders import candidates
from tests.gateway.gateways import ENVIRONMENT, ask, gateway_config, run_gateway
from tests.gateway.harness import client, harness, user_messages
from tests.server import Server, ok, slowly

START = """
import sys, threading
from pathlib import Path
from PIL import Image as Pillow
from bottega.gateway.running.process import unmap_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "returned":
    unmap_large_blocks()
"""
# Eight times 16 MB, with small blocks that stay between them.
DECODING = """
before, kept = resident(), []
for _ in range(4):
    images = []
    for _ in range(8):
        images.append(Pillow.new("L", (4000, 4000)))
        kept.append(bytearray(50_000))
    del images
print(resident() - before)
"""


# Sixteen threads, each of which needs 20 MB while the others wait.
IN_THREADS = """
before, turns = resident(), [threading.Event() for _ in range(17)]
threading.Thread(target=turns[0].set).start()

def work(number):
    blocks = [bytearray(100_000)]  # in the heap of this thread
    turns[number].wait()
    blocks += [bytearray(100_000) for _ in range(200)]
    del blocks[1:]
    turns[number + 1].set()
    turns[16].wait()

threads = [threading.Thread(target=work, args=[number]) for number in range(16)]
for one in threads:
    one.start()
turns[16].wait()
print(resident() - before)
"""


# 100 MB of small blocks, of which every hundredth stays.
IN_GAPS = """
from bottega._util.native import return_freed_memory

before = resident()
blocks = [bytearray(5000) for _ in range(20_000)]
kept = blocks[::100]
del blocks
if sys.argv[1] == "returned":
    return_freed_memory()
print(resident() - before)
"""


def memory_growth(variant: str, program: str = DECODING) -> float:
    command = [sys.executable, "-c", START + program, variant]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout) / 1e6


@pytest.mark.slow
@pytest.mark.skipif(
    not (Path("/proc/self/statm").exists() and unmap_large_blocks()), reason="not glibc on Linux"
)
def test_memory_of_images_is_returned() -> None:
    assert memory_growth("kept") > 30  # otherwise the next line would prove nothing
    assert memory_growth("returned") < 15


@pytest.mark.skipif(
    not (Path("/proc/self/statm").exists() and unmap_large_blocks()), reason="not glibc on Linux"
)
def test_memory_that_threads_freed_is_used_by_others() -> None:
    assert memory_growth("returned", IN_THREADS) < 80  # of 16 times 20 MB


@pytest.mark.skipif(
    not (Path("/proc/self/statm").exists() and unmap_large_blocks()), reason="not glibc on Linux"
)
def test_memory_between_used_blocks_is_returned() -> None:
    assert memory_growth("kept", IN_GAPS) > 60  # otherwise the next line would prove nothing
    assert memory_growth("returned", IN_GAPS) < 30


def test_a_gateway_returns_freed_memory_at_intervals(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(server_module, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(server_module, "return_freed_memory", lambda: calls.append(1))
    with run_gateway(build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)):
        end = time.monotonic() + 20
        while len(calls) < 3 and time.monotonic() < end:
            time.sleep(0.01)
    assert len(calls) >= 3


def jobs() -> int:
    return sum(type(one) is ChatJob for one in gc.get_objects())


@pytest.mark.parametrize("stream", [False, True])
def test_ended_requests_are_freed_without_garbage_collection(tmp_path: Path, stream: bool) -> None:
    async def retrieve(query: Query, k: int, /) -> list[Candidate]:
        return candidates("red", "blue")[:k]

    found = SharedRetriever(retrieve, min_k=2)
    gc.collect()
    before = jobs()  # of other tests
    with harness(tmp_path, retrieve=found) as gateway, client(gateway.url) as sender:
        gc.disable()
        try:
            for shade in range(3):
                list(
                    sender.chat.completions.create(
                        model="bottega", messages=user_messages(shade), stream=stream
                    )
                )
            gateway.wait(3)
            end = time.monotonic() + 10
            while jobs() > before and time.monotonic() < end:
                time.sleep(0.01)
            assert jobs() <= before
        finally:
            gc.enable()


def test_open_connections_to_an_upstream_keep_no_requests(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [slowly(ok("fine"), 0.1)]
    gateway_server = build(gateway_config(tmp_path, endpoint.url), ENVIRONMENT)
    gc.collect()
    before = jobs()  # of other tests
    with run_gateway(gateway_server) as url, ThreadPoolExecutor() as pool:
        list(pool.map(partial(ask, url), "abcd"))  # each opens a connection
        assert endpoint.most_at_once == 4
        end = time.monotonic() + 2  # idle connections are closed later
        while jobs() > before and time.monotonic() < end:
            gc.collect()
            time.sleep(0.01)
        assert jobs() <= before
