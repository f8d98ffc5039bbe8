"""Steps of the page on inspect_ai, with the real package and a real server."""

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
from tests.cli.test_serve import served as serving
from tests.paths import ROOT
from tests.server import Server, ok

PAGE = ROOT / "docs" / "evaluate-with-inspect.md"
pytestmark = [pytest.mark.slow, pytest.mark.network, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def inspect(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of the program; install it if it is missing."""
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
    rows = export(run)
    letter = rows[0]["target"]
    served.answers = [ok(f"ANSWER: {letter}", model="m", created=0)]
    log = evaluate(inspect, served.url, "openai-api/local/m")
    assert accuracy(log) == pytest.approx(sum(row["target"] == letter for row in rows) / 12)
    assert len(served.bodies) == 12
    assert all(b'"url":"data:image/png;base64,' in orjson.dumps(body) for body in served.bodies)


@pytest.mark.parametrize("model", ["openai-api/local/bottega", "openai/bottega"])
def test_inspect_evaluates_the_gateway(run: Run, tmp_path: Path, inspect: str, model: str) -> None:
    """The demo's models answer with words instead of letters, so inspect's own accuracy is 0. The
    words show that each image came with its question. The provider `openai` uses the Responses
    API."""
    rows = export(run)
    (tmp_path / "gateway").mkdir()
    with serving("--demo", folder=tmp_path / "gateway") as (url, _):
        log = evaluate(inspect, url, model)
    assert log["status"] == "success"
    assert log["results"]["completed_samples"] == len(log["samples"]) == 12
    assert all(sample["scores"]["choice"]["value"] in ("C", "I") for sample in log["samples"])
    assert accuracy(log) == 0
    completions = {sample["id"]: sample["output"]["completion"] for sample in log["samples"]}
    true = {str(row["id"]): row["choices"][ord(row["target"]) - ord("A")] for row in rows}
    right = [id for id, word in true.items() if completions[id].split()[-1] == word]
    assert len(right) >= 4  # cold-start items, answered by the master


def export(run: Run) -> list[dict[str, Any]]:
    """Export the items and the page's script; return the items."""
    command = ("dataset", "digits", "--limit", 12, "--format", "inspect", "--out", "items")
    assert run(*command).code == 0
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    Path("judge.py").write_text(code)
    return [orjson.loads(line) for line in Path("items/dataset.jsonl").read_bytes().splitlines()]


def evaluate(inspect: str, url: str, model: str) -> dict[str, Any]:
    """Run inspect and return its log. The address is set for both providers."""
    key = {"LOCAL_BASE_URL": url, "LOCAL_API_KEY": "none"}
    openai = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none"}
    subprocess.run(
        [inspect, "eval", "judge.py", "--model", model, "--log-format", "json"],
        env={**os.environ, **key, **openai},
        check=True,
        capture_output=True,
    )
    [log] = Path("logs").glob("*.json")
    return dict(orjson.loads(log.read_bytes()))


def accuracy(log: dict[str, Any]) -> float:
    [value] = [score["metrics"]["accuracy"]["value"] for score in log["results"]["scores"]]
    return float(value)
