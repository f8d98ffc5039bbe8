"""Batches that wait: for limits, upstreams, other clients and restarts."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import closing
from pathlib import Path

import openai
import pytest
from aiohttp import web

from bottega.gateway.accounting.access import LocalLimiter
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE, Account
from bottega.gateway.running.server import GatewayServer
from tests.gateway.batches import chat_lines, ended, entries, gateway, rows, start, texts, with_key
from tests.gateway.harness import client
from tests.server import Server, ok, refuse


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
