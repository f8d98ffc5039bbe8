"""Bottega in benchmarks/gateway.py: one `bottega serve` with three kinds of requests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from benchmarks.gateway_cases import Case
from benchmarks.processes import Server, free_port, stopping
from benchmarks.served import UNLIMITED, new_key, serve
from bottega.image import Image
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.types import Example, Query

PASSED, REPEATED, AUGMENTED = "pass-through", "exact repeat", "with 2 examples"
KNOWN, SIDE, TEAM = 1000, 64, "team"
VARIANTS = 16
SETTLES = 0.6
"""Seconds: the ledger is written behind the replies."""
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


def cases(server: Server, key: str) -> list[Case]:
    nothing = {"x-bottega-cache": "no-store,no-retrieve,no-replay"}
    anew = {"x-bottega-cache": "no-store,no-replay"}
    return [
        Case(PASSED, server, "bottega/master", nothing, key=key, settles=SETTLES),
        Case(REPEATED, server, "bottega", key=key, variants=VARIANTS, settles=SETTLES),
        Case(
            AUGMENTED,
            server,
            "bottega/apprentice",
            anew,
            key=key,
            settles=SETTLES,
            bodies=("image",),  # its embedder sees pixels
        ),
    ]


def fill(file: Path) -> None:
    rng = np.random.default_rng(0)
    with KnowledgeBase.open(file, PixelEmbedder(), namespace=TEAM) as cache:
        cache.add(Example(question(i, rng), "A horse, and it is brown.") for i in range(KNOWN))


def question(number: int, rng: np.random.Generator) -> Query:
    pixels = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    picture = Image.from_pillow(Pillow.fromarray(pixels))
    return Query(f"Case {number}: what is on the left?", (picture,))
