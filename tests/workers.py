"""pytest plugin that runs tests in forked processes: `-p tests.workers --workers 3`.

Each worker of pytest-xdist imports all libraries and collects all tests, which takes a tenth of a
run. Here one process does both before it forks. Tests that need the same server run in the same
worker, so each server starts once.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NoReturn
from warnings import catch_warnings, simplefilter

import pytest
from _pytest._io import TerminalWriter

# Worker, modulo their number, of all tests with a fixture or a parameter of this name.
SERVERS = {
    **dict.fromkeys(("browser", "zoo"), 0),
    **dict.fromkeys(("postgres", "database", "redis"), 1),
    **dict.fromkeys(("milvus", "executor", "ray_head"), 2),
}
STOP_SECONDS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="Run tests in forked processes.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    is_failed = session.testsfailed and not options.continue_on_collection_errors
    # Libraries of macOS do not survive a fork.
    is_unsupported = options.workers < 1 or not session.items or sys.platform == "darwin"
    if is_unsupported or options.collectonly or is_failed:
        return None  # pytest's own loop
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.showfspath = False  # reports of several files alternate
    _Pool(session, min(options.workers, len(session.items))).run()
    return True


class Schedule:
    """Tests of each worker, as indices of `items`: first those that need the same server, then a
    contiguous part of the others, because neighbours share fixtures. A worker that has finished its
    part takes half of the largest one."""

    def __init__(self, items: Sequence[pytest.Item], workers: int) -> None:
        self._pinned = [deque[int]() for _ in range(workers)]
        others = []
        for index, item in enumerate(items):
            if (pinned := _pinned_worker(item)) is None:
                others.append(index)
            else:
                self._pinned[pinned % workers].append(index)
        ends = [len(others) * n // workers for n in range(workers + 1)]
        self._parts = [deque(others[a:b]) for a, b in pairwise(ends)]

    def next(self, worker: int) -> int | None:
        """Return the next test of a worker, None if all tests have begun."""
        if self._pinned[worker]:
            return self._pinned[worker].popleft()
        part, largest = self._parts[worker], max(self._parts, key=len)
        if not part:
            part.extendleft([largest.pop() for _ in range((len(largest) + 1) // 2)])
        return part.popleft() if part else None


def _pinned_worker(item: pytest.Item) -> int | None:
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = {*getattr(item, "fixturenames", ()), *(one for one in parameters if type(one) is str)}
    return next((worker for name, worker in SERVERS.items() if name in names), None)


@dataclass
class _Worker:
    number: int
    pid: int
    connection: Connection
    # Tests that it has been sent and not finished. It needs the second one before it ends the
    # first, to know which fixtures both use.
    sent: deque[int]


class _Pool:
    """Workers of a session, in the process that reports their results."""

    def __init__(self, session: pytest.Session, workers: int) -> None:
        self._session, self._workers = session, dict[Connection, _Worker]()
        factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        factory.getbasetemp()  # one folder of all workers, which their parent deletes
        self._schedule = Schedule(session.items, workers)
        for number in range(workers):
            self._start(number, deque())

    def run(self) -> None:
        try:
            while self._workers:
                for connection in wait(list(self._workers)):
                    assert isinstance(connection, Connection)
                    self._receive(self._workers[connection])
                    self._check_stop()
        finally:
            self._stop()

    def _start(self, number: int, sent: deque[int]) -> None:
        here, there = Pipe()
        with catch_warnings():  # about the thread of pyarrow's allocator, which survives a fork
            simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            for connection in [here, *self._workers]:
                connection.close()
            _work(self._session, number, there)
        there.close()
        worker = self._workers[here] = _Worker(number, pid, here, sent)
        for index in sent:
            here.send(index)
        while len(sent) < 2 and self._send_next(worker):
            pass

    def _send_next(self, worker: _Worker) -> bool:
        """Send the next test, or None. Return whether there is one."""
        index = self._schedule.next(worker.number)
        with suppress(BrokenPipeError):
            worker.connection.send(index)
        if index is not None:
            worker.sent.append(index)
        return index is not None

    def _receive(self, worker: _Worker) -> None:
        hook = self._session.config.hook
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._end(worker)
            return
        worker.sent.popleft()
        self._send_next(worker)
        config = self._session.config
        for data in message:
            report = hook.pytest_report_from_serializable(config=config, data=data)
            hook.pytest_runtest_logreport(report=report)

    def _end(self, worker: _Worker) -> None:
        """Report the test that ended its worker, if any, and replace the worker."""
        del self._workers[worker.connection]
        worker.connection.close()
        _, status = os.waitpid(worker.pid, 0)
        if worker.sent:
            item = self._session.items[worker.sent.popleft()]
            code = os.waitstatus_to_exitcode(status)
            text = f"the worker of {item.nodeid} ended with status {code}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            self._session.config.hook.pytest_runtest_logreport(report=report)
            self._start(worker.number, worker.sent)

    def _check_stop(self) -> None:
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _stop(self) -> None:
        """Interrupt workers, which then end their fixtures."""
        for worker in self._workers.values():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        for connection, worker in self._workers.items():
            with suppress(EOFError, ConnectionResetError):
                while connection.poll(STOP_SECONDS):
                    connection.recv()
                os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)


def _work(session: pytest.Session, number: int, connection: Connection) -> NoReturn:
    """Run tests in a forked process until the connection sends None."""
    status = 1
    try:
        _separate(session.config, number)
        session.config.pluginmanager.register(reports := _Reports(session.config))
        try:
            _run_tests(session, connection, reports)
        finally:
            session._setupstate.teardown_exact(None)
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    os._exit(status)  # without finalizers of the process that collected the tests


def _run_tests(session: pytest.Session, connection: Connection, reports: _Reports) -> None:
    index = connection.recv()
    while index is not None:
        following = connection.recv()
        nextitem = None if following is None else session.items[following]
        session.config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=nextitem)
        connection.send(reports.taken())
        index = following


def _separate(config: pytest.Config, number: int) -> None:
    """Give this process files of its own, and let it print nothing."""
    manager: Any = config.pluginmanager
    capture = manager.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    reporter = manager.get_plugin("terminalreporter")
    if reporter is not None:
        manager.unregister(reporter)
        silent = SimpleNamespace(_tw=TerminalWriter(open(os.devnull, "w")))  # noqa: PTH123, SIM115
        manager.register(silent, "terminalreporter")
    factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.mktemp(f"worker{number}")


class _Reports:
    """Plugin that collects the reports of a test, which are sent together."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._collected = config, list[object]()

    def taken(self) -> list[object]:
        taken, self._collected = self._collected, []
        return taken

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._collected.append(data)
