from __future__ import annotations

import re
import sqlite3
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

import bottega.naming
from bottega import KnowledgeBase, __version__, load_image_folder
from bottega.bundled.efficientnet import LITE2, weights_installed
from bottega.errors import EmbedderMismatchError, EmbeddingError
from bottega.knowledge.embedders.names import NOTE
from bottega.knowledge.embedders.photo_embedder import default_photos
from bottega.naming import has_photos
from bottega.protocols import Embedder
from tests.builders import EarlierPhotos, solid_image
from tests.cli.conftest import Run

ONE = re.compile(r"(?<![\d.,])1 (?:[a-z-]+ )?(?!bytes|is |as )[a-z]+s\b")


def test_one_is_singular(run: Run, tmp_path: Path) -> None:
    for label, shades in (("cat", (1, 2)), ("dog", (3, 4))):
        for shade in shades:
            path = tmp_path / "set" / label / f"{shade}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(solid_image(shade).data)
    Path("one.csv").write_text("image,label\nset/cat/1.png,cat\n")
    evaluation = ("eval", "image-folder:set", "--limit", 1, "--kb-per-class", 1, "--shots", 1)
    for command in (
        ("add", "k.db", "one.csv", "--embed", "pixels"),
        ("ls", "k.db"),
        ("stats", "k.db"),
        ("verify", "k.db", "--deep"),
        ("export", "k.db", "copy"),
        ("classify", "k.db", "set/cat/2.png", "--shots", 5, "--method", "knn", "--by", "default"),
        ("answer", "m.db", "image-folder:set", "--model", "bundled", "--limit", 1, "--dry-run"),
        ("rationales", "k.db", "--model", "openai:m", "--candidates", 1, "--dry-run"),
        (*evaluation, "--methods", "top-k", "--dry-run"),
        (*evaluation, "--methods", "vote", "--embed", "pixels", "--out", "run"),
        (*evaluation, "--methods", "vote", "--embed", "pixels", "--out", "run"),
        ("report", "run"),
        ("dataset", "image-folder:set", "--format", "inspect", "--out", "data", "--limit", 1),
    ):
        done = run(*command)
        printed = done.out + done.err
        assert done.code == 0, (command, printed)
        assert ONE.findall(printed) == [], (command, printed)


def test_add_list_show_remove(run: Run, pets: Path) -> None:
    assert "12 added" in run("add", "k.db", pets).out
    assert run("add", "k.db", pets, "--json").json == {
        "new": 0,
        "duplicates": 12,
        "skipped": [],
        "examples": 12,
    }
    listed = run("ls", "k.db", "--json", "--label", "leaf").json
    assert isinstance(listed, list)
    assert {row["answer"] for row in listed} == {"leaf"}
    assert len(listed) == 4
    id = listed[0]["id"]
    shown = run("show", "k.db", id[:6], "--image", "copy.png", "--json").json
    assert shown == listed[0] | {"pinned": False, "uses": 0}
    run("pin", "k.db", id)
    table = [line.split() for line in run("show", "k.db", id).out.splitlines()]
    assert ["pinned", "yes"] in table and ["uses", "0"] in table
    assert Path("copy.png").read_bytes() == (pets / "leaf" / "0.png").read_bytes()
    assert run("rm", "k.db", id, "--json").json == {"removed": 1, "examples": 11}
    stats = run("stats", "k.db", "--json").json
    assert isinstance(stats, dict)
    assert (stats["examples"], stats["labels"]) == (11, 3)


