"""Count the project files that one request passes: python benchmarks/files_per_request.py [--list]

Three requests, each after a warm-up of the same kind, so imports do not count: a chat completion
with demonstrations through the gateway's ASGI app, an evaluated item, and a pipeline query. Model
and upstream are stand-ins: an HTTP server on loopback and a scripted generator. A file counts if a
function in it starts, on any thread.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from aiohttp import web

import bottega
from bottega import Image, KnowledgeBase, PixelEmbedder, ScriptedGenerator, load_digits, visual_rag
from bottega.evaluation.benchmark import labelled_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.planning import plan
from bottega.evaluation.runner import evaluate
from bottega.gateway.config.loading import parse_config
from bottega.gateway.running.build import build
from bottega.recipes import Classifier

PROJECT = f"{Path(bottega.__file__).parent}{os.sep}"
LIMITS = {"chat completion": 45, "evaluated item": 25, "pipeline query": 18}
CONFIG = """
[gateway]
data = "{folder}/data"
[tiers.apprentice]
model = "openai:mock"
base_url = "{upstream}"
api_key_env = "MOCK_KEY"
shots = 2
price = [0.15, 0.60]
[tiers.master]
model = "openai:mock"
base_url = "{upstream}"
api_key_env = "MOCK_KEY"
price = [0.15, 0.60]
[cache]
file = "{folder}/cache.db"
embed = "pixels"
"""
Request = Callable[[], Awaitable[object]]


class FileTrace:
    """Project files in which a function starts while `active`."""

    def __init__(self) -> None:
        self.active = False
        self.files: set[str] = set()
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            monitoring.use_tool_id(monitoring.PROFILER_ID, "files per request")
            for event in (monitoring.events.PY_START, monitoring.events.PY_RESUME):
                monitoring.register_callback(monitoring.PROFILER_ID, event, self._started)
            events = monitoring.events.PY_START | monitoring.events.PY_RESUME
            monitoring.set_events(monitoring.PROFILER_ID, events)
        else:
            threading.settrace(self._called)
            sys.settrace(self._called)

    async def of(self, request: Request) -> set[str]:
        await request()
        await asyncio.sleep(0.5)  # background work of the warm-up
        self.files.clear()
        self.active = True
        await request()
        await asyncio.sleep(0.5)  # the ledger is written after the reply
        self.active = False
        return set(self.files)

    def _started(self, code: CodeType, offset: int) -> None:
        if self.active and code.co_filename.startswith(PROJECT):
            self.files.add(code.co_filename.removeprefix(PROJECT))

    def _called(self, frame: FrameType, event: str, arg: object) -> None:
        self._started(frame.f_code, 0)


async def upstream() -> tuple[web.AppRunner, str]:
    """Start an endpoint that gives one reply to every chat completion."""

    async def reply(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": "seven"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
        return web.json_response({"id": "x", "model": "mock", "choices": [choice], "usage": usage})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


def chat_request(app: Any, image: Image) -> Request:
    """Return a request for the apprentice with demonstrations and without stored replies."""
    url = f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "Which digit is this?"},
    ]
    body = {"model": "bottega/apprentice", "messages": [{"role": "user", "content": content}]}
    headers = {
        "host": "127.0.0.1",
        "content-type": "application/json",
        "x-bottega-cache": "no-store,no-replay",
    }
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "client": ("127.0.0.1", 50000),
        "server": ("127.0.0.1", 8000),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }

    async def request() -> None:
        received = [{"type": "http.request", "body": json.dumps(body).encode()}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not received:
                await asyncio.Event().wait()  # the client stays connected
            return received.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app(dict(scope), receive, send)
        reply = dict(sent[0]["headers"])
        assert sent[0]["status"] == 200, (sent[0], sent[1:])
        assert reply[b"x-bottega-demonstrations"] == b"2", reply

    return request


async def count(folder: Path, trace: FileTrace) -> dict[str, set[str]]:
    digits = list(load_digits())
    stored, first, second = digits[:50], digits[50], digits[51]
    os.environ["MOCK_KEY"] = "none"
    with KnowledgeBase.open(folder / "cache.db", PixelEmbedder()) as knowledge:
        knowledge.add(stored)
        model = ScriptedGenerator(lambda prompt: "seven")
        pipeline = visual_rag(knowledge, model, shots=3)
        benchmark = labelled_benchmark("digits", stored, [first])
        config = RunConfig(methods=("visual-rag",), shots=(3,))
        [method] = plan(config, benchmark, knowledge, Classifier(model, benchmark.labels))
        files = {
            "evaluated item": await trace.of(lambda: evaluate(benchmark, method, config)),
            "pipeline query": await trace.of(lambda: pipeline.answer(first.query)),
        }
    runner, url = await upstream()
    server = build(parse_config(CONFIG.format(folder=folder, upstream=url)))
    ready = asyncio.Event()
    server.when_ready = ready.set
    async with server.lifespan():
        await ready.wait()
        image = second.query.images[0]
        files["chat completion"] = await trace.of(chat_request(server.app, image))
    await runner.cleanup()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="Print the names of the files.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = asyncio.run(count(Path(folder), FileTrace()))
    for name, limit in LIMITS.items():
        print(f"{name}: {len(files[name])} files (limit {limit})")
        if options.list:
            print("".join(f"  {file}\n" for file in sorted(files[name])))


if __name__ == "__main__":
    main()
