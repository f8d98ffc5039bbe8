"""`bottega serve --workers`: real processes on one port with a shared database."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import openai
import pytest

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.running.workers import Supervisor
from tests.builders import solid_image
from tests.cli.conftest import Run
from tests.cli.test_serve import (
    answer_after,
    answer_of,
    served,
    wait_for,
    wait_for_exit,
    wait_until,
    wait_until_refused,
    write_config,
)
from tests.gateway.gateways import gateway_config
from tests.server import Server, ok, slowly

REPLACED = re.compile(r"worker (\d+) ended with status (-?\d+)")
REQUESTS = 40
STATE = '[state]\ndatabase_env = "TEST_DATABASE"\n'
OPEN = f"{STATE}[keys]\nrequired = false\n"


def shared_config(folder: Path, url: str, state: str = OPEN) -> Path:
    file = write_config(folder, url)
    file.write_text(f"{file.read_text()}\n{state}")
    return file


@contextmanager
def workers(
    folder: Path,
    endpoint: Server,
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    number: int = 2,
    state: str = OPEN,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    monkeypatch.setenv("TEST_DATABASE", database)
    file = shared_config(folder, endpoint.url, state)
    options = ("--config", str(file), "--workers", str(number), "--log-format", "json")
    with served(*options, folder=folder) as (url, process):
        wait_until(lambda: len(children(process.pid)) == number)
        for _ in range(2 * number):  # each connection may reach another worker
            wait_for(url.replace("/v1", "/readyz"), 200)
        yield url, process


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found]


def replace_worker(
    process: subprocess.Popen[str],
    number: signal.Signals,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Signal one worker and wait until another one has replaced it."""
    victim = children(process.pid)[0]
    os.kill(victim, number)
    meanwhile()
    wait_until(lambda: len({*children(process.pid)} - {victim}) == 2)


