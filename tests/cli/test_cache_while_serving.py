"""File commands on a cache while a gateway writes to it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run

WRITER = """
import sys, time
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.types import Example, Query
from tests.builders import solid_image
with KnowledgeBase.open(sys.argv[1], PixelEmbedder(), namespace="a", capacity=500) as cache:
    for i in range(100_000):
        query = Query(f"question {i}", (solid_image(i),))
        cache.add([Example(query, "yes", source="master:m")])
        cache.used([example.example.id for example in cache.search(query, 2)] if i else [])
        print(i, flush=True)
        time.sleep(0.005)
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "cache.db")],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while b"10\n" not in (tmp_path / "output").read_bytes():
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        yield process
        process.kill()
        process.wait()


def test_commands_edit_a_cache_while_a_gateway_writes(
    run: Run, gateway: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    namespace = ("--namespace", "a")
    listed = run("ls", "cache.db", *namespace, "--text", "question", "--json").json
    assert isinstance(listed, list)
    first, second, *_ = (row["id"] for row in listed)
    assert run("show", "cache.db", first, *namespace).code == 0
    assert "1 changed; 1 pinned" in run("pin", "cache.db", first, *namespace).out
    assert "1 changed; 0 pinned" in run("unpin", "cache.db", first, *namespace).out
    assert "1 removed" in run("rm", "cache.db", second, *namespace).out
    assert run("show", "cache.db", second, *namespace).code == 1
    exported = run("export", "cache.db", "copy", *namespace, "--json").json
    assert isinstance(exported, dict)
    assert (exported["examples"] >= 10, exported["skipped"]) == (True, [])
    imported = run("import", "cache.db", "copy", "--namespace", "b", "--json").json
    assert isinstance(imported, dict)
    assert imported["new"] == exported["examples"]
    assert gateway.poll() is None, (tmp_path / "output").read_text()
    assert b"Error" not in (tmp_path / "output").read_bytes()
    assert run("verify", "cache.db").code == 0
