"""A limit on the address space is reported; without the check native libraries crash or hang."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bottega import KnowledgeBase, PixelEmbedder, cli
from bottega._util.native import GB, address_space_warning, check_address_space, load_from_hub
from bottega.errors import SettingError
from bottega.knowledge.index import lazy_faiss
from bottega.naming import check_embedder, open_model
from tests.builders import example

Limit = Callable[[float], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    def limited_to(gigabytes: float) -> None:
        soft = int(gigabytes * GB)
        monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))

    return limited_to


def test_a_limit_that_is_too_low_is_an_error_with_both_figures(limit: Limit) -> None:
    limit(0.3)
    with pytest.raises(SettingError, match=r"at least 1\.0 GB, got 0\.3 GB") as raised:
        check_address_space()
    assert "ulimit -v unlimited" in raised.value.hint


def test_a_limit_that_is_high_enough_and_no_limit_are_accepted(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(1)
    check_address_space()
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (unlimited, unlimited))
    check_address_space()
    assert address_space_warning() is None


def test_a_system_without_such_limits_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    check_address_space()


def test_a_limit_that_threads_may_exceed_is_a_warning(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(2.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "4 threads need up to 2.6 GB" in str(address_space_warning())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert address_space_warning() is None


def test_a_knowledge_base_is_refused_before_faiss_is_imported(
    limit: Limit, monkeypatch: pytest.MonkeyPatch
) -> None:
    for metric in ("IndexFlatIP", "IndexFlatL2"):  # as before their first use
        monkeypatch.delitem(vars(lazy_faiss), metric, raising=False)
    limit(0.3)
    with (
        pytest.raises(SettingError, match="address space"),
        KnowledgeBase.open(":memory:", PixelEmbedder()) as knowledge,
    ):
        knowledge.add([example("red", 1)])
        knowledge.search(example("red", 1).query, 1)


def test_local_models_need_more_than_remote_ones(limit: Limit) -> None:
    limit(1.5)
    open_model("openai:m")
    check_embedder("words")
    for opened in (lambda: open_model("bundled"), lambda: check_embedder("dual")):
        with pytest.raises(SettingError, match=r"at least 2\.0 GB, got 1\.5 GB"):
            opened()


def test_the_command_warns_once(
    limit: Limit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit(2.01)
    monkeypatch.setattr(sys, "argv", ["bottega", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert capsys.readouterr().err.count("warning: address space is limited to 2.0 GB") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce RLIMIT_AS")
@pytest.mark.parametrize("command", [pytest.param("--version", marks=pytest.mark.slow), "stats"])
def test_a_limited_process_ends_with_the_error_instead_of_a_crash(command: str) -> None:
    code = (
        "import resource as r\n"
        "r.setrlimit(r.RLIMIT_AS, (350_000_000, r.getrlimit(r.RLIMIT_AS)[1]))\n"
        "from bottega.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: address space must be at least 1.0 GB, got 0.3 GB\n")


WHILE_ANOTHER_LOADS = """
import asyncio, os, sys, threading
from bottega.generation import TransformersGenerator
from bottega._util.native import LOADING

with LOADING:
    model = TransformersGenerator("nobody/nothing")
    threading.Thread(target=lambda: asyncio.run(model.load()), daemon=True).start()
    threading.Event().wait(0.7)
    os._exit("torch" in sys.modules)
"""


def test_libraries_are_imported_by_one_thread_at_a_time() -> None:
    """An embedder and a generator that loaded together found transformers half imported."""
    done = subprocess.run([sys.executable, "-c", WHILE_ANOTHER_LOADS], timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("error", [ConnectionError("no route"), None])
def test_the_hub_is_checked_once_before_a_download(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    calls: list[object] = []

    def model_info(self: object, source: str, **_: object) -> None:
        calls.append(source)
        if error:
            raise error

    def load(local_files_only: bool) -> str:
        calls.append(local_files_only)
        if local_files_only:
            raise OSError("not cached")
        return "model"

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    if error:
        with pytest.raises(ConnectionError, match="no route"):
            load_from_hub("owner/name", load)
        assert calls == [True, "owner/name"]
    else:
        assert load_from_hub("owner/name", load) == "model"
        assert calls == [True, "owner/name", False]


def test_a_folder_is_not_looked_up(tmp_path: Path) -> None:
    def load(local_files_only: bool) -> str:
        raise OSError("damaged")

    with pytest.raises(OSError, match="damaged"):
        load_from_hub(str(tmp_path), load)
