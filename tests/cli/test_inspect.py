"""The page on inspect_ai, done with the real package and a real server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from tests.cli.conftest import Run
from tests.server import Server, ok

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evaluate-with-inspect.md"
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


def test_inspect_asks_the_same_items_and_finds_the_same_truth(
    run: Run, served: Server, inspect: str
) -> None:
    export = ("dataset", "digits", "--limit", 12, "--format", "inspect", "--out", "items")
    assert run(*export).code == 0
    rows = [orjson.loads(line) for line in Path("items/dataset.jsonl").read_bytes().splitlines()]
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    Path("judge.py").write_text(code)
    letter = rows[0]["target"]
    served.answers = [ok(f"ANSWER: {letter}", model="m", created=0)]
    subprocess.run(
        [inspect, "eval", "judge.py", "--model", "openai-api/local/m", "--log-format", "json"],
        env={**os.environ, "LOCAL_BASE_URL": served.url, "LOCAL_API_KEY": "none"},
        check=True,
        capture_output=True,
    )
    [log] = Path("logs").glob("*.json")
    results = orjson.loads(log.read_bytes())["results"]
    [accuracy] = [score["metrics"]["accuracy"]["value"] for score in results["scores"]]
    assert accuracy == pytest.approx(sum(row["target"] == letter for row in rows) / 12)
    assert len(served.bodies) == 12
    assert all(b'"url":"data:image/png;base64,' in orjson.dumps(body) for body in served.bodies)
