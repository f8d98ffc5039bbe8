from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.cli.conftest import Run
from tests.server import Server, ok, refuse

UCMERCED = Path(__file__).resolve().parents[3] / "shared" / "data" / "ucmerced"
FIELDS = ["method", "shots", "n", "metric", "value", "low", "high"]


def test_eval_writes_every_method_at_every_number_of_shots(run: Run, pets: Path) -> None:
    done = run("eval", f"image-folder:{pets}", "--shots", "1,2", "--json", "out.json")
    assert done.code == 0
    document = orjson.loads(Path("out.json").read_bytes())
    assert document["benchmark"] == f"image-folder:{pets}"
    rows = document["results"]
    assert [(r["method"], r["shots"]) for r in rows] == [("zero-shot", 0)] + [
        (method, k) for method in ("random", "balanced", "visual-rag", "vote") for k in (1, 2)
    ]
    for row in rows:
        assert list(row)[: len(FIELDS)] == FIELDS
        assert row["n"] == 3
        assert 0 <= row["low"] <= row["value"] <= row["high"] <= 1
        assert row["calls"] == (0 if row["method"] == "vote" else 3)
    best = next(r for r in rows if (r["method"], r["shots"]) == ("visual-rag", 2))
    assert best["value"] == 1.0


@pytest.mark.skipif(not UCMERCED.exists(), reason="sample data are absent")
def test_eval_on_aerial_images(run: Run) -> None:
    done = run(
        "eval", f"manyicl:{UCMERCED}", "--methods", "visual-rag,vote", "--shots", 1, "--json", "f"
    )
    assert done.code == 0
    rag, vote = orjson.loads(Path("f").read_bytes())["results"]
    assert (rag["n"], vote["n"], rag["invalid"]) == (21, 21, 0)


def test_eval_against_an_endpoint_counts_calls_tokens_and_cost(
    run: Run, pets: Path, endpoint: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    endpoint.answers = [ok("Answer Choice: leaf\nConfidence Score: 1")]
    evaluation = ("eval", f"image-folder:{pets}", "--methods", "visual-rag", "--shots", 2)
    done = run(*evaluation, "--model", "openai:m", "--price", "1,1", "--json", "f")
    assert done.code == 0
    [row] = orjson.loads(Path("f").read_bytes())["results"]
    assert (row["calls"], row["prompt_tokens"], row["completion_tokens"]) == (3, 30, 6)
    assert row["cost_usd"] == pytest.approx(36e-6)
    assert row["value"] == pytest.approx(1 / 3)
    assert len(endpoint.bodies) == 3


def test_a_refused_key_ends_the_run_at_once(
    run: Run, pets: Path, endpoint: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
    endpoint.answers = [refuse(401)]
    failed = run("eval", f"image-folder:{pets}", "--model", "openai:m", "--json", "f")
    assert failed.code == 1
    assert not Path("f").exists()


def test_the_demonstration_writes_a_page_that_needs_nothing_else(run: Run) -> None:
    done = run("demo", "--limit", 12, "--out", "page.html")
    assert done.code == 0
    assert "visual-rag" in done.out
    page = Path("page.html").read_text("utf-8")
    assert page.count("data:image/png;base64,") >= 6 * 8
    assert "http" not in page.replace("http-equiv", "")
    assert "<script" not in page
