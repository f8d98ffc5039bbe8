"""Peers of the gateway's benchmark that are absent or do not start, and their ratios."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gateway import judged
from benchmarks.gateway_cases import PASSED, REPEATED
from benchmarks.gateway_figures import Figures, Run
from benchmarks.gateway_load import Bodies, Work, parse
from benchmarks.gateway_peers import (
    BARE,
    FLOOR,
    PORTKEY,
    TENSORZERO,
    Environments,
    printed_address,
    unusable,
)
from benchmarks.processes import DidNotStartError, Server, start, stopping


def test_a_peer_without_its_option_is_left_out() -> None:
    nothing = Environments()
    for program in (nothing.litellm_program, nothing.tensorzero, nothing.portkey_script):
        assert unusable("--peer PATH", program) == "no --peer PATH was given"


def test_a_peer_that_is_not_installed_is_left_out(tmp_path: Path) -> None:
    installed = Environments(tmp_path / "python", tmp_path / "python", tmp_path)
    for program in (installed.litellm_program, installed.tensorzero, installed.portkey_script):
        assert program is not None
        assert unusable("--peer PATH", program).startswith(f"there is no {program}: install")


def test_portkey_without_node_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Environments(portkey=tmp_path).portkey_script
    assert script is not None
    script.parent.mkdir(parents=True)
    script.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "program node" in unusable("--portkey FOLDER", script)
    (tmp_path / "node").touch(0o755)
    assert unusable("--portkey FOLDER", script) == ""


def process(code: str, folder: Path) -> Server:
    return start([sys.executable, "-c", code], 0, folder / "log", dict(os.environ))


def test_the_address_is_the_line_that_is_only_an_address(tmp_path: Path) -> None:
    code = (
        "import time; print('INFO see http://example.org/docs', flush=True);"
        "print('http://127.0.0.1:4321/openai/v1', flush=True); time.sleep(60)"
    )
    with stopping(process(code, tmp_path)) as server:
        assert printed_address(server) == "http://127.0.0.1:4321/openai/v1"


def test_a_peer_that_ends_without_an_address_reports_its_output(tmp_path: Path) -> None:
    with (
        stopping(process("raise SystemExit('no such model')", tmp_path)) as server,
        pytest.raises(DidNotStartError, match="no such model"),
    ):
        printed_address(server)


def test_requests_go_to_the_path_of_the_case(tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"{}")
    work = Work(
        port=1,
        headers={},
        body=str(tmp_path / "body"),
        slots=(),
        variants=None,
        first=0,
        concurrency=1,
        seconds=1.0,
        most=1,
        expected="",
        path="/openai/v1/chat/completions",
    )
    request = Bodies(parse(json.dumps(asdict(work)))).draw()
    assert request.startswith(b"POST /openai/v1/chat/completions HTTP/1.1\r\n")


def run(case: str, cpu: float) -> Run:
    return Run(0, case, "text", 16, 100, 0, cpu, 1000.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("peer", "name", "least", "most"),
    [
        (TENSORZERO, f"{PASSED} / TensorZero", 1.19, 1.21),
        (BARE, f"{PASSED} / bare proxy", 1.29, 1.31),
        (FLOOR, f"{REPEATED} / floor", 1.39, 1.41),
    ],
)
def test_requirements_of_cpu_time(peer: str, name: str, least: float, most: float) -> None:
    for cpu, met in ((least, True), (most, False)):
        runs = [run(PASSED, cpu), run(REPEATED, cpu), run(peer, 1.0), run(PORTKEY, 1.5)]
        bars = {bar.name: bar for bar in judged(Figures(runs))}
        assert bars[name].met is met
        assert bars[f"Portkey / {PASSED}"].met is None