def test_an_image_keeps_its_format(run: Run, pets: Path) -> None:
    run("add", "k.db", "pets", "--embed", "pixels")
    Path("photos/leaf").mkdir(parents=True)
    Path("query.jpg").rename("photos/leaf/query.jpg")
    run("add", "photos.db", "photos", "--embed", "pixels")
    run("add", "bare.db", _without_images(), "--embed", "words")
    id, photo, bare = (_first_id(run, file) for file in ("k.db", "photos.db", "bare.db"))
    wrong = run("show", "photos.db", photo, "--image", "copy.png")
    assert (wrong.code, wrong.out, Path("copy.png").exists()) == (2, "", False)
    assert "image/jpeg" in wrong.err
    assert "--image copy.jpg" in wrong.err
    assert run("show", "k.db", id, "--image", "copy.jpg").code == 2
    for name in ("copy.jpg", "copy.jpeg", "copy"):
        assert run("show", "photos.db", photo, "--image", name).code == 0
        assert Path(name).read_bytes() == Path("photos/leaf/query.jpg").read_bytes()
    none = run("show", "bare.db", bare, "--image", "copy.png")
    assert (none.code, "has no image" in none.err) == (1, True)


def _without_images() -> Path:
    path = Path("bare.jsonl")
    path.write_text('{"question": "What is green?", "answer": "leaf"}')
    return path


def _first_id(run: Run, file: str) -> str:
    listed = run("ls", file, "--json").json
    assert isinstance(listed, list)
    return str(listed[0]["id"])


def test_examples_are_filtered_by_tag_and_age(run: Run) -> None:
    lines = (
        f'{{"question": "Who?", "answer": "{i}", "tags": {{"ward": "{i % 2}", "bed": "b"}}}}'
        for i in range(4)
    )
    Path("wards.jsonl").write_text("\n".join(lines))
    run("add", "k.db", "wards.jsonl", "--embed", "words")

    def answers(*options: object) -> list[str]:
        listed = run("ls", "k.db", "--json", *options).json
        assert isinstance(listed, list)
        return [row["answer"] for row in listed]

    assert answers("--tag", "ward=1") == ["1", "3"]
    assert answers("--tag", "ward=1", "--tag", "bed=b", "--limit", 1) == ["1"]
    assert answers("--tag", "ward=1", "--tag", "ward=0") == []
    assert run("ls", "k.db", "--tag", "ward").code == 2
    now = time.time()
    connection = sqlite3.connect("k.db")
    connection.execute("UPDATE examples SET created = ? WHERE answer < '2'", [now - 2 * 86_400])
    connection.commit()
    connection.close()
    yesterday = datetime.fromtimestamp(now - 86_400)
    assert answers("--since", f"{yesterday:%Y-%m-%d %H:%M:%S}") == ["2", "3"]
    assert answers("--since", f"{yesterday:%Y-%m-%d}", "--tag", "ward=0") == ["2"]
    assert answers("--since", "0001-01-01") == ["0", "1", "2", "3"]


