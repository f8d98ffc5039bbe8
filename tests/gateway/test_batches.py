"""Files and batches with the real openai client against a real gateway."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import os
import socket
import sqlite3
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from aiohttp import web
from openai.types import Batch, FileObject

from bottega.gateway.accounting.access import LocalLimiter
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE, Account
from bottega.gateway.apis.batches.batch_records import StoredFile
from bottega.gateway.apis.batches.execution import DAY, HOUR
from bottega.gateway.apis.batches.lines import MAX_ERRORS, BatchLine, read_lines
from bottega.gateway.apis.batches.store import FILE as BATCHES_FILE
from bottega.gateway.apis.batches.store import ORPHAN_SECONDS, BatchStore
from bottega.gateway.config.gateway_settings import BatchSettings
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from bottega.openai_api.errors import ApiError
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import client
from tests.server import Server, ok, raw, refuse, running

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


def test_batch_fills_the_cache(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok("seven")]
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        batch = start(real, chat_lines("What is 3 + 4?", "What is 4 + 4?", "What is 5 + 4?"))
        assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"a": "b"})
        done = ended(real, batch)
        assert done.status == "completed" and done.error_file_id is None
        counts = done.request_counts
        assert counts is not None and (counts.total, counts.completed, counts.failed) == (3, 3, 0)
        assert done.created_at <= (done.in_progress_at or 0) <= (done.completed_at or 0)
        found = rows(real, done.output_file_id)
        assert sorted(found) == ["What is 3 + 4?", "What is 4 + 4?", "What is 5 + 4?"]
        reply = found["What is 3 + 4?"]["response"]
        assert reply["status_code"] == 200 and reply["request_id"].startswith("req_")
        assert reply["body"]["choices"][0]["message"]["content"] == "seven"
        assert found["What is 3 + 4?"]["error"] is None
        output = real.files.retrieve(done.output_file_id or "")
        assert (output.purpose, output.bytes) == (
            "batch_output",
            len(real.files.content(output.id).read()),
        )
        shown = real.chat.completions.with_raw_response.create(
            model="bottega:route=small",
            messages=[{"role": "user", "content": "What is 3 + 5?"}],
        )
        assert int(shown.headers["x-bottega-demonstrations"]) > 0
        assert [one.id for one in real.batches.list()] == [batch.id]
    assert [state for _, state, _ in entries(tmp_path)] == ["answered"] * 4
    # Outputs are in the file alone: a deleted file leaves none behind.
    with closing(sqlite3.connect(tmp_path / BATCHES_FILE)) as connection:
        assert connection.execute("SELECT count(*) FROM results").fetchone() == (0,)


def test_files_are_private_to_their_key(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        one, other = (accounts.add(name)[1] for name in ("one", "other"))
    content = jsonl(chat_lines("a"))
    with (
        gateway(tmp_path, endpoint) as url,
        with_key(url, one) as ours,
        with_key(url, other) as theirs,
    ):
        files = [upload(ours, content) for _ in range(3)]
        assert ours.files.content(files[0].id).read() == content
        assert (tmp_path / "files").stat().st_mode & 0o777 == 0o700
        shown = ours.files.retrieve(files[0].id)
        assert (shown.filename, shown.bytes, shown.purpose) == (
            "batch.jsonl",
            len(content),
            "batch",
        )
        listed = [file.id for file in ours.files.list(limit=2)]  # the client reads all pages
        assert listed == [file.id for file in reversed(files)]
        assert [file.id for file in ours.files.list(order="asc")] == [file.id for file in files]
        assert list(ours.files.list(purpose="batch_output")) == list(theirs.files.list()) == []
        batch = ours.batches.create(
            input_file_id=files[0].id, endpoint=CHAT, completion_window="24h"
        )
        for way in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError, match="no such file"):
                way(files[0].id)
        for attempt in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="no such batch"):
                attempt(batch.id)
        with pytest.raises(openai.NotFoundError):
            theirs.batches.create(input_file_id=files[1].id, endpoint=CHAT, completion_window="24h")
        with client(url) as stranger, pytest.raises(openai.AuthenticationError):
            upload(stranger, content)
        ended(ours, batch)
        assert ours.files.delete(files[0].id).deleted
        with pytest.raises(openai.NotFoundError):
            ours.files.retrieve(files[0].id)


def test_failed_requests_are_in_the_error_file(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok("fine")]
    lines = [
        *chat_lines("good"),
        *chat_lines("wrong model", model="gpt-9"),
        *chat_lines("wrong field", temperature="hot"),
    ]
    deep = b'{"custom_id": "deep", "method": "POST", "url": "%b", "body": {"x": %b}}\n' % (
        CHAT.encode(),
        b"[" * 900 + b"]" * 900,
    )
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        file = upload(real, jsonl(lines) + b"\n" + deep)
        batch = real.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = ended(real, batch)
        assert done.status == "completed"
        assert list(rows(real, done.output_file_id)) == ["good"]
        failed = rows(real, done.error_file_id)
        codes = {
            id: (row["response"]["status_code"], row["response"]["body"]["error"]["code"])
            for id, row in failed.items()
        }
    assert codes == {
        "wrong model": (404, "model_not_found"),
        "wrong field": (400, "invalid_type"),
        "deep": (400, "limit_exceeded"),
    }


def test_indented_replies_are_one_line_each(endpoint: Server, tmp_path: Path) -> None:
    choice = {"message": {"role": "assistant", "content": "a\nb"}, "finish_reason": "stop"}
    completion = {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 1}}
    indented = json.dumps(completion, indent=2).encode()
    endpoint.answers = [raw(indented, kind="application/json")]
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        done = ended(real, start(real, chat_lines("one", "two")))
        found = rows(real, done.output_file_id)
    assert sorted(found) == ["one", "two"]
    assert found["one"]["response"]["body"]["choices"] == [choice]


def test_invalid_input_fails_as_a_whole(endpoint: Server, tmp_path: Path) -> None:
    (good,) = chat_lines("a")
    lines = [
        good,
        good,
        {**good, "custom_id": "b", "method": "GET"},
        {**good, "custom_id": "c", "url": "/v1/embeddings"},
        {**good, "custom_id": ""},
        {**good, "custom_id": "d", "body": {"stream": True}},
        {**good, "custom_id": "e", "body": []},
        {name: value for name, value in good.items() if name != "method"},
    ]
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        file = upload(real, b"no json\n" + jsonl(lines))
        batch = real.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = ended(real, batch)
        empty = ended(real, start(real, []))
    assert done.status == "failed" and done.failed_at and done.errors and done.errors.data
    assert [(error.line, error.code, error.param) for error in done.errors.data] == [
        (1, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_method", "method"),
        (5, "mismatched_endpoint", "url"),
        (6, "invalid_value", "custom_id"),
        (7, "unsupported_parameter", "body.stream"),
        (8, "invalid_value", "body"),
        (9, "missing_required_parameter", "method"),
    ]
    assert empty.errors and empty.errors.data and empty.errors.data[0].code == "empty_file"
    assert texts(endpoint) == []


def test_lines_are_found_by_position(tmp_path: Path) -> None:
    path, lines = tmp_path / "input", chat_lines("a", "b", "é")
    path.write_bytes(b"\r\n".join(jsonl([line]).strip() for line in lines) + b"\n\n")
    found, errors = read_lines(path, CHAT, max_requests=3, max_bytes=1000)
    assert [(line.number, line.custom_id) for line in found] == [(1, "a"), (2, "b"), (3, "é")]
    raw = path.read_bytes()
    assert [json.loads(raw[one.start : one.start + one.length]) for one in found] == lines
    assert errors == []
    _, [error] = read_lines(path, CHAT, max_requests=2, max_bytes=1000)
    assert (error.code, error.line) == ("too_many_requests", 3)
    path.write_bytes(b"x" * 5000 + b"\n" + jsonl(chat_lines("a")))
    [line], [error] = read_lines(path, CHAT, max_requests=2, max_bytes=1000)
    assert (error.code, error.line, line) == (
        "line_too_long",
        1,
        BatchLine(2, 5001, line.length, "a"),
    )
    path.write_bytes(b"x\n" * 1000)
    assert len(read_lines(path, CHAT, max_requests=2, max_bytes=10)[1]) == MAX_ERRORS


def test_batch_waits_for_the_limits_of_its_key(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.apis.batches.execution.MAX_WAIT", 0.05)
    with closing(Accounts(tmp_path / FILE)) as accounts:
        account, key = accounts.add("team", requests_per_minute=600, max_concurrent=1)

    class Slow(LocalLimiter):
        admissions = 0

        async def admit(self, account: Account) -> float | None:
            self.admissions += 1
            return None if self.admissions % 3 == 0 else 0.02

    def slow(server: GatewayServer) -> None:
        server.gateway.limiter = Slow(server.ledger)

    names = [f"question {number}" for number in range(3)]
    with gateway(tmp_path, endpoint, slow) as url, with_key(url, key) as limited:
        real = limited.with_options(max_retries=20)  # the rate covers its own requests, too
        done = ended(real, start(real, chat_lines(*names, model="bottega:no-replay")))
        assert done.status == "completed" and done.error_file_id is None
        assert sorted(rows(real, done.output_file_id)) == names
    assert sorted(texts(endpoint)) == names and endpoint.most_at_once == 1
    # An attempt that waits is no request.
    assert [row[:2] for row in entries(tmp_path)] == [(account.id, "answered")] * 3


def test_overloaded_upstream_is_asked_again_but_a_spent_budget_is_final(
    endpoint: Server, tmp_path: Path
) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        _, key = accounts.add("team")
        _, poor = accounts.add("poor", usd_per_month=0.0)
    more = '\n[tiers.only]\nmodel = "openai:only"\nretries = 0\nbase_url = "' + endpoint.url + '"\n'
    with gateway(tmp_path, endpoint, more=more) as url, with_key(url, key) as real:
        endpoint.answers = [refuse(429, retry_after="0.05"), ok("fine")]
        done = ended(real, start(real, chat_lines("a", model="bottega")))
        assert done.output_file_id and not done.error_file_id
        with with_key(url, poor) as other:
            failed = ended(other, start(other, chat_lines("a", model="bottega")))
            found = rows(other, failed.error_file_id)["a"]["response"]
    assert (found["status_code"], found["body"]["error"]["code"]) == (429, "insufficient_quota")


def test_paused_upstream_is_asked_again(endpoint: Server, tmp_path: Path) -> None:
    """The failures of a client pause the tier before the batch starts."""
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        endpoint.answers = [refuse(500)]
        paused = ""
        while paused != "upstream_paused":
            with pytest.raises(openai.InternalServerError) as failed:
                real.chat.completions.create(**chat_lines("client")[0]["body"])
            paused = str(failed.value.code)
        endpoint.answers = [ok("fine")]
        done = ended(real, start(real, chat_lines("a")))
        assert done.output_file_id and not done.error_file_id
        assert list(rows(real, done.output_file_id)) == ["a"]


def test_line_during_whose_attempts_the_upstream_is_paused_is_sent_again(
    endpoint: Server, tmp_path: Path
) -> None:
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        endpoint.answers = [refuse(500)] * 5 + [ok("fine")]
        with pytest.raises(openai.InternalServerError):  # three failures; two more open the breaker
            real.chat.completions.create(**chat_lines("client")[0]["body"])
        done = ended(real, start(real, chat_lines("a")))
        assert done.output_file_id and not done.error_file_id


def test_batch_continues_after_a_restart(endpoint: Server, tmp_path: Path) -> None:
    names = [f"question {number}" for number in range(8)]

    async def answer(request: web.Request) -> web.StreamResponse:
        if len(texts(endpoint)) > 5:  # the first ones are answered, the others hang
            await asyncio.sleep(30)
        return await ok("fine")(request)

    endpoint.answers = [answer]
    lines = chat_lines(*names, model="bottega:route=large,no-replay")
    with gateway(tmp_path, endpoint, concurrency=2) as url, client(url) as real:
        batch = start(real, lines)
        end = time.monotonic() + 20
        while len(texts(endpoint)) < 7 and time.monotonic() < end:
            time.sleep(0.01)
        half = real.batches.retrieve(batch.id)
        assert half.status == "in_progress"
        assert half.request_counts and half.request_counts.completed == 5
        sent = texts(endpoint)
        with pytest.raises(openai.ConflictError, match="input of"):
            real.files.delete(half.input_file_id)
    endpoint.answers = [ok("fine")]
    endpoint.bodies.clear()
    with gateway(tmp_path, endpoint, concurrency=2) as url, client(url) as real:
        done = ended(real, batch)
        assert done.status == "completed" and done.error_file_id is None
        assert sorted(rows(real, done.output_file_id)) == names
        # Only the two lines in progress are sent again.
        assert sorted(texts(endpoint)) == sorted(set(names) - set(sent[:5]))
    assert len(sent) == 7


def test_closing_gateway_finishes_the_lines_in_progress(endpoint: Server, tmp_path: Path) -> None:
    names = [f"question {number}" for number in range(9)]
    servers: list[GatewayServer] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return await ok("fine")(request)

    endpoint.answers = [answer]
    lines = chat_lines(*names, model="bottega:route=large,no-replay")
    with gateway(tmp_path, endpoint, servers.append, concurrency=2) as url, client(url) as real:
        batch = start(real, lines)
        while len(texts(endpoint)) < 3:
            time.sleep(0.005)
        (server,) = servers
        assert server.app.in_flight >= 1  # SIGTERM waits for these
        server.app.closing = True
        while server.app.in_flight:
            time.sleep(0.005)
        sent = texts(endpoint)
        counts = real.batches.retrieve(batch.id).request_counts
        assert counts is not None and 3 <= counts.completed == len(sent) < 9
    with gateway(tmp_path, endpoint, concurrency=2) as url, client(url) as real:
        done = ended(real, batch)
        assert sorted(rows(real, done.output_file_id)) == names
    assert sorted(texts(endpoint)) == names  # each line once


def test_lines_wait_while_clients_need_the_gateway(endpoint: Server, tmp_path: Path) -> None:
    servers: list[GatewayServer] = []
    with gateway(tmp_path, endpoint, servers.append) as url, client(url) as real:
        (server,) = servers
        half = server.app.limit // 2
        for _ in range(half):
            server.app.begin()
        batch = start(real, chat_lines("a", "b"))
        ended(real, batch, "in_progress")
        time.sleep(0.15)
        assert texts(endpoint) == []
        for _ in range(half):
            server.app.end()
        assert ended(real, batch).status == "completed"


def test_many_batches_of_one_key_do_not_delay_that_of_another(
    endpoint: Server, tmp_path: Path
) -> None:
    servers, released = list[GatewayServer](), threading.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        while not released.is_set():  # noqa: ASYNC110 - set in another thread
            await asyncio.sleep(0.01)
        return await ok("fine")(request)

    with closing(Accounts(tmp_path / FILE)) as accounts:
        first, second = (accounts.add(name, tiers=("*",))[1] for name in ("a", "b"))
    with gateway(tmp_path, endpoint, servers.append, concurrency=1) as url, client(url) as real:
        endpoint.answers = [answer]
        one, other = real.with_options(api_key=first), real.with_options(api_key=second)
        for number in range(9):
            start(one, chat_lines(f"a {number}"))
        batch = start(other, chat_lines("b"))
        assert servers[0].batches is not None
        slots, end = servers[0].batches._slots, time.monotonic() + 30
        while sum(map(len, list(slots.waiting.values()))) < 9:
            assert time.monotonic() < end
            time.sleep(0.01)
        released.set()
        ended(other, batch)
    assert texts(endpoint).index("b") <= 2


def test_lower_limits_do_not_fail_a_batch_with_results(endpoint: Server, tmp_path: Path) -> None:
    servers: list[GatewayServer] = []
    lines = chat_lines(*(str(number) for number in range(4)), model="bottega:no-replay")
    with gateway(tmp_path, endpoint, servers.append, concurrency=1) as url, client(url) as real:
        batch = start(real, lines)
        while not texts(endpoint):
            time.sleep(0.005)
        servers[0].app.closing = True
    with gateway(tmp_path, endpoint, max_requests=1) as url, client(url) as real:
        done = ended(real, batch)
        assert done.status == "completed" and done.request_counts
        assert done.request_counts.completed == 4


def test_cancelled_batch_keeps_its_output(endpoint: Server, tmp_path: Path) -> None:
    names = [f"question {number}" for number in range(200)]
    with gateway(tmp_path, endpoint, concurrency=1) as url, client(url) as real:
        batch = start(real, chat_lines(*names, model="bottega:no-replay"))
        ended(real, batch, "in_progress")
        while not texts(endpoint):
            time.sleep(0.01)
        assert real.batches.cancel(batch.id).status == "cancelling"
        done = ended(real, batch)
        assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
        assert done.request_counts and 0 < done.request_counts.completed < 200
        assert len(rows(real, done.output_file_id)) == done.request_counts.completed
        assert real.batches.cancel(batch.id).status == "cancelled"
        finished = ended(real, start(real, chat_lines("a")))
        with pytest.raises(openai.ConflictError, match="completed"):
            real.batches.cancel(finished.id)


def test_expired_batch_lists_what_was_not_sent(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, concurrency=1, expire_hours=1e-7) as url, client(url) as real:
        done = ended(real, start(real, chat_lines("a", "b")))
        assert done.status == "expired" and done.expired_at
        found = rows(real, done.error_file_id)
    assert {id: row["error"]["code"] for id, row in found.items()} == {
        "a": "batch_expired",
        "b": "batch_expired",
    }
    assert found["a"]["response"] is None


def test_viewers_key_ends_its_batch(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        account, key = accounts.add("team")

    def block(server: GatewayServer) -> None:
        assert server.batches is not None
        server.batches.account = lambda id: dataclasses.replace(account, viewer=True)

    with gateway(tmp_path, endpoint, block) as url, with_key(url, key) as real:
        done = ended(real, start(real, chat_lines("a")))
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "invalid_api_key"


def test_revoked_key_ends_its_batch(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        _, key = accounts.add("team")

    def block(server: GatewayServer) -> None:
        server.accounts.find = lambda id: None  # type: ignore[method-assign]
        assert server.batches is not None
        server.batches.account = server.accounts.find

    with gateway(tmp_path, endpoint, block) as url, with_key(url, key) as real:
        done = ended(real, start(real, chat_lines("a")))
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "invalid_api_key"
    assert texts(endpoint) == []


def test_missing_input_file_ends_its_batch(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint) as url, client(url) as real:
        file = upload(real, jsonl(chat_lines("a")))
        (tmp_path / "files" / file.id).unlink()
        batch = real.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        done = ended(real, batch)
    assert done.status == "failed" and done.errors and done.errors.data
    assert done.errors.data[0].code == "missing_file"


def test_batch_of_a_file_that_is_deleted_meanwhile_is_refused(tmp_path: Path) -> None:
    class DeletingStore(BatchStore):
        """Store in which another request deletes each file right after it was found."""

        def file(self, account: str, id: str) -> StoredFile:
            found = super().file(account, id)
            with self._transaction() as connection:
                connection.execute("DELETE FROM files")
            return found

    with closing(DeletingStore(tmp_path)) as store:
        file = store.add_file("a", "x", io.BytesIO(b"{}"), **LIMITS)
        with pytest.raises(ApiError, match="no such file"):
            store.add_batch("a", CHAT, file.id, None, expires=0.0, limit=10, max_batches=10)
        assert store.unfinished() == []


def test_batch_above_the_limit_of_unfinished_ones_is_not_stored(tmp_path: Path) -> None:
    fields: Any = {"expires": 0.0, "limit": 1, "max_batches": 10}
    with closing(BatchStore(tmp_path)) as store:
        file = store.add_file("a", "x", io.BytesIO(b"{}"), **LIMITS)
        first = store.add_batch("a", CHAT, file.id, None, **fields)
        with pytest.raises(ApiError, match="limit of 1 unfinished batches"):
            store.add_batch("a", CHAT, file.id, None, **fields)
        assert [batch.id for batch in store.unfinished()] == [first.id]


def test_old_contents_without_a_row_are_deleted(tmp_path: Path) -> None:
    with closing(BatchStore(tmp_path)) as store:
        file = store.add_file("a", "x", io.BytesIO(b"{}"), **LIMITS)
        store.path("uploading").write_bytes(b"{}")
        store.path("left-over").write_bytes(b"{}")
        old = time.time() - 2 * ORPHAN_SECONDS
        for name in (file.id, "left-over"):
            os.utime(store.path(name), (old, old))
        store.remove_expired(0.0)
        left = {path.name for path in store.path(file.id).parent.iterdir()}
    assert left == {file.id, "uploading"}


def test_other_endpoints(endpoint: Server, tmp_path: Path) -> None:
    def line(url: str, body: Any) -> list[Any]:
        return [{"custom_id": "a", "method": "POST", "url": url, "body": body}]

    with gateway(tmp_path, endpoint) as url, client(url) as real:
        bodies: dict[str, Any] = {
            "/v1/responses": {"model": MASTER, "input": "hi"},
            "/v1/embeddings": {"model": "bottega/embedder", "input": "hi"},
            "/v1/completions": {"model": MASTER, "prompt": "hi"},
        }
        started = {path: start(real, line(path, body), path) for path, body in bodies.items()}
        kinds = {}
        for path, batch in started.items():
            found = rows(real, ended(real, batch).output_file_id)["a"]["response"]["body"]
            kinds[path] = found["object"]
    assert kinds == {
        "/v1/responses": "response",
        "/v1/embeddings": "list",
        "/v1/completions": "text_completion",
    }


def test_sizes_are_limited(endpoint: Server, tmp_path: Path) -> None:
    with (
        gateway(tmp_path, endpoint, file_mb=1, storage_mb=1, max_requests=2) as url,
        client(url) as real,
    ):
        with pytest.raises(openai.APIStatusError, match="bytes") as raised:
            upload(real, b"x" * (1 << 21))
        assert raised.value.status_code == 413
        with pytest.raises(openai.APIStatusError, match="body is larger than 65,536 bytes"):
            real.batches.create(
                input_file_id="file-1",
                endpoint="/v1/chat/completions",
                completion_window="24h",
                metadata={"note": "x" * 70_000},
            )
        file = upload(real, b"x" * 900_000)
        with pytest.raises(openai.APIStatusError, match="exceed"):
            upload(real, b"x" * 200_000)
        real.files.delete(file.id)
        assert upload(real, b"x" * 200_000).bytes == 200_000
        many = ended(real, start(real, chat_lines("a", "b", "c")))
        assert many.errors and many.errors.data
        assert many.errors.data[0].code == "too_many_requests"
        files = list((tmp_path / "files").iterdir())
    assert len(files) == 2  # rejected uploads leave nothing


def test_files_and_batches_of_a_key_are_counted(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        first, second = (accounts.add(name)[1] for name in ("a", "b"))
    with gateway(tmp_path, endpoint, max_files=3) as url, client(url) as real:
        one, other = real.with_options(api_key=first), real.with_options(api_key=second)
        done = ended(one, start(one, chat_lines("x")))  # its output counts, too
        assert done.metadata == {"a": "b"}
        upload(one, b"{}")
        with pytest.raises(openai.RateLimitError, match="limit of 3 files") as raised:
            upload(one, b"{}")
        assert raised.value.code == "too_many_files"
        assert raised.value.response.headers["x-should-retry"] == "false"
        assert len(list((tmp_path / "files").iterdir())) == 3
        upload(other, b"{}")
        for _ in range(2):
            ended(one, one.batches.create(**fields_of(done)))
        with pytest.raises(openai.RateLimitError, match="limit of 3 batches") as raised:
            one.batches.create(**fields_of(done))
        assert raised.value.code == "too_many_batches"
        for file in one.files.list().data:
            one.files.delete(file.id)
        assert upload(one, b"{}").bytes == 2


def fields_of(batch: Batch) -> Any:
    names = ("input_file_id", "endpoint", "completion_window")
    return {name: getattr(batch, name) for name in names}


def test_long_names_of_files_are_rejected(shared: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="255 characters") as refused:
        shared.files.create(file=("x" * 256, b"{}"), purpose="batch")
    assert refused.value.param == "file"
    longest = "é" * 255
    assert shared.files.create(file=(longest, b"{}"), purpose="batch").filename == longest


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"x" * 65: "a"}}, "metadata." + "x" * 64),
        ({"metadata": {str(n): "a" for n in range(17)}}, "metadata"),
        ({"extra_body": {"priority": 1}}, "priority"),
    ],
)
def test_invalid_batches_are_rejected_by_field(
    shared: openai.OpenAI, given: dict[str, Any], param: str
) -> None:
    fields = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **given}
    with pytest.raises(openai.BadRequestError) as refused:
        shared.batches.create(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("seconds", "lifetime"),
    [(60, HOUR), (2 * HOUR, 2 * HOUR), (400 * DAY, 30 * DAY)],
)
def test_lifetime_of_a_file_is_limited(
    shared: openai.OpenAI, seconds: int, lifetime: float
) -> None:
    file = shared.files.create(
        file=b"{}",
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": int(seconds)},
    )
    assert (file.expires_at or 0) - file.created_at == lifetime
    assert shared.files.retrieve(file.id).expires_at == file.expires_at


def test_output_is_kept_as_long_as_the_input(shared: openai.OpenAI) -> None:
    file = shared.files.create(
        file=jsonl(chat_lines("a")),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": int(2 * HOUR)},
    )
    batch = shared.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    output = shared.files.retrieve(ended(shared, batch).output_file_id or "")
    assert (output.expires_at or 0) - output.created_at == pytest.approx(2 * HOUR, abs=1)


def test_other_purposes_are_rejected(shared: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        shared.files.create(file=b"{}", purpose="user_data")
    assert refused.value.param == "purpose"
    with pytest.raises(openai.BadRequestError, match="multipart"):
        shared.post("/files", body={"purpose": "batch"}, cast_to=object)
    kind = {"content-type": "multipart/form-data", "host": "localhost"}
    request = urllib.request.Request(f"{shared.base_url}files", b"x", kind)
    with pytest.raises(urllib.error.HTTPError, match="400") as failed:
        urllib.request.urlopen(request)
    with failed.value as reply:
        assert b"Missing boundary" in reply.read()


def test_client_that_leaves_during_an_upload_is_no_error(
    shared: openai.OpenAI, caplog: pytest.LogCaptureFixture
) -> None:
    url = shared.base_url
    head = f"POST {url.path}files HTTP/1.1\r\nhost: {url.netloc.decode()}\r\ncontent-length: 99"
    kind = "content-type: multipart/form-data; boundary=x"
    with socket.create_connection((url.host, url.port or 80)) as leaving:
        leaving.sendall(f"{head}\r\n{kind}\r\n\r\n--x\r\n".encode())
        time.sleep(0.05)
    shared.models.list()  # after the gateway has noticed
    time.sleep(0.05)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("batches")
    with running() as endpoint, gateway(folder, endpoint) as url, client(url) as real:
        yield real


def test_batches_are_refused_with_shared_state(
    endpoint: Server, tmp_path: Path, gateway_database: str
) -> None:
    with closing(Accounts(gateway_database)) as accounts:
        key = accounts.add("team")[1]
    more = f'\n[state]\ndatabase_env = "DATABASE"\n# {gateway_database}'
    config = gateway_config(tmp_path, endpoint.url, more)
    server = build(config, {**ENVIRONMENT, "DATABASE": gateway_database})
    with (
        run_gateway(server) as url,
        with_key(url, key) as real,
        pytest.raises(openai.APIStatusError, match="the state is shared"),
    ):
        upload(real, b"{}")


def test_batches_can_be_off(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, concurrency=0) as url, client(url) as real:
        with pytest.raises(
            openai.APIStatusError, match="files and batches are not available"
        ) as refused:
            upload(real, b"{}")
        assert refused.value.status_code == 501
    assert not (tmp_path / "files").exists()
