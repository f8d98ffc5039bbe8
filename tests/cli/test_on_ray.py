"""Long commands with their work in Ray workers: the same results as in this process."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import orjson
import pytest

from bottega._util.ray_executor import LOOPBACK, RayExecutor
from bottega.knowledge import KnowledgeBase
from tests.cli.conftest import Run
from tests.cli.test_rationales import examples, reasoning_endpoint
from tests.knowledge.doubles import SeededEmbedder, text_example
from tests.postgres import free_port
from tests.ray_clusters import RayHead
from tests.server import Server, ok, refuse

SECONDS = 180
DIGITS = ("eval", "digits", "--limit", "60", "--methods", "random,visual-rag,knn", "--shots", "3")


def figures(file: Path) -> object:
    """Return the results of a run without its times."""
    document = orjson.loads(file.read_bytes())
    for row in document["results"]:
        row["seconds"] = 0
    return document


def rounded(figures: object) -> object:
    """Return the figures with approximate floats: a model rounds each batch differently."""
    if isinstance(figures, dict):
        return {name: rounded(one) for name, one in figures.items()}
    if isinstance(figures, list):
        return [rounded(one) for one in figures]
    return pytest.approx(figures, rel=1e-5) if isinstance(figures, float) else figures


@pytest.mark.slow
def test_evaluation_on_ray_equals_the_local_one(run: Run, ray_cluster: RayExecutor) -> None:
    # One query at a time: batches of another composition round differently.
    alone = (*DIGITS, "--concurrency", 1)
    assert run(*alone, "--json", "local.json").code == 0
    ran = run(*alone, "--json", "ray.json", "--on", "ray", "--workers", 2)
    assert ran.code == 0, ran.err
    assert figures(Path("ray.json")) == figures(Path("local.json"))


@pytest.mark.slow
def test_failed_items_on_ray_are_repeated(
    run: Run, pets: Path, served: Server, ray_cluster: RayExecutor
) -> None:
    methods = ("--methods", "zero-shot", "--model", "openai:m", "--concurrency", 1)
    command = ("eval", f"image-folder:{pets}", *methods, "--out", "kept", "--on", "ray")
    served.answers = [ok("Answer Choice: leaf")]
    assert run(*command[:-4], "--json", "local.json").code == 0
    served.answers = [ok("Answer Choice: leaf"), refuse(400, "filtered")]
    failed = run(*command)
    assert failed.code == 1
    assert "failed: zero-shot, item " in failed.out
    served.answers = [ok("Answer Choice: leaf")]
    complete = run(*command, "--json", "ray.json")
    assert complete.code == 0, complete.err
    assert figures(Path("ray.json")) == figures(Path("local.json"))


def vectors(file: Path) -> dict[str, list[float]]:
    with KnowledgeBase.open(file) as knowledge:
        ids = knowledge.ids()
        return dict(zip(ids, knowledge.vectors(ids).tolist(), strict=True))


@pytest.mark.slow
def test_vectors_of_workers_equal_the_local_ones(
    run: Run, pets: Path, ray_cluster: RayExecutor
) -> None:
    on_ray = ("--on", "ray", "--workers", 2)
    local, remote = run("add", "l.db", pets), run("add", "r.db", pets, *on_ray)
    assert (remote.code, remote.err.count("error")) == (0, 0), remote.err
    assert remote.out == local.out.replace("l.db", "r.db")
    assert vectors(Path("r.db")) == vectors(Path("l.db"))
    pixels = ("--embed", "pixels")
    assert run("reindex", "l.db", *pixels).out == run("reindex", "r.db", *pixels, *on_ray).out
    assert vectors(Path("r.db")) == vectors(Path("l.db"))


@pytest.mark.slow
def test_master_on_ray_answers_the_missing_questions(
    run: Run, pets: Path, served: Server, ray_cluster: RayExecutor
) -> None:
    command = ("answer", "m.db", f"image-folder:{pets}", "--model", "openai:large")
    served.answers = [ok("Answer Choice: leaf")]
    part = run(*command, "--limit", 4)
    assert part.code == 0, part.err
    served.bodies.clear()
    rest = run(*command, "--on", "ray", "--workers", 2)
    assert "answers to 9 of 9 labelled questions; this run: 0 invalid" in rest.out, rest.err
    assert len(served.bodies) == 5
    with KnowledgeBase.open("m.db", None) as answers:
        assert {one.source for one in answers} == {"master:large"}


@pytest.mark.slow
def test_rationales_of_workers_equal_the_local_ones(
    run: Run, served: Server, ray_cluster: RayExecutor
) -> None:
    served.answers = [reasoning_endpoint]
    for name in ("local.db", "ray.db"):
        with KnowledgeBase.open(name, SeededEmbedder()) as knowledge:
            knowledge.add([text_example(f"q{index}") for index in range(4)])
    options = ("--model", "openai:m", "--candidates", 3, "--predictions", 2, "--price", "1,1")
    local = run("rationales", "local.db", *options)
    remote = run("rationales", "ray.db", *options, "--on", "ray", "--workers", 2)
    assert (remote.code, remote.out) == (local.code, local.out)
    kept = [
        {name: (one.rationale, one.tags) for name, one in examples(Path(file)).items()}
        for file in ("local.db", "ray.db")
    ]
    assert kept[0] == kept[1]
    assert kept[0]["q0"][0] == "Think.0"


@pytest.mark.slow
def test_passages_compressed_by_workers_equal_the_local_ones(
    run: Run, ray_cluster: RayExecutor
) -> None:
    with KnowledgeBase.open("kb.db", SeededEmbedder()) as knowledge:
        knowledge.add([text_example(f"The home of n{i} is h{i}.", "") for i in range(70)])
    local = run("compress", "build", "kb.db", "--store", "local", "--json")
    on_ray = ("--store", "ray", "--json", "--on", "ray", "--workers", 2)
    remote = run("compress", "build", "kb.db", *on_ray)
    assert remote.code == 0, remote.err
    assert remote.json == local.json
    for name in ("rows.bin", "entries.jsonl"):
        assert Path("ray", name).read_bytes() == Path("local", name).read_bytes()
    assert run("compress", "build", "kb.db", *on_ray).json["compressed"] == 0  # type: ignore[index]


def test_ray_without_its_package_names_the_extra(
    run: Run, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.errors.find_spec", lambda name: None)
    ran = run("eval", f"image-folder:{pets}", "--on", "ray")
    assert ran.code == 1
    assert "ray is required and not installed" in ran.err
    assert "pip install 'bottega-vlm[batch]'" in ran.err


def test_workers_need_ray(run: Run, pets: Path) -> None:
    ran = run("eval", f"image-folder:{pets}", "--workers", 2)
    assert ran.code == 2
    assert "--workers applies only to --on ray" in ran.err


def test_drafts_cannot_be_shared_by_workers(run: Run, pets: Path) -> None:
    ran = run("eval", f"image-folder:{pets}", "--retrieve", "crossed", "--on", "ray")
    assert ran.code == 2
    assert "retrieval by crossed drafts answers" in ran.err


@contextmanager
def started(folder: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command as a process of its own and kill it at the end."""
    environment = {**os.environ, "BOTTEGA_TRACES": "none", **variables}
    command = [sys.executable, "-m", "bottega", *arguments]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def answered(file: Path) -> int:
    if not file.exists():
        return 0
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as connection:
        tables = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'answers'")
        if tables.fetchone() is None:
            return 0
        return int(connection.execute("SELECT count(*) FROM answers").fetchone()[0])


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def parents() -> dict[int, tuple[int, str]]:
    """Return the parent and the command of each process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # ended
                continue
            found[int(folder.name)] = int(status[1]), command
    return found


def actors_of(driver: int) -> list[int]:
    """Return the worker processes with an actor below a driver."""
    table = parents()

    def is_below(process: int) -> bool:
        while process in table:
            process = table[process][0]
            if process == driver:
                return True
        return False

    return [pid for pid, (_, name) in table.items() if "_ActorProcess" in name and is_below(pid)]


LONG = ("--limit", "150", "--methods", "visual-rag", "--shots", "20", "--concurrency", "4")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers in /proc")
@pytest.mark.parametrize("killed", ["worker", "driver"])
def test_killed_process_loses_nothing(tmp_path: Path, killed: str) -> None:
    pytest.importorskip("ray")
    command = ("eval", "digits", *LONG)
    with started(tmp_path, *command, "--json", "local.json") as local:
        assert local.wait(SECONDS) == 0
    on_ray = (*command, "--out", "kept", "--json", "ray.json", "--on", "ray", "--workers", "2")
    kept = tmp_path / "kept" / "run.db"
    with started(tmp_path, *on_ray) as process:
        wait_for(lambda: answered(kept) >= 20)
        if killed == "worker":
            os.kill(actors_of(process.pid)[0], signal.SIGKILL)
        else:
            process.kill()
        code = process.wait(SECONDS)
    assert (code == 0) == (killed == "worker"), (tmp_path / "log").read_text()
    if killed == "driver":
        stored = answered(kept)
        assert 20 <= stored < 150
        with started(tmp_path, *on_ray) as process:
            assert process.wait(SECONDS) == 0, (tmp_path / "log").read_text()
        assert f"{stored} stored answers in kept are reused" in (tmp_path / "log").read_text()
    assert rounded(figures(tmp_path / "local.json")) == figures(tmp_path / "ray.json")
    assert "raylet" not in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("by", ["client port", "RAY_ADDRESS", "client port in RAY_ADDRESS"])
def test_running_cluster_returns_the_local_vectors(
    run: Run, pets: Path, tmp_path: Path, ray_head: RayHead, by: str
) -> None:
    on, variables = {
        "client port": (ray_head.client, {}),
        # Without LOOPBACK, Ray replaces 127.0.0.1 by the address of the host.
        "RAY_ADDRESS": ("ray", {"RAY_ADDRESS": ray_head.driver, **LOOPBACK}),
        "client port in RAY_ADDRESS": ("ray", {"RAY_ADDRESS": ray_head.client}),
    }[by]
    local = run("add", "local.db", pets)
    command = ("add", "ray.db", str(pets), "--on", on, "--workers", "2")
    with started(tmp_path, *command, **variables) as process:
        code = process.wait(SECONDS)
    log = (tmp_path / "log").read_text()
    assert code == 0, log
    assert log == (local.out + local.err).replace("local.db", "ray.db")  # Ray prints nothing
    assert vectors(Path("ray.db")) == vectors(Path("local.db"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_cluster_that_does_not_answer_is_named(pets: Path, tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("ray")
    address = f"{scheme}127.0.0.1:{free_port()}"
    command = ("add", "ray.db", str(pets), "--on", "ray")
    with started(tmp_path, *command, RAY_ADDRESS=address) as process:
        assert process.wait(SECONDS) == 2
    log = (tmp_path / "log").read_text()
    assert f"the Ray cluster {address} cannot be used" in log
    assert "RAY_AUTH_TOKEN" in log
