from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

# Before numpy and torch load: a second thread slows tiny models down, and test workers compete.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import Phase, settings

from bottega._util.executor import Executor, LocalExecutor
from bottega._util.ray_executor import RayExecutor
from bottega.bundled import bundled_folder
from tests import server
from tests.browser import PROGRAM, chromium
from tests.milvus import RunningMilvus, running_milvus
from tests.paths import ROOT
from tests.postgres import RUN_FOLDER, PostgresServer, running_postgres
from tests.ray_clusters import RayHead, running_head, running_ray
from tests.redis import RedisServer, running_redis

# Subprocesses of tests import `tests` from any working directory.
os.environ["PYTHONPATH"] = os.pathsep.join(
    path for path in (str(ROOT), os.environ.get("PYTHONPATH")) if path
)

# Files in memory. On a disk, each of thousands of SQLite files waits for it several times.
MEMORY_FOLDER = Path("/dev/shm")
RUN_BYTES = 4 << 30

# How long an example takes is the machine's affair, and it may be busy.
# Each run draws other examples; pytest --hypothesis-profile thorough draws many at once.
# Without a database of failures: it would be written to the working directory.
settings.register_profile(
    "unhurried", deadline=None, max_examples=30, database=None, print_blob=True
)
settings.register_profile("thorough", settings.get_profile("unhurried"), max_examples=1000)
# A mutant is killed by any failing example, however large.
settings.register_profile(
    "mutation",
    deadline=None,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate],
    database=None,
)
settings.load_profile("unhurried")


def pytest_configure(config: pytest.Config) -> None:
    """Create the folder that workers share, in their parent process."""
    if "TMPDIR" not in os.environ and _is_large(MEMORY_FOLDER):
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY_FOLDER)
    if RUN_FOLDER not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="bottega-run-", ignore_cleanup_errors=True)
        Path(folder.name).chmod(0o755)  # for the user of PostgreSQL
        os.environ[RUN_FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)


def _is_large(folder: Path) -> bool:
    """Return whether the folder has space for the files of a run, and for programs."""
    if not os.access(folder, os.W_OK):
        return False
    found = os.statvfs(folder)
    can_execute = not found.f_flag & getattr(os, "ST_NOEXEC", 0)
    return can_execute and found.f_bavail * found.f_frsize >= RUN_BYTES


def pytest_collection() -> None:
    """Import and collect without garbage collection, which takes a sixth of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt libraries and collected tests from garbage collection, which takes a tenth of the
    time."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000)
    # pytest adds its handlers nine times per test to each logger that does not propagate. With the
    # 51 loggers of torch and 7 of other libraries this takes 5 ms.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Let Ctrl-C interrupt tests and subprocesses: shells ignore it for background jobs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Let commands use one torch thread, a setting that would hold for all later tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 1)
        yield


BUNDLED_FOLDERS = [bundled_folder(name) for name in ("apprentice", "master")]


@pytest.fixture(scope="session", autouse=True)
def bundled_models_once() -> Iterator[None]:
    """Read each bundled model from its files once: a copy takes a third of the time."""
    if "bottega.generation.loaded" not in sys.modules:  # no collected test loads a model
        yield
        return
    from bottega.generation import loaded, model_files

    load, read_once = model_files.load_parts, cache(model_files.load_parts)

    def load_parts(source: str, dtype: str, trust_remote_code: bool = False) -> tuple[Any, Any]:
        if source not in map(str, BUNDLED_FOLDERS):
            return load(source, dtype, trust_remote_code)
        return deepcopy(read_once(source, dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded, "load_parts", load_parts)
        yield


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Server]:
    """A chat-completions endpoint on loopback that misbehaves on demand."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with server.running() as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Return a running PostgreSQL with pgvector; the test is skipped without one."""
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Return a running Redis; the test is skipped without one."""
    with running_redis() as server:
        yield server


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """Return an empty Redis."""
    redis_server.run("FLUSHALL")
    return redis_server


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """Return the URL of an empty schema in a database with the extension vector."""
    yield postgres.create_schema()
    postgres.leave_schema()


@pytest.fixture
def whole_database(postgres: PostgresServer) -> Iterator[str]:
    """Return the URL of an empty database."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the DevTools address of a running Chromium; the test is skipped without one."""
    if PROGRAM is None:
        pytest.skip("no Chromium on the PATH")
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as address:
        yield address


@pytest.fixture(scope="session")
def milvus() -> Iterator[RunningMilvus]:
    """Return a running Milvus; the test is skipped without one."""
    with running_milvus() as server:
        yield server


@pytest.fixture(scope="session")
def ray_head() -> Iterator[RayHead]:
    """Return the addresses of a running cluster; the test is skipped without Ray."""
    with running_head() as head:
        yield head


@pytest.fixture(scope="session", params=["ray"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Return this process (`local`), a private Ray cluster of two workers (`ray`), or the cluster
    of `ray_head` through its client port (`client`). A process connects to one cluster only, so
    one fixture holds them all. The test is skipped without Ray."""
    if request.param == "local":
        yield LocalExecutor()
        return
    is_client = request.param == "client"
    address = request.getfixturevalue("ray_head").client if is_client else "ray"
    with running_ray(address) as cluster:
        yield cluster


@pytest.fixture
def ray_cluster(executor: Executor) -> RayExecutor:
    """Return a Ray cluster of two workers on loopback."""
    assert isinstance(executor, RayExecutor)
    return executor
