"""Latency of a key's lone requests beside the load of another key:
python benchmarks/fairness.py [--quick]

`bottega serve` and an upstream that answers after half a second run in processes of their own. One
key asks a question at a time, first alone, then while another key keeps 32 uploads stalled and 200
streams open and floods the tier with 64 requests at a time. The tier has 16 slots.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import aiohttp
import numpy as np
from yarl import URL

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from benchmarks.processes import STARTS, await_port, free_port, new_key, serve, start, stopping

UPSTREAM_SECONDS, SLOTS = 0.5, 16
UPLOADS, STREAMS, FLOOD = 32, 200, 64
UPLOAD_BYTES, SENT_BYTES = 8 << 20, 64 << 10
SETTLING_SECONDS = 5.0
TIMES = 2.0
UPSTREAM = f"""
import asyncio
import sys
from aiohttp import web

PORT, STREAM_SECONDS = int(sys.argv[1]), float(sys.argv[2])
now = most = 0

async def answer(request):
    global now, most
    now += 1
    most = max(most, now)
    try:
        return await reply(request, (await request.json()).get("stream"))
    finally:
        now -= 1

async def reply(request, streams):
    usage = {{"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}}
    choice = {{"index": 0, "finish_reason": "stop"}}
    shared = {{"id": "x", "model": "m", "created": 1, "usage": usage}}
    if not streams:
        await asyncio.sleep({UPSTREAM_SECONDS})
        said = choice | {{"message": {{"role": "assistant", "content": "7"}}}}
        return web.json_response(shared | {{"object": "chat.completion", "choices": [said]}})
    response = web.StreamResponse(headers={{"content-type": "text/event-stream"}})
    await response.prepare(request)
    chunk = shared | {{"object": "chat.completion.chunk", "choices": [choice | {{
        "finish_reason": None, "delta": {{"role": "assistant", "content": "7"}}}}]}}
    for _ in range(int(STREAM_SECONDS)):
        await response.write(b"data: %s\\n\\n" % web.json_response(chunk).body)
        await asyncio.sleep(1)
    chunk["choices"] = [choice | {{"delta": {{}}}}]
    await response.write(b"data: %s\\n\\ndata: [DONE]\\n\\n" % web.json_response(chunk).body)
    return response

async def main():
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/most", lambda request: web.Response(text=str(most)))
    app.router.add_get("/v1/models", lambda request: web.json_response({{"data": []}}))
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", PORT).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""
CONFIG = """
[gateway]
port = {port}
data = "{folder}/data"
max_concurrent = 1000
[keys]
required = true
[tiers.master]
model = "openai:large"
base_url = "{upstream}/v1"
concurrency = {slots}
[cache]
embed = "words"
"""
NO_CACHE = {"x-bottega-cache": "no-store,no-retrieve,no-replay"}


@dataclass
class Client:
    """Client with one key. `numbers` make each question a new one."""

    session: aiohttp.ClientSession
    url: str
    key: str
    numbers: count[int]

    async def ask(self, *, stream: bool = False) -> None:
        turn = {"role": "user", "content": f"What is {next(self.numbers)} + 4?"}
        body = {"model": "bottega/master", "messages": [turn], "stream": stream}
        headers = {"authorization": f"Bearer {self.key}", **NO_CACHE}
        url = f"{self.url}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as reply:
            text = await reply.text()
            if reply.status != 200:
                sys.exit(f"a request got {reply.status}: {text[:300]}")

    async def time(self, requests: int) -> list[float]:
        """Return the seconds of each of so many requests, one after the other."""
        seconds = []
        for _ in range(requests):
            began = time.perf_counter()
            await self.ask()
            seconds.append(time.perf_counter() - began)
        return seconds

    async def ask_forever(self, *, stream: bool) -> None:
        while True:
            await self.ask(stream=stream)

    async def stall_forever(self) -> None:
        """Begin an upload, and another one when the gateway has ended it."""
        url = URL(self.url)
        head = (
            f"POST /v1/files HTTP/1.1\r\nhost: {url.host}\r\nauthorization: Bearer {self.key}\r\n"
            f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {UPLOAD_BYTES}\r\n"
            '\r\n--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        )
        while True:
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head.encode() + b"x" * SENT_BYTES)
            with suppress(OSError):
                await reader.read()
            writer.close()


@asynccontextmanager
async def load(client: Client) -> AsyncGenerator[None]:
    """Keep uploads, streams and requests of the client open inside the block."""
    work = [asyncio.create_task(client.stall_forever()) for _ in range(UPLOADS)]
    work += [asyncio.create_task(client.ask_forever(stream=True)) for _ in range(STREAMS)]
    work += [asyncio.create_task(client.ask_forever(stream=False)) for _ in range(FLOOD)]
    await asyncio.sleep(SETTLING_SECONDS)
    try:
        yield
        for one in work:  # a client that failed was no load
            if one.done():
                one.result()
    finally:
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)


async def run(gateway: str, upstream: str, keys: tuple[str, str], requests: int) -> bool:
    """Measure once, and print the figures. Return whether they meet the bar."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        while (await session.get(f"{gateway}/readyz")).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        numbers = count(time.monotonic_ns())
        lone, other = (Client(session, gateway, key, numbers) for key in keys)
        await lone.time(3)
        alone = await lone.time(requests)
        async with load(other):
            beside = await lone.time(requests)
        most = int(await (await session.get(f"{upstream}/most")).text())
    p50, p99 = (np.percentile([alone, beside], share, axis=1) for share in (50, 99))
    bar = TIMES * p99[0] + UPSTREAM_SECONDS
    print(f"p50 {p50[0]:6.3f} s alone, {p50[1]:6.3f} s beside the load")
    print(f"p99 {p99[0]:6.3f} s alone, {p99[1]:6.3f} s beside the load   bar {bar:.3f} s")
    print(f"max {max(alone):6.3f} s alone, {max(beside):6.3f} s beside the load; {most} at a time")
    return bool(p99[1] <= bar) and most <= SLOTS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 requests, once")
    parser.add_argument("--stream-seconds", type=float, default=20.0)
    chosen = parser.parse_args()
    runs, requests = (1, 20) if chosen.quick else (3, 200)
    with tempfile.TemporaryDirectory() as name:
        folder, port, up = Path(name), free_port(), free_port()
        mock = [sys.executable, "-c", UPSTREAM, str(up), str(chosen.stream_seconds)]
        with stopping(await_port(start(mock, up, folder / "mock.log"), STARTS)) as upstream:
            config = folder / "bottega.toml"
            settings = {"port": port, "folder": folder, "upstream": upstream.url, "slots": SLOTS}
            config.write_text(CONFIG.format(**settings))
            options = ("--tiers", "*", "--max-concurrent", "1000")
            lone, other = (new_key(folder / "data", who, who, *options) for who in ("a", "b"))
            environment = {"OPENAI_API_KEY": "none"}
            with stopping(serve(config, port, folder / "gateway.log", environment)) as server:
                keys = (lone, other)
                met = [
                    asyncio.run(run(server.url, upstream.url, keys, requests)) for _ in range(runs)
                ]
    print("met" if all(met) else "MISSED")
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