def counted(url: str) -> float:
    """Return the requests that the metrics of one worker show."""
    with urllib.request.urlopen(url.replace("/v1", "/metrics"), timeout=10) as reply:
        text = reply.read().decode()
    found = re.findall(r"^bottega_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def ask(url: str, question: str) -> str:
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    with client:
        reply = client.chat.completions.create(
            model="bottega", messages=[{"role": "user", "content": question}]
        )
    return str(reply.choices[0].message.content)


def send(url: str, number: int) -> None:
    """Send requests, each on a connection of its own."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: answer_of(url), range(number)))


@pytest.mark.parametrize(("end", "status"), [("exit 3", 3), ("exit 0", 128), ("kill -9 $$", 137)])
def test_a_first_worker_that_ends_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, status: int
) -> None:
    worker, config = tmp_path / "worker", gateway_config(tmp_path, "http://127.0.0.1:9/v1")
    worker.write_text(f"#!/bin/sh\n{end}\n")
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        supervisor = Supervisor(
            config, 2, [listening], style="json", announce=lambda _: None, read=lambda: config
        )
        assert asyncio.run(supervisor.run()) == status


@pytest.mark.parametrize(("end", "status"), [(0, 0), (3, 1)])
def test_the_status_says_whether_all_workers_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int, status: int
) -> None:
    """The stand-in of a worker listens, says that it has started, and ends with the status `end`
    when it is told to."""
    worker, config = tmp_path / "worker", gateway_config(tmp_path, "http://127.0.0.1:9/v1")
    worker.write_text(
        f"#!{sys.executable} -I\n"
        "import sys\nfrom multiprocessing.connection import Connection\n"
        "channel = Connection(int(sys.argv[-1]))\n"
        f"channel.recv_bytes()\nchannel.send(False)\nchannel.recv_bytes()\nsys.exit({end})\n"
    )
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        supervisor = Supervisor(
            config,
            1,
            [listening],
            style="json",
            announce=lambda _: os.kill(os.getpid(), signal.SIGTERM),
            read=lambda: config,
        )
        assert asyncio.run(supervisor.run()) == status


def test_several_workers_need_shared_state(run: Run, endpoint: Server, tmp_path: Path) -> None:
    file = write_config(tmp_path, endpoint.url)
    ran = run("serve", "--config", file, "--workers", 2)
    assert ran.code == 2
    assert "several workers need a shared database, got 2 workers" in ran.err
    assert "database_env" in ran.err and "--workers 1" in ran.err


@pytest.mark.slow
def test_an_error_of_the_first_worker_ends_the_start(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_DATABASE", "postgresql://nobody:hidden@127.0.0.1:9/none")
    monkeypatch.setenv("LARGE_KEY", "sk-0123456789abcdefghij")
    file = shared_config(tmp_path, endpoint.url)
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "bottega",
            "serve",
            "--config",
            file,
            "--workers",
            "2",
            "--port",
            "0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert ran.stderr.count("error:") == 1
    assert "hidden" not in ran.stderr and not ran.stdout


@pytest.mark.slow
def test_workers_sum_metrics_and_are_replaced(
    endpoint: Server, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with workers(tmp_path, endpoint, database, monkeypatch) as (url, process):
        send(url, REQUESTS)
        # Another worker's metrics are at most a second old.
        wait_until(lambda: [counted(url) for _ in range(6)] == [REQUESTS] * 6)
        replace_worker(process, signal.SIGKILL, meanwhile=lambda: send(url, REQUESTS))
        send(url, REQUESTS)
        wait_until(lambda: [counted(url) for _ in range(6)] == [3 * REQUESTS] * 6)
        process.send_signal(signal.SIGTERM)
        _, err = wait_for_exit(process)
    assert process.returncode == 0
    assert [code for _, code in REPLACED.findall(err)] == ["-9"]


@pytest.mark.slow
def test_rate_of_a_key_holds_over_all_workers(
    endpoint: Server, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Accounts(database)) as accounts:
        _, key = accounts.add("team", requests_per_minute=60)
    statuses = Counter[int]()
    with (
        workers(tmp_path, endpoint, database, monkeypatch, state=STATE) as (url, process),
        ThreadPoolExecutor(8) as pool,
    ):
        started = time.monotonic()
        for number, other in enumerate(children(process.pid)):
            os.kill(other, signal.SIGSTOP)  # all requests reach the first worker, then the second
            try:
                texts = [f"question {number} {n}" for n in range(61)]
                statuses.update(pool.map(lambda text: status_of(url, key, text), texts))
            finally:
                os.kill(other, signal.SIGCONT)
        elapsed = time.monotonic() - started
    assert statuses.keys() == {200, 429}
    # At most 62 within two seconds; each second allows another.
    assert 60 <= statuses[200] <= 60 + max(2.0, elapsed)


def status_of(url: str, key: str, question: str) -> int:
    """Send one request on a connection of its own."""
    message = {"role": "user", "content": question}
    body = json.dumps({"model": "bottega", "messages": [message]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def keep_sending(url: str, stop: threading.Event) -> int:
    """Send requests until `stop`; raise the first error."""
    sent = 0
    while not stop.is_set():
        assert answer_of(url) == "fine"
        sent += 1
    return sent


@dataclass
class SetAtEnd:
    """Event that is set when a test ends, also by a failure: threads wait for it."""

    event: threading.Event

    def close(self) -> None:
        self.event.set()


def accepts_images(url: str) -> bool:
    image = {"type": "image_url", "image_url": {"url": solid_image(1).data_url}}
    # An exact repeat would be replayed.
    content = [{"type": "text", "text": f"What is it? {uuid4()}"}, image]
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        try:
            client.chat.completions.create(
                model="bottega/large", messages=cast(Any, [{"role": "user", "content": content}])
            )
        except openai.BadRequestError:
            return False
    return True


@pytest.mark.slow
def test_sighup_reloads_all_workers_without_an_error(
    endpoint: Server, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint.answers = [slowly(ok("fine"), 0.02)]
    stop = threading.Event()
    with (
        workers(tmp_path, endpoint, database, monkeypatch) as (url, process),
        ThreadPoolExecutor(3) as pool,
        closing(SetAtEnd(stop)),
    ):
        load = [pool.submit(keep_sending, url, stop) for _ in range(3)]
        assert all(accepts_images(url) for _ in range(6))
        file = tmp_path / "bottega.toml"
        file.write_text(file.read_text() + "[limits]\nimages = 0\n")
        process.send_signal(signal.SIGHUP)
        wait_until(lambda: not any(accepts_images(url) for _ in range(6)))
        # A worker that starts later has the new settings, too.
        replace_worker(process, signal.SIGTERM)
        assert not any(accepts_images(url) for _ in range(12))
        stop.set()
        assert sum(one.result() for one in load) > 3
        process.send_signal(signal.SIGTERM)
        _, err = wait_for_exit(process)
    assert process.returncode == 0
    assert [code for _, code in REPLACED.findall(err)] == ["0"]


@pytest.mark.slow
def test_sigterm_lets_requests_of_all_workers_finish(
    endpoint: Server, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = threading.Event()
    with (
        workers(tmp_path, endpoint, database, monkeypatch) as (url, process),
        ThreadPoolExecutor(6) as pool,
        closing(SetAtEnd(event)),
    ):
        endpoint.bodies.clear()
        endpoint.answers = [answer_after(event, ok("late"))]
        replies = [pool.submit(ask, url, f"question {n}") for n in range(6)]
        wait_until(lambda: len(endpoint.bodies) == 6)
        process.send_signal(signal.SIGTERM)
        wait_until_refused(url.replace("/v1", "/readyz"))
        event.set()
        assert [reply.result() for reply in replies] == ["late"] * 6
        wait_for_exit(process)
    assert process.returncode == 0


@pytest.mark.slow
def test_workers_end_with_their_supervisor(
    endpoint: Server, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with workers(tmp_path, endpoint, database, monkeypatch) as (url, process):
        alive = children(process.pid)
        process.kill()
        process.wait(10)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in alive))
        port = int(url.split(":")[2].removesuffix("/v1"))
        with socket.create_server(("127.0.0.1", port)):  # no process listens any more
            pass


def test_an_empty_data_variable_leaves_keys_to_the_database(
    run: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers unset the data folder of the image this way (deploy/)."""
    monkeypatch.setenv("BOTTEGA_DATA", "")
    monkeypatch.setenv("BOTTEGA_DATABASE", database)
    run("keys", "add", "team")
    with closing(Accounts(database)) as accounts:
        assert [one.name for one in accounts.list()] == ["team"]
