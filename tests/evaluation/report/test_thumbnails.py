from __future__ import annotations

import io
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from bottega.errors import BottegaError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.report.payload import SIDE, keep_thumbnails, thumbnail
from bottega.evaluation.runs.run_store import FILE, RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.image import Image
from bottega.types import Answer, Candidate, Prompt, Query, Reply, Trace
from tests.builders import example, solid_image

EXAMPLES = tuple(example("ab"[i % 2], 100 + i) for i in range(6))
ITEMS = tuple(example("ab"[i % 2], i) for i in range(3))
BENCHMARK = Benchmark("letters", EXAMPLES, ITEMS, ("a", "b"))


async def show_two(query: Query) -> Outcome:
    shown_hashes = tuple(Candidate(one, 0.5) for one in EXAMPLES[:2])
    answer = Answer("a", labels=("a",))
    trace = Trace("t", 0.0, query, "x", shown_hashes, Prompt(()), Reply("m", ()), answer, 0.1)
    return Outcome(answer, trace)


METHOD = Method("top-k", 2, show_two)


async def run(folder: Path, data: Benchmark = BENCHMARK) -> Path:
    with closing(RunStore.open(folder, {}, data.items)) as ledger:
        await evaluate(data, METHOD, state=RunState(ledger))
    return folder / FILE


def thumbnails_in(path: Path) -> dict[str, bytes]:
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT sha256, data FROM thumbnails"))


async def test_thumbnails_cover_only_queries_and_demonstrations(tmp_path: Path) -> None:
    path = await run(tmp_path)
    steps: list[int] = []
    assert keep_thumbnails(path, BENCHMARK, METHOD, progress=steps.append) == 5
    assert sum(steps) == 5
    query_hashes = {item.query.images[0].sha256 for item in ITEMS}
    shown_hashes = {one.query.images[0].sha256 for one in EXAMPLES[:2]}
    assert thumbnails_in(path).keys() == query_hashes | shown_hashes
    with Pillow.open(io.BytesIO(next(iter(thumbnails_in(path).values())))) as small:
        assert small.size == (8, 8)


async def test_second_pass_adds_only_missing_thumbnails(tmp_path: Path) -> None:
    path = await run(tmp_path)
    other = Method("zero-shot", 0, show_two)
    assert keep_thumbnails(path, BENCHMARK, other) == 3
    assert keep_thumbnails(path, BENCHMARK, METHOD) == 2
    assert keep_thumbnails(path, BENCHMARK, METHOD) == 0


async def test_damaged_image_is_reported_and_others_are_kept(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Pillow.new("RGB", (64, 64), "teal").save(buffer, "PNG")
    damaged = Image.from_bytes(buffer.getvalue()[:60], source="torn.png")
    torn = replace(ITEMS[0], query=replace(ITEMS[0].query, images=(damaged,)))
    data = replace(BENCHMARK, items=(torn, *ITEMS[1:]))
    path = await run(tmp_path, data)
    errors: list[BottegaError] = []
    keep_thumbnails(path, data, METHOD, on_error=errors.append)
    assert ["torn.png" in str(error) for error in errors] == [True]
    assert len(thumbnails_in(path)) == 4


def test_large_images_are_scaled_down_and_tiny_images_stay_exact() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 600, 3), np.uint8)
    small = thumbnail(Image.from_pillow(Pillow.fromarray(noise)))
    with Pillow.open(io.BytesIO(small)) as opened:
        assert opened.size == (SIDE, SIDE // 2)
    assert len(small) < 10_000
    tiny = solid_image(7)
    with Pillow.open(io.BytesIO(thumbnail(tiny))) as opened:
        assert opened.convert("RGB").tobytes() == tiny.decode().tobytes()
