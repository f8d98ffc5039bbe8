"""Bottega and its requests in benchmarks/gateway.py. The server is a process with one worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from benchmarks.processes import (
    UNLIMITED,
    Server,
    await_port,
    free_port,
    new_key,
    serve,
    start,
    stopping,
    uvicorn,
)
from bottega.image import Image
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.types import Example, Query

KEY = "sk-4f9c2d7e8b1a6c3f0e5d9a7b2c4e6f81"
PEERS_START = 20
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Case:
    name: str
    server: Server
    model: str = "mock"
    headers: Mapping[str, str] = field(default_factory=dict)
    variants: int | None = None
    """Number of different requests; None if all differ."""
    settles: float = 0.0
    """Seconds for what it does after its replies, which count as well."""
    key: str = KEY
    bodies: tuple[str, ...] = ("text", "image")
    path: str = CHAT

    @property
    def sent(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", **self.headers}


@contextlib.contextmanager
def running(
    module: str, folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    port = free_port()
    command = uvicorn(f"benchmarks.peers.{module}:app", port)
    with stopping(start(command, port, folder / f"{module}.log", environment)) as server:
        yield await_port(server, PEERS_START)


PASSED, REPEATED, AUGMENTED = "pass-through", "exact repeat", "with 2 examples"
EXAMPLES, SIDE, TEAM = 1000, 64, "team"
VARIANTS = 16
SETTLES = 0.6
"""Seconds until the ledger is written, which happens after the replies."""
CONFIG = """
[gateway]
port = {port}
data = "{folder}/data"

[tiers.apprentice]
model = "openai:mock"
base_url = "{upstream}"
api_key_env = "BENCH_KEY"
shots = 2
concurrency = 256
price = [0.15, 0.60]

[tiers.master]
model = "openai:mock"
base_url = "{upstream}"
api_key_env = "BENCH_KEY"
concurrency = 256
price = [0.15, 0.60]

[cache]
file = "{folder}/cache.db"
embed = "pixels"

[keys]
required = true
"""


@contextlib.contextmanager
def ours(folder: Path, mock: Server) -> Iterator[list[Case]]:
    port, config = free_port(), folder / "bottega.toml"
    config.write_text(CONFIG.format(port=port, folder=folder, upstream=f"{mock.url}/v1"))
    key = new_key(folder / "data", "bench", TEAM, *UNLIMITED)
    fill(folder / "cache.db")
    server = serve(config, port, folder / "bottega.log", {"BENCH_KEY": "none"})
    with stopping(server):
        yield cases(server, key)


STATE = """
[state]
database_env = "BENCH_DATABASE"
"""
NOTHING = {"x-bottega-cache": "no-store,no-retrieve,no-replay"}


def cases(server: Server, key: str) -> list[Case]:
    not_replayed = {"x-bottega-cache": "no-store,no-replay"}
    return [
        Case(PASSED, server, "bottega/master", NOTHING, key=key, settles=SETTLES),
        Case(REPEATED, server, "bottega", key=key, variants=VARIANTS, settles=SETTLES),
        Case(
            AUGMENTED,
            server,
            "bottega/apprentice",
            not_replayed,
            key=key,
            settles=SETTLES,
            bodies=("image",),  # its embedder sees pixels
        ),
    ]


def fill(file: Path) -> None:
    rng = np.random.default_rng(0)
    with KnowledgeBase.open(file, PixelEmbedder(), namespace=TEAM) as cache:
        cache.add(Example(question(i, rng), "A horse, and it is brown.") for i in range(EXAMPLES))


def question(number: int, rng: np.random.Generator) -> Query:
    pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    image = Image.from_pillow(Pillow.fromarray(pixels))
    return Query(f"Case {number}: what is on the left?", (image,))
