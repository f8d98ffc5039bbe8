from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run
from tests.server import Server, ok, refuse


def test_a_run_folder_becomes_a_page(run: Run, pets: Path) -> None:
    methods = ("--methods", "visual-rag,vote", "--shots", "1,2")
    assert run("eval", f"image-folder:{pets}", *methods, "--out", "kept").code == 0
    done = run("report", "kept")
    assert (done.code, done.out) == (0, "page: kept/report/index.html\n")
    page = Path("kept/report/index.html").read_text("utf-8")
    assert "data:image/" in page
    assert "Incomplete run" not in page
    results = Path("kept/report/results.csv").read_text("utf-8").splitlines()
    assert sum(",accuracy," in line for line in results) == 4


def test_two_runs_are_compared_in_the_output_folder(run: Run, pets: Path, served: Server) -> None:
    served.answers = [ok("Answer Choice: leaf")]
    for name, model in (("one", "bundled"), ("two", "openai:m")):
        evaluation = ("eval", f"image-folder:{pets}", "--methods", "visual-rag", "--shots", 2)
        assert run(*evaluation, "--model", model, "--price", "1,1", "--out", name).code == 0
    done = run("report", "one", "two", "--out", "both")
    assert done.code == 0
    assert not Path("one/report").exists()
    text = Path("both/results.md").read_text("utf-8")
    assert "| two: visual-rag | one: visual-rag | 2 | 3 |" in text


def test_failures_are_reported(run: Run, pets: Path, served: Server) -> None:
    good = ok("Answer Choice: leaf")
    served.answers = [good, refuse(400, "content filter"), good]
    evaluation = ("eval", f"image-folder:{pets}", "--methods", "zero-shot", "--concurrency", 1)
    assert run(*evaluation, "--model", "openai:m", "--out", "kept").code == 1
    done = run("report", "kept")
    assert done.code == 0
    assert "zero-shot: 2 of 3 answered, 1 failed, 0 missing" in done.out
    assert "content filter" in Path("kept/report/index.html").read_text("utf-8")


def test_a_folder_without_a_run_is_reported(run: Run, pets: Path) -> None:
    done = run("report", pets)
    assert done.code == 1
    assert "holds no run" in done.err


def test_items_are_exported_for_inspect(run: Run, pets: Path) -> None:
    written = run("dataset", f"image-folder:{pets}", "--format", "inspect", "--out", "there")
    assert (written.code, written.out) == (0, "3 items: there/dataset.jsonl\n")
    assert len(Path("there/dataset.jsonl").read_text().splitlines()) == 3
    assert run("dataset", "digits", "--format", "coco", "--out", "there").code == 2