def test_tables_are_printed(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    assert "ruby" in run("ls", "k.db").out
    assert "examples" in run("stats", "k.db").out
    assert run("ls", "k.db", "--limit", 0).code == 2
    unknown = run("ls", "k.db", "--label", "star")
    assert (unknown.code, "leaf, ruby, sky" in unknown.err) == (1, True)


def test_unreadable_images_are_reported_and_the_rest_stored(run: Run, pets: Path) -> None:
    (pets / "leaf" / "bad.jpg").write_bytes(b"\xff\xd8\xff nonsense")
    (pets / "leaf" / "empty.png").touch()
    added = run("add", "k.db", pets, "--json")
    assert isinstance(added.json, dict)
    assert (added.code, added.json["new"], len(added.json["skipped"])) == (0, 12, 2)
    assert "bad.jpg" in added.err
    assert "empty.png" in added.err
    assert run("add", "other.db", pets, "--strict").code == 1


@pytest.mark.parametrize("rows", ["damaged", "copies of damaged", "unreadable", "no rows"])
def test_a_run_in_which_every_row_fails_leaves_no_file(run: Run, pets: Path, rows: str) -> None:
    half = (pets / "leaf" / "0.png").read_bytes()[:200]
    if rows == "no rows":
        (pets / "rows.jsonl").touch()
    else:
        names = ["a.png"] * 40 if rows == "copies of damaged" else [f"{i}.png" for i in range(40)]
        for i, name in enumerate(names):
            (pets / name).write_bytes(b"x" if rows == "unreadable" else half + bytes(i))
        lines = [f'{{"image": "{name}", "answer": "leaf"}}\n' for name in names]
        (pets / "rows.jsonl").write_text("".join(lines))
    for options in ((), ("--strict",)):
        failed = run("add", "k.db", pets / "rows.jsonl", *options)
        assert (failed.code, Path("k.db").exists()) == (1, False)
    assert (
        "has no examples" if rows == "no rows" else "a.png" if "copies" in rows else "0.png"
    ) in failed.err


def test_equal_errors_are_grouped(run: Run, pets: Path) -> None:
    lines = [f'{{"image": "gone/{i}.png", "answer": "leaf"}}\n' for i in range(1000)]
    lines += ["broken\n", '{"image": "leaf/0.png", "answer": "leaf"}\n']
    (pets / "rows.jsonl").write_text("".join(lines))
    added = run("add", "k.db", pets / "rows.jsonl")
    assert (added.code, "1 added, 1001 skipped" in added.out) == (0, True)
    assert added.err.count("gone/") == 4
    assert "and 997 more like" in added.err
    assert "line 1001: not valid JSON" in added.err


def test_a_truncated_line_is_reported_by_number(run: Run, pets: Path) -> None:
    line = '{"image": "pets/leaf/0.png", "answer": "leaf"}'
    Path("set.jsonl").write_text(f'{line}\n{{"image": "pets/le\n{line.replace("leaf", "sky")}\n')
    added = run("add", "k.db", "set.jsonl", "--json")
    assert isinstance(added.json, dict)
    assert (added.code, added.json["new"]) == (0, 2)
    assert "line 2" in added.json["skipped"][0]["reason"]


def test_passages_are_added_without_answers(run: Run, pets: Path) -> None:
    Path("gs.csv").write_text("kid,text\n0,Cats purr.\nx,Dogs bark.\n112724,Birds sing.\n")
    Path("seen.jsonl").write_text('{"text": "A leaf.", "image": "query.jpg"}')
    add = ("add", "k.db", "gs.csv", "--passages", "--embed", "words")
    done = run(*add, "--split", "train")
    assert "1 added, 1 skipped; k.db holds 1 example (embedder: words)" in done.out
    assert "gs.csv, line 3: the id must be a number, got 'x'" in done.err
    added = run(*add, "--json").json
    assert isinstance(added, dict)
    assert (added["new"], added["duplicates"], len(added["skipped"])) == (1, 1, 1)
    assert "1 added" in run("add", "k.db", "seen.jsonl", "--passages").out
    listed = run("ls", "k.db", "--json").json
    assert isinstance(listed, list)
    assert {row["question"]: row["answer"] for row in listed} == {
        "A leaf.": "",
        "Birds sing.": "",
        "Cats purr.": "",
    }
    assert "Cats purr." in run("ls", "k.db").out

    assert run(*add, "--strict").code == 1
    for wrong, code, expected in (
        ((*add, "--split", "test"), 2, "split of passages must be train, got test"),
        (("add", "k.db", "gs.csv"), 1, "add --passages for texts alone"),
        (("add", "k.db", "seen.jsonl"), 1, "answer, label and labels are missing"),
    ):
        failed = run(*wrong)
        assert (failed.code, expected in failed.err) == (code, True), failed.err


def test_add_creates_the_folder_of_a_new_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "gs.jsonl").write_text('{"question": "Sky?", "answer": "blue"}\n')
    assert run("add", "new/folder/k.db", "gs.jsonl", "--embed", "words").code == 0
    assert (tmp_path / "new" / "folder" / "k.db").exists()


