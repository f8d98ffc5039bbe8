"""Gateways with batches, and their use by the real openai client."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import openai
from openai.types import Batch, FileObject

from bottega.gateway.accounting.ledger_schema import FILE
from bottega.gateway.config.gateway_settings import BatchSettings
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import client
from tests.server import Server

LIMITS: Any = {"limit": 100, "lifetime": 3600.0, "max_files": 10}
CHAT: Final = "/v1/chat/completions"
MASTER = "bottega:route=large"


@contextmanager
def gateway(
    folder: Path,
    endpoint: Server,
    change: Callable[[GatewayServer], None] = lambda server: None,
    more: str = "",
    **settings: Any,
) -> Iterator[str]:
    config = gateway_config(folder, endpoint.url, more)
    config = dataclasses.replace(config, batches=BatchSettings(**settings))
    server = build(config, ENVIRONMENT)
    change(server)
    with run_gateway(server) as url:
        yield url


@contextmanager
def with_key(url: str, key: str) -> Iterator[openai.OpenAI]:
    with client(url) as real:
        yield real.with_options(api_key=key)


def chat_lines(*texts: str, model: str = MASTER, **more: Any) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": text,
            "method": "POST",
            "url": CHAT,
            "body": {"model": model, "messages": [{"role": "user", "content": text}], **more},
        }
        for text in texts
    ]


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def upload(real: openai.OpenAI, content: bytes) -> FileObject:
    return real.files.create(file=("batch.jsonl", content), purpose="batch")


def start(real: openai.OpenAI, lines: Sequence[object], endpoint: Any = CHAT) -> Batch:
    file = upload(real, jsonl(lines))
    return real.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


def ended(real: openai.OpenAI, batch: Batch, *until: str) -> Batch:
    until = until or ("completed", "failed", "expired", "cancelled")
    end = time.monotonic() + 30
    while (batch := real.batches.retrieve(batch.id)).status not in until:
        assert time.monotonic() < end, batch
        time.sleep(0.01)
    return Batch.model_validate(batch.to_dict())


def rows(real: openai.OpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    text = real.files.content(file).text
    return {row["custom_id"]: row for row in map(json.loads, text.splitlines())}


def entries(folder: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(folder / FILE)) as connection:
        return connection.execute("SELECT account, state, cost_usd FROM gateway_entries").fetchall()


def texts(endpoint: Server) -> list[str]:
    return [body["messages"][-1]["content"] for body in endpoint.bodies if "messages" in body]
