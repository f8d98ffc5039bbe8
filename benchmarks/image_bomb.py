"""Load test of a gateway with small bodies whose images are large once decoded:
python benchmarks/image_bomb.py [--bombs 32] [--bomb one] [--demo]

`bottega serve` runs in a separate process. A tenant repeatedly asks about a small image, first
alone, then while another key sends all bombs at once. Prints the statuses of the bombs, the
resident memory of the process (peak, and 30 s after the last bomb was answered), and the tenant's
latency without and with the bombs.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp
import numpy as np
from PIL import Image as Pillow

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.processes import (
    STARTS,
    Server,
    await_port,
    free_port,
    new_key,
    serve,
    start,
    stopping,
    uvicorn,
)

SIDE = 6320  # the largest square within the default `image_pixels`
# Name: images of a body, pixels on a side, Pillow mode, format.
BOMBS = {
    "five": (5, SIDE, "1", "PNG"),  # more than the default `request_pixels`
    "one": (1, SIDE, "1", "PNG"),
    "rgb": (1, SIDE, "RGB", "PNG"),
    "webp": (1, 4000, "RGB", "WEBP"),
    "jpeg": (1, SIDE, "RGB", "JPEG"),  # progressive: the decoder holds all coefficients
    "many": (12, 2000, "P", "PNG"),
}
OPTIONS: dict[str, dict[str, object]] = {
    "WEBP": {"lossless": True, "method": 0},
    "JPEG": {"progressive": True},
}
LOCAL = '[tiers.apprentice]\nmodel = "bundled"\n[tiers.master]\nmodel = "bundled:master"\n'
REMOTE = """
[tiers.apprentice]
model = "openai:small"
base_url = "{upstream}/v1"
shots = 2
[tiers.master]
model = "openai:large"
base_url = "{upstream}/v1"
[cache]
embed = "pixels"
"""
GATEWAY = '[gateway]\nport = {port}\ndata = "{folder}/data"\n[keys]\nrequired = true\n'
PEAK_MB, AFTER_MB, TIMES = 1000, 300, 3.0


def body(kind: str, number: int) -> dict[str, object]:
    """Return a body with new images, because repeated requests are replayed."""
    count, side, mode, format = BOMBS[kind]
    return question(image(side, mode, format, 100 * number + i) for i in range(count))


def image(side: int, mode: str, format: str, number: int) -> str:
    pixels = Pillow.new(mode, (side, side))
    pixels.putpixel((number % side, number // side), 1 if mode in "1P" else (1, 2, 3))
    buffer = io.BytesIO()
    pixels.save(buffer, format, **OPTIONS.get(format, {}))
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{format.lower()};base64,{data}"


def small(number: int) -> dict[str, object]:
    noise = np.random.default_rng(number).integers(0, 255, (96, 96, 3), np.uint8)
    buffer = io.BytesIO()
    Pillow.fromarray(noise).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return question([f"data:image/png;base64,{data}"])


def question(urls: object) -> dict[str, object]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]  # type: ignore[attr-defined]
    parts.append({"type": "text", "text": "What colour is it?"})
    return {"model": "bottega", "messages": [{"role": "user", "content": parts}]}


class Tenant:
    """Client that asks one question at a time, at most ten per second."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self._session, self._url, self._key = session, url, key
        self._number = 0

    async def ask(self, until: asyncio.Event) -> list[float]:
        """Return the seconds of each answer. The first failure exits the program."""
        seconds = []
        while not until.is_set():
            self._number += 1
            began = time.perf_counter()
            status, said = await post(self._session, self._url, self._key, small(self._number))
            seconds.append(time.perf_counter() - began)
            if status != 200:
                sys.exit(f"the tenant got {status}: {said}")
            await asyncio.sleep(max(0.0, 0.1 - seconds[-1]))
        return seconds


async def post(
    session: aiohttp.ClientSession, url: str, key: str, sent: dict[str, object]
) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key}"}
    async with session.post(url, json=sent, headers=headers) as reply:
        return reply.status, (await reply.text())[:300]


async def resident(server: Server, until: asyncio.Event) -> int:
    """Return the peak resident memory in bytes."""
    peak = 0
    while not until.is_set():
        peak = max(peak, server.resident())
        await asyncio.sleep(0.02)
    return peak


async def run(server: Server, keys: tuple[str, str], kind: str, bombs: int) -> bool:
    url = f"{server.url}/v1/chat/completions"
    bodies = [await asyncio.to_thread(body, kind, number) for number in range(bombs)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while (await session.get(f"{server.url}/readyz")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        tenant = Tenant(session, url, keys[0])
        quiet = asyncio.Event()
        asyncio.get_running_loop().call_later(20, quiet.set)
        alone = await tenant.ask(quiet)
        before, over = server.resident(), asyncio.Event()
        beside, peak = (
            asyncio.create_task(tenant.ask(over)),
            asyncio.create_task(resident(server, over)),
        )
        began = time.perf_counter()
        replies = await asyncio.gather(*(post(session, url, keys[1], one) for one in bodies))
        lasted = time.perf_counter() - began
        await asyncio.sleep(max(0.0, 10 - lasted))  # refused bombs are over at once
        over.set()
        disturbed, highest = await beside, await peak
        await asyncio.sleep(30)
    after = server.resident()
    print(
        f"bombs             {bombs} x {kind}, {len(str(bodies[0])) // 1024} KB each, {lasted:.1f} s"
    )
    print(f"answered          {dict(Counter(status for status, _ in replies))}")
    print(
        f"  e.g.            {next((said for status, said in replies if status != 200), '-')[:160]}"
    )
    print(f"memory before     {before / 1e6:8.0f} MB")
    print(f"memory, peak      {highest / 1e6:8.0f} MB   bar {PEAK_MB}")
    print(f"memory after 30 s {after / 1e6:8.0f} MB   bar {AFTER_MB}")
    p99 = [float(np.percentile(one, 99)) for one in (alone, disturbed)]
    p50 = [float(np.percentile(one, 50)) for one in (alone, disturbed)]
    print(f"tenant, p50       {p50[0] * 1e3:8.0f} ms alone, {p50[1] * 1e3:.0f} ms with the bombs")
    print(
        f"tenant, p99       {p99[0] * 1e3:8.0f} ms alone, {p99[1] * 1e3:.0f} ms with the bombs"
        f" ({len(alone)} and {len(disturbed)} requests)   bar {TIMES:g} times"
    )
    return highest <= PEAK_MB * 1e6 and after <= AFTER_MB * 1e6 and p99[1] <= TIMES * p99[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bombs", type=int, default=32)
    parser.add_argument("--bomb", choices=sorted(BOMBS), default="one")
    parser.add_argument("--demo", action="store_true", help="serve the bundled models and embedder")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        mock = uvicorn("benchmarks.peers.mock_upstream:app", up := free_port())
        with stopping(await_port(start(mock, up, folder / "mock.log"), STARTS)) as upstream:
            config = folder / "bottega.toml"
            text = GATEWAY + (LOCAL if chosen.demo else REMOTE)
            config.write_text(text.format(port=port, folder=folder, upstream=upstream.url))
            tenant, bomber = (new_key(folder / "data", who, who) for who in ("tenant", "bomber"))
            keys = (tenant, bomber)
            environment = {"OPENAI_API_KEY": "none"}
            with stopping(serve(config, port, folder / "gateway.log", environment)) as server:
                met = asyncio.run(run(server, keys, chosen.bomb, chosen.bombs))
    print("met" if met else "MISSED")
    sys.exit(not met)


if __name__ == "__main__":
    main()
