from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run
from tests.evaluation.benchmarks import test_aokvqa as aokvqa
from tests.evaluation.benchmarks.published import write_image, write_json
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


def test_predictions_are_written_for_the_leaderboard(
    run: Run, served: Server, tmp_path: Path
) -> None:
    rows = [aokvqa.question(number) for number in (1, 7, 8)]
    aokvqa.published(tmp_path, rows[:1], [])
    for row in rows[1:]:
        row |= {"direct_answers": None, "correct_choice_idx": None}
    write_json(tmp_path / "aokvqa_v1p0_test.json", rows[1:])
    for number in (7, 8):
        write_image(tmp_path / "test2017" / f"{number:012}.jpg", number)
    spec = f"aokvqa:{tmp_path},split=test"
    common = ("--methods", "zero-shot", "--model", "openai:m", "--concurrency", 1)
    served.answers = list(map(ok, ("taxi", "tram", "(D)", "No idea.", "taxi")))
    for form in ("direct", "choices"):
        done = run("eval", f"{spec},answers={form}", *common, "--out", form, "--json", "out.json")
        assert (done.code, "not scored" in done.out) == (0, True), done.err
        [result] = json.loads(Path("out.json").read_text())["results"]
        assert (result["n"], result["metric"], result["value"]) == (2, "not_scored", None)
    done = run("report", "direct", "choices", "--predictions", "there/test.json")
    assert done.code == 0, done.err
    assert done.out.startswith("2 predictions: there/test.json\n")
    assert "no prediction for 1 item without a valid answer" in done.err
    found = json.loads(Path("there/test.json").read_text())
    assert sorted(one["direct_answer"] for one in found.values()) == ["taxi", "tram"]
    assert sorted(found) == ["q7", "q8"]
    # The items are evaluated in the same order in both runs.
    assert {one["direct_answer"]: one.get("multiple_choice") for one in found.values()} == {
        "taxi": "cab",
        "tram": None,
    }

    twice = run("report", "direct", "direct", "--predictions", "x.json")
    assert (twice.code, "both have predictions of the form direct_answer" in twice.err) == (2, True)
    more = (*common[:1], "top-k", *common[2:], "--shots", 1, "--out", "direct")
    assert run("eval", f"{spec},answers=direct", *more).code == 0
    several = run("report", "direct", "--predictions", "x.json")
    assert (several.code, "got top-k 1, zero-shot" in several.err) == (2, True)
    assert not Path("x.json").exists()


def test_predictions_need_runs_over_aokvqa(run: Run, pets: Path) -> None:
    methods = ("--methods", "nearest", "--out", "kept")
    assert run("eval", f"image-folder:{pets}", *methods).code == 0
    refused = run("report", "kept", "--predictions", "x.json")
    assert (refused.code, "needs runs over aokvqa" in refused.err) == (2, True)
    assert not Path("x.json").exists()


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
