"""A batch survives the end of the gateway's process."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.cli.test_serve import served, write_config
from tests.gateway.harness import client
from tests.server import Server, ok

CHAT: Any = "/v1/chat/completions"
LINES, CONCURRENCY = 60, 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_batch_continues_after_the_end_of_the_process(
    endpoint: Server, tmp_path: Path, number: signal.Signals
) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.05)
        return await ok("fine")(request)

    endpoint.answers = [answer]
    names = [f"question {i}" for i in range(LINES)]
    file = write_config(tmp_path, endpoint.url)
    file.write_text(f"{file.read_text()}\n[batches]\nconcurrency = {CONCURRENCY}\n")
    body = {"model": "bottega:route=large,no-replay"}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": CHAT,
            "body": {**body, "messages": [{"role": "user", "content": name}]},
        }
        for name in names
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()

    def sent() -> Counter[str]:
        found = (body["messages"][-1]["content"] for body in endpoint.bodies if "messages" in body)
        return Counter(text for text in found if text in names)

    with served("--config", "bottega.toml", folder=tmp_path) as (url, process):
        with client(url) as real:
            upload = real.files.create(file=("b.jsonl", content), purpose="batch")
            batch = real.batches.create(
                input_file_id=upload.id, endpoint=CHAT, completion_window="24h"
            )
        while sent().total() < LINES // 2:
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(30)
    with served("--config", "bottega.toml", folder=tmp_path) as (url, _), client(url) as real:
        end = time.monotonic() + 60
        while (done := real.batches.retrieve(batch.id)).status != "completed":
            assert time.monotonic() < end, done
            time.sleep(0.05)
        assert done.error_file_id is None and done.output_file_id is not None
        output = real.files.content(done.output_file_id).text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in output) == sorted(names)
    assert set(sent()) == set(names)
    # SIGTERM lets the lines in progress end; a killed process has lost their results.
    twice = sent().total() - LINES
    assert twice == 0 if number is signal.SIGTERM else 0 <= twice <= CONCURRENCY
