from __future__ import annotations

import asyncio
import builtins
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import bottega.ui
from bottega.errors import SettingError
from bottega.evaluation.runs.run_store import FILE
from bottega.recording import TraceStore
from bottega.ui.standalone import ConsoleServer, Targets
from tests.cli.conftest import Run
from tests.evaluation.report.builders import benchmark, store_run, three_methods

DATA = benchmark(6, examples=4, side=8)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    root = tmp_path / "runs"
    asyncio.run(store_run(root / "animals", DATA, three_methods(DATA)[:1]))
    return root


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """File with the trace of one question."""
    path = tmp_path / "asked.db"
    outcome = asyncio.run(_answer())
    with closing(TraceStore.open(path)) as store:
        store.write([outcome])
    return path


async def _answer() -> Any:
    outcome = await three_methods(DATA)[2].answer(DATA.items[1].query)
    return outcome.trace


@contextmanager
def opened(*arguments: object, folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `bottega ui` in a process; yield the printed link."""
    command = [sys.executable, "-m", "bottega", "ui", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            first, _, link = process.stdout.readline().partition(": ")
            assert first == "console", process.communicate()
            yield link.strip(), process
        finally:
            process.kill()


@pytest.fixture
def base(run: Run, pets: Path) -> Path:
    assert run("add", "K.db", pets, "--embed", "pixels").code == 0
    return pets.parent / "K.db"


def test_each_target_has_its_pages_until_ctrl_c(
    runs: Path, traces: Path, base: Path, tmp_path: Path
) -> None:
    with opened(runs, traces, base, folder=tmp_path) as (link, process):
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with opener.open(link) as reply:
            url, text = reply.url.removesuffix("knowledge"), reply.read().decode()
        assert url.endswith("/ui/") and "12 examples, 3 labels" in text
        navigation = text.partition("</nav>")[0]
        assert "Evaluations" in navigation and "Playground" not in navigation
        for path, wanted in (
            ("cache?text=leaf", "4 entries"),
            ("requests", "Which animal is number 1?"),
            (f"requests/{1:016x}", "Demonstrations"),
            ("evaluations/run?run=animals", "zero-shot"),
        ):
            with opener.open(url + path) as reply:
                assert wanted in reply.read().decode(), path
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "")


async def test_a_page_cancelled_by_the_stop_has_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def slow(request: Request) -> Response:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return Response()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = ConsoleServer(Starlette(routes=[Route("/", slow)]), lambda: None)
        serving = asyncio.create_task(server.serve([listener]))
        _, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await begun.wait()
        server.handle_exit(signal.SIGINT, None)
        await serving
        await cancelled.wait()
        await asyncio.sleep(0.1)
        writer.close()
    assert not [one for one in caplog.records if one.exc_info]


def test_targets_are_sorted_by_what_they_are(runs: Path, traces: Path, base: Path) -> None:
    run = runs / "animals"
    assert Targets.of([runs]) == Targets((runs,))
    assert Targets.of([run / FILE, traces, run, base]) == Targets((run,), base, traces)
    more = Path(shutil.copy(traces, traces.with_name("more.db")))
    with pytest.raises(SettingError, match=r"more\.db is a second trace store") as raised:
        Targets.of([traces, more])
    assert raised.value.hint == "pass only one trace store"


def test_wrong_targets_are_reported(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a text")
    (tmp_path / "empty").mkdir()
    for targets, problem in (
        (["missing.db"], "missing.db does not exist"),
        (["notes.txt"], "notes.txt is not a knowledge base, a run or a trace store"),
        (["empty"], "empty contains no runs"),
    ):
        result = run("ui", *targets, "--port", 0)
        assert (result.code, result.out) == (2, "")
        assert problem in result.err and "hint: pass" in result.err


def test_damaged_and_newer_files_end_the_command(run: Run, base: Path, tmp_path: Path) -> None:
    (tmp_path / "damaged.db").write_bytes(b"SQLite format 3\0" + b"damaged" * 1000)
    result = run("ui", "damaged.db", "--port", 0)
    assert result.code == 1 and "is not a knowledge base, run or trace store" in result.err
    with closing(sqlite3.connect(base)) as connection:
        connection.execute("PRAGMA user_version = 999")
    result = run("ui", base, "--port", 0)
    assert result.code == 1 and "has format 999" in result.err


def test_the_missing_extra_is_named(run: Run, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.startswith("itsdangerous"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **more)

    for name in [name for name in sys.modules if name.startswith(("bottega.ui", "itsdangerous"))]:
        monkeypatch.delitem(sys.modules, name)
    # The package keeps the module that other tests have imported.
    monkeypatch.setattr(bottega, "ui", bottega.ui)
    monkeypatch.setattr(builtins, "__import__", without)
    result = run("ui", runs, "--port", 0)
    assert result.code == 1
    assert "itsdangerous is required and not installed" in result.err
    assert "pip install 'bottega-vlm[ui]'" in result.err
