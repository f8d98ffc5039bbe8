"""The page on inspect_ai, done with the real package and a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.cli.conftest import Run
from tests.cli.test_serving import served as serving
from tests.paths import ROOT
from tests.server import Server, ok

PAGE = ROOT / "docs" / "evaluate-with-inspect.md"
pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def inspect(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program, installed where it is not there."""
    if (found := os.environ.get("INSPECT") or shutil.which("inspect")) is not None:
        return found
    folder = tmp_path_factory.mktemp("judge")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command = [str(folder / "bin" / "pip"), "install", "--quiet", "inspect_ai", "openai"]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("inspect_ai cannot be installed here")
    return str(folder / "bin" / "inspect")


def test_inspect_uses_the_exported_items_and_targets(
    run: Run, served: Server, inspect: str
) -> None:
    rows = written(run)
    letter = rows[0]["target"]
    served.answers = [ok(f"ANSWER: {letter}", model="m", created=0)]
    judged = judge(inspect, served.url, "openai-api/local/m")
    assert accuracy(judged) == pytest.approx(sum(row["target"] == letter for row in rows) / 12)
    assert len(served.bodies) == 12
    assert all(b'"url":"data:image/png;base64,' in orjson.dumps(body) for body in served.bodies)


@pytest.mark.parametrize("model", ["openai-api/local/bottega", "openai/bottega"])
def test_inspect_evaluates_the_gateway(run: Run, tmp_path: Path, inspect: str, model: str) -> None:
    """The demo's models answer in words, not in letters: inspect's own accuracy is 0, and whether
    each picture came with its question shows in the words. The provider `openai` asks the Responses
    API."""
    rows = written(run)
    (tmp_path / "gateway").mkdir()
    with serving("--demo", folder=tmp_path / "gateway") as (url, _):
        judged = judge(inspect, url, model)
    assert judged["status"] == "success"
    assert judged["results"]["completed_samples"] == len(judged["samples"]) == 12
    assert all(sample["scores"]["choice"]["value"] in ("C", "I") for sample in judged["samples"])
    assert accuracy(judged) == 0
    said = {sample["id"]: sample["output"]["completion"] for sample in judged["samples"]}
    true = {str(row["id"]): row["choices"][ord(row["target"]) - ord("A")] for row in rows}
    right = [id for id, word in true.items() if said[id].split()[-1] == word]
    assert len(right) >= 4  # those of the cold start, which the master answers


def written(run: Run) -> list[dict[str, Any]]:
    """The items, and how the page asks them."""
    export = ("dataset", "digits", "--limit", 12, "--format", "inspect", "--out", "items")
    assert run(*export).code == 0
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    Path("judge.py").write_text(code)
    return [orjson.loads(line) for line in Path("items/dataset.jsonl").read_bytes().splitlines()]


def judge(inspect: str, url: str, model: str) -> dict[str, Any]:
    """The log. Both providers are told where the endpoint is."""
    key = {"LOCAL_BASE_URL": url, "LOCAL_API_KEY": "none"}
    also = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    subprocess.run(
        [inspect, "eval", "judge.py", "--model", model, "--log-format", "json"],
        env={**os.environ, **key, **also},
        check=True,
        capture_output=True,
    )
    [log] = Path("logs").glob("*.json")
    return dict(orjson.loads(log.read_bytes()))


def accuracy(judged: dict[str, Any]) -> float:
    [found] = [score["metrics"]["accuracy"]["value"] for score in judged["results"]["scores"]]
    return float(found)
