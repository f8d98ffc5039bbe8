"""Count the project files that one request passes: python benchmarks/files_per_request.py [--list]

Three requests, each after a warm-up of the same kind, so imports do not count: a chat completion
with demonstrations through the gateway's ASGI app, an evaluated item, and a pipeline query. Model
and upstream are stand-ins: an HTTP server on loopback and a scripted generator. A file counts if a
function in it starts in the request or in a task or thread that the request starts, also after the
reply. Periodic work of the server does not count. `meters` compares the numbers with its limits.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextvars
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
from aiohttp import web
from PIL import Image as Pillow

import bottega
from bottega import (
    Example,
    Image,
    KnowledgeBase,
    PixelEmbedder,
    Query,
    ScriptedGenerator,
    visual_rag,
)
from bottega.evaluation.benchmark import labelled_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.methods.planning import plan
from bottega.evaluation.runs.runner import evaluate
from bottega.gateway.config.config_file import parse_config
from bottega.gateway.running.build import build
from bottega.recipes import Classifier

PROJECT = f"{Path(bottega.__file__).parent}{os.sep}"
SECONDS_TO_END = 60.0
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
in_request = contextvars.ContextVar("in_request", default=False)


class FileTrace:
    """Project files in which a function starts on behalf of a request. Create it in the event loop
    that runs the requests, before other threads."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._active = False
        self._started: list[asyncio.Task[Any] | threading.Thread] = []
        asyncio.get_running_loop().set_task_factory(self._start_task)
        self._follow_threads()
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            monitoring.use_tool_id(monitoring.PROFILER_ID, "files per request")
            for event in (monitoring.events.PY_START, monitoring.events.PY_RESUME):
                monitoring.register_callback(monitoring.PROFILER_ID, event, self._code_starts)
            events = monitoring.events.PY_START | monitoring.events.PY_RESUME
            monitoring.set_events(monitoring.PROFILER_ID, events)
        else:
            threading.settrace(self._frame_starts)

    async def of(self, request: Request) -> set[str]:
        token = in_request.set(True)
        if sys.version_info < (3, 12):
            sys.settrace(self._frame_starts)
        await self._complete(request)
        gc.collect()
        gc.disable()  # it would run finalizers of earlier work at any time
        self._active = True
        await self._complete(request)
        self._active = False
        gc.enable()
        if sys.version_info < (3, 12):
            sys.settrace(None)
        in_request.reset(token)
        files, self._files = self._files, set()
        return files

    async def _complete(self, request: Request) -> None:
        """Run a request and wait until the tasks and threads that it starts have ended."""
        await request()
        await wait_until(lambda: not any(map(_is_running, self._started)))
        self._started.clear()

    def _start_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        if in_request.get():
            self._started.append(task)
        return task

    def _follow_threads(self) -> None:
        """Run the threads that a request starts in its context, as tasks do."""
        start = threading.Thread.start

        def start_in_context(thread: threading.Thread) -> None:
            if in_request.get():
                thread.run = partial(contextvars.copy_context().run, thread.run)  # type: ignore[method-assign]
                self._started.append(thread)
            start(thread)

        threading.Thread.start = start_in_context  # type: ignore[assignment, method-assign]

    def _code_starts(self, code: CodeType, offset: int) -> None:
        if self._active and code.co_filename.startswith(PROJECT) and in_request.get():
            self._files.add(code.co_filename.removeprefix(PROJECT))

    def _frame_starts(self, frame: FrameType, event: str, arg: object) -> None:
        self._code_starts(frame.f_code, 0)


def _is_running(work: asyncio.Task[Any] | threading.Thread) -> bool:
    return work.is_alive() if isinstance(work, threading.Thread) else not work.done()


async def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS_TO_END
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"still running: {threading.enumerate()}, {asyncio.all_tasks()}")
        await asyncio.sleep(0.01)


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


def random_image(seed: int) -> Example:
    """Return a labelled image. scikit-learn's digits would take two seconds to import."""
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8), np.uint8)
    image = Image.from_pillow(Pillow.fromarray(pixels))
    label = ("six", "seven")[seed % 2]
    return Example(Query("Which digit is this?", (image,)), label, source=f"random, {seed}")


async def count(folder: Path) -> dict[str, set[str]]:
    # One thread, so no request opens a connection for a thread that the warm-up had not used.
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    trace = FileTrace()
    await asyncio.to_thread(int)  # starts the thread outside a request
    stored, first, second = [random_image(n) for n in range(50)], random_image(50), random_image(51)
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
        # The thread of the first write ends: those of later writes are started by requests.
        await wait_until(
            lambda: "bottega-ledger" not in [one.name for one in threading.enumerate()]
        )
        image = second.query.images[0]
        files["chat completion"] = await trace.of(chat_request(server.app, image))
    await runner.cleanup()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="Print the names of the files.")
    options = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("BOTTEGA_")]:
        del os.environ[name]  # settings of the user
    with tempfile.TemporaryDirectory() as folder:
        files = asyncio.run(count(Path(folder)))
    for name, found in files.items():
        print(f"{name}: {len(found)}")
        if options.list:
            print("".join(f"  {file}\n" for file in sorted(found)), end="")


if __name__ == "__main__":
    main()
