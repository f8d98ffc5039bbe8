"""Two processes write one file and are killed at random moments: what they had acknowledged is
there, and the file is sound."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bottega.knowledge import KnowledgeBase
from bottega.types import Query
from tests.knowledge.doubles import SeededEmbedder

# Adds (with an image), deletes, uses and searches; above 30 examples the index is a graph with a
# snapshot. Reports each change after it is done.
WRITER = """
import os, sys
from bottega.knowledge import KnowledgeBase
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.knowledge.doubles import SeededEmbedder
path, name = sys.argv[1:]
kb = KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=30)
print("opened", flush=True)
for i in range(100_000):
    query = Query(f"{name}/{i}", (solid_image(i % 97),))
    kb.add([Example(query, "yes")])
    print(f"+{name}/{i}", flush=True)
    found = kb.search(query, 1, include_self=True)[0].example
    assert found.query.text == f"{name}/{i}", (found.query.text, i)
    kb.used([found.id])
    if i % 5 == 4:
        print(f"?{name}/{i}", flush=True)  # may be gone from here on
        kb.delete([found.id])
        print(f"-{name}/{i}", flush=True)
"""


class Acknowledged:
    """Reports of the writers: acknowledged changes, and changes in progress."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.gone: set[str] = set()
        self.doubtful: set[str] = set()

    def take(self, lines: list[str]) -> None:
        for line in lines:
            sign, text = line[:1], line[1:]
            if sign == "+":
                self.kept.add(text)
            elif sign == "?":
                self.kept.discard(text)
                self.doubtful.add(text)
            elif sign == "-":
                self.doubtful.discard(text)
                self.gone.add(text)


def killed(path: Path, names: list[str], seconds: float) -> list[str]:
    """Return the output of writers that were killed after that many seconds."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "opened\n"
    time.sleep(seconds)
    lines: list[str] = []
    for writer in writers:
        writer.kill()
        output, errors = writer.communicate()
        assert errors == ""
        lines += [line for line in output.splitlines(keepends=True) if line.endswith("\n")]
    return [line.strip() for line in lines]


def crash(path: Path, rounds: int, seed: int) -> int:
    """Return the number of acknowledged examples, after checking that all exist."""
    rng, acknowledged = random.Random(seed), Acknowledged()
    for number in range(rounds):
        names = [f"{number}a", f"{number}b"]
        acknowledged.take(killed(path, names, rng.uniform(0, 0.4)))
        with KnowledgeBase.open(path, SeededEmbedder(), hnsw_above=30) as kb:
            there = {example.query.text: example for example in kb}
            assert acknowledged.kept <= there.keys()
            assert there.keys().isdisjoint(acknowledged.gone)
            assert [p.what for p in kb.verify().problems if ".part" not in p.what] == []
            if acknowledged.kept:
                wanted = there[rng.choice(sorted(acknowledged.kept))]
                assert kb.search(wanted.query, 1, include_self=True)[0].example == wanted
                assert len(kb.search(Query("any"), 100_000)) == len(there)
    return len(acknowledged.kept)


def test_killed_writers_lose_no_acknowledged_example(tmp_path: Path) -> None:
    assert crash(tmp_path / "kb.db", rounds=2, seed=0) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills_lose_no_acknowledged_example(tmp_path: Path) -> None:
    kept = crash(tmp_path / "kb.db", rounds=200, seed=1)
    print(f"{kept} acknowledged examples, none missing")
    assert kept > 1000