def test_errors_have_hints_and_no_traceback(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    for arguments in (
        ("stats", "missing.db"),
        ("ls", "missing.db"),
        ("add", "k.db", "missing"),
        ("add", "k.db", "bare"),
        ("classify", "missing.db", "x.jpg"),
    ):
        failed = run(*arguments)
        assert failed.code == 1, arguments
        error, hint = failed.err.splitlines()[-2:]
        assert error.startswith("error: ")
        assert hint.startswith(" hint: ")
        assert "Traceback" not in failed.err
    assert not Path("k.db").exists()


def test_wrong_usage_exits_with_2(run: Run, pets: Path) -> None:
    run("add", "k.db", pets)
    assert run("frobnicate").code == 2
    assert run("add").code == 2
    assert run("classify", "k.db", "query.jpg", "--order", "sideways").code == 2
    assert run("classify", "k.db", "query.jpg", "--prompt", "odd").code == 2
    assert run("eval", "digitz").code == 2
    assert run("eval", "digits", "--shots", "five").code == 2


def test_add_notes_why_the_embedder_was_chosen(run: Run, pets: Path) -> None:
    added = run("add", "k.db", pets)
    assert "embedder bundled: the images do not look like photographs" in added.err
    assert "bottega reindex k.db --embed photos" in added.err
    assert "photographs" not in run("add", "k.db", pets).err
    assert "photographs" not in run("add", "p.db", pets, "--embed", "pixels").err


@pytest.mark.parametrize("installed", [False, True])
def test_add_notes_photographs(run: Run, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if installed and not has_photos():
        pytest.skip("needs the extra [photos]")
    monkeypatch.setattr(bottega.naming, "has_photos", lambda: installed)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    for label in ("tabby", "pug"):
        Path("photos", label).mkdir(parents=True)
        photo = Pillow.fromarray(pixels).resize((90, 70), Pillow.Resampling.BICUBIC)
        photo.save(Path("photos", label, "1.jpg"), quality=len(label) * 15)
    added = run("add", "k.db", "photos")
    wanted = f"embedder {default_photos()}: the images look like photographs; to change it: bottega"
    if not installed:
        wanted = "install bottega-vlm[photos], then run bottega reindex k.db --embed photos-both"
    assert added.err.count(wanted) == 1
    assert f"(embedder: {default_photos() if installed else 'bundled'})" in added.out


@pytest.mark.parametrize(
    ("fingerprint", "noted"),
    [
        ("tower-256 0123456789ab", None),  # of a base made in Python
        ("tower-256 0123456789ab", "photos"),
        ("dual (by-kind (photos-1280 0123) (tower-64 4567)) (tokens 89ab)", "by-kind"),
        ("photos-lite2 tower-256 0123456789ab", "photos-lite2"),
        ("joined 0.3 (tower-256 0123456789ab) (pixels-1 hog8)", "photos+pixels:0.3"),
    ],
)
def test_a_base_with_earlier_vectors_of_photographs_names_the_remedy(
    run: Run, pets: Path, fingerprint: str, noted: str | None
) -> None:
    if not has_photos() or (noted == "photos-lite2" and not weights_installed(LITE2)):
        pytest.skip("needs the extra [photos]")
    with KnowledgeBase.open("old.db", EarlierPhotos(fingerprint)) as knowledge:
        knowledge.add(load_image_folder(pets))
        if noted is not None:
            knowledge.set_note(NOTE, noted)
    assert run("stats", "old.db").code == 0
    successor = noted if noted == "by-kind" else default_photos()
    remedy = f"bottega reindex old.db --embed {successor}"
    for command in (
        ("classify", "old.db", "query.jpg", "--method", "knn"),
        ("classify", "old.db", "query.jpg", "--method", "knn", "--embed", "photos"),
        ("add", "old.db", pets),
    ):
        refused = run(*command)
        assert refused.code == 1, command
        assert [remedy in line for line in refused.err.splitlines()].count(True) == 1
    with pytest.raises(EmbedderMismatchError) as raised:
        KnowledgeBase.open("old.db")
    assert remedy.replace("old.db", "FILE") in raised.value.hint
    assert run(*remedy.split()[1:]).code == 0
    assert "leaf" in run("classify", "old.db", "query.jpg", "--method", "knn").out
    assert f"(embedder: {successor})" in run("add", "old.db", pets).out


def test_the_embedder_of_the_file_is_reused(run: Run, pets: Path) -> None:
    assert "(embedder: pixels)" in run("add", "k.db", pets, "--embed", "pixels").out
    assert "(embedder: pixels)" in run("add", "k.db", pets).out
    clash = run("add", "k.db", pets, "--embed", "bundled")
    assert clash.code == 1
    assert "pixels" in clash.err
    assert "bundled" in clash.err
    assert run("add", "k.db", pets).code == 0  # the failed command changed nothing


def test_an_unloadable_embedder_gets_a_hint_with_the_choices(
    run: Run, pets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found(name: str, *, mode: str) -> Embedder:
        raise EmbeddingError(f"{name} cannot be loaded as an embedder")

    monkeypatch.setattr(
        "bottega.knowledge.embedders.names.SentenceEmbedder", not_found
    )  # queries a hub
    failed = run("add", "k.db", pets, "--embed", "owner/name")
    assert failed.code == 1
    for name in ("bundled", "pixels", "words", "dual", "sentence-transformers folder or id"):
        assert name in failed.err
    assert not Path("k.db").exists()


def test_version_and_help_are_printed(run: Run) -> None:
    assert run("--version").out.startswith(f"bottega {__version__}")
    assert "classify" in run("--help").out


def test_one_photograph_under_two_labels_is_noted(run: Run, pets: Path) -> None:
    ruby = next((pets / "ruby").iterdir())
    Path("other/wrong").mkdir(parents=True)
    (Path("other/wrong") / ruby.name).write_bytes(ruby.read_bytes())
    assert "several answers" not in run("add", "k.db", pets).err
    done = run("add", "k.db", "other")
    assert "1 added" in done.out
    assert "1 question with several answers, for example 'ruby' (" in done.err
    assert "and 'wrong' (other" in done.err
    listed = run("ls", "k.db", "--label", "wrong", "--json").json
    assert isinstance(listed, list)
    assert str(listed[0]["id"]) in done.err
    run("rm", "k.db", listed[0]["id"])
    assert "several answers" not in run("add", "k.db", pets).err


def test_a_label_that_means_abstention_is_noted(run: Run, pets: Path) -> None:
    assert "'unknown'" not in run("add", "k.db", pets).err
    (pets / "ruby").rename(pets / "Unknown")
    assert "the label 'unknown' is also the answer" in run("add", "new.db", pets).err


def test_a_class_folder_names_its_parent(run: Run, pets: Path) -> None:
    done = run("add", "pets.db", pets / "leaf")
    assert done.code == 1 and f"use its parent {pets}, whose folders are the classes" in done.err


@pytest.mark.parametrize("embed", ["words", "minilm"])
def test_text_embedders_of_equal_questions_are_rejected(run: Run, pets: Path, embed: str) -> None:
    message = f"--embed {embed} reads the questions, which are all 'What is in the image above?'"
    done = run("add", "pets.db", pets, "--embed", embed)
    assert done.code == 2 and message in done.err
    assert not Path("pets.db").exists()
    run("add", "pets.db", pets)
    again = run("reindex", "pets.db", "--embed", embed)
    assert again.code == 2 and message in again.err


def test_stats_count_the_labels_and_name_the_embedder(run: Run, pets: Path) -> None:
    run("add", "pets.db", pets)
    (pets / "leaf" / "0.png").unlink()
    run("add", "other.db", pets)
    counts = {"ruby": 4, "leaf": 3, "sky": 4}
    assert run("stats", "other.db", "--json").json["label_counts"] == counts  # type: ignore[index]
    shown = run("stats", "other.db").out
    assert "ruby 4, sky 4, leaf 3" in shown and " bundled " in shown


def test_an_embedder_mismatch_names_both(run: Run, pets: Path) -> None:
    run("add", "pets.db", pets)
    done = run("classify", "pets.db", pets, "--embed", "pixels")
    assert "built with 'bundled' and was opened with 'pixels'" in done.err
