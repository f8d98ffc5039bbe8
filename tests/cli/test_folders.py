"""Folders as people have them: `add`, `classify` and `eval` read the same images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from bottega.knowledge.loaders import scan as scan_module
from tests.builders import solid_image
from tests.cli.conftest import Ran, Run

shades = iter(range(10**6))


def document(ran: Ran) -> Any:
    return ran.json


def save(path: Path) -> Path:
    """Write an image of its own shade; the suffix need not be that of its format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(solid_image(next(shades)).data)
    return path


def classes(folder: Path, *names: str) -> int:
    """Write classes of two images each and return the number of images."""
    for name in names or ("cat", "dog"):
        save(folder / name / "1.png")
        save(folder / name / "2.jpg")
    return 2 * len(names or ("cat", "dog"))


def plain(root: Path) -> int:
    return classes(root, "cat", "dog", "bird")


def splits(*names: str) -> Callable[[Path], int]:
    def make(root: Path) -> int:
        return max([classes(root / name) for name in names])

    return make


def too_deep(root: Path) -> int:
    return classes(root / "images")


def empty_classes(root: Path) -> int:
    for name in ("empty/nested/", "medical/"):
        (root / name).mkdir(parents=True)
    (root / "medical" / "1.tga").write_bytes(bytes(40))
    (root / "medical" / "2.dcm").write_bytes(bytes(200))
    return classes(root)


SUFFIXES = ("MPO", "jpe", "j2k", "apng", "jfif", "JPEG", "pbm", "dat", "")


def suffixes(root: Path) -> int:
    for number, suffix in enumerate(SUFFIXES):
        save(root / "cat" / f"{number}.{suffix}".rstrip("."))
    save(root / "cat" / "0.jpg" / "1.png")
    return len(SUFFIXES) + 1 + classes(root, "dog")


def links(root: Path) -> int:
    outside = root.parent / "outside"
    count = classes(outside, "parrot", "siamese") + classes(root)
    (root / "bird").symlink_to(outside / "parrot")
    (root / "cat" / "siamese").symlink_to(outside / "siamese")
    (root / "cat" / "loop").symlink_to(root / "cat")
    (root / "dog" / "up").symlink_to(root)
    (root / "dog" / "itself").symlink_to("itself")
    (root / "dog" / "gone.jpg").symlink_to("nowhere.jpg")
    return count


def system_files(root: Path) -> int:
    for folder in ("__MACOSX", ".ipynb_checkpoints", "@eaDir", "$RECYCLE.BIN", "$Recycle.Bin"):
        save(root / folder / "1.png")
        save(root / "cat" / folder / "1.png")
    for name in (".DS_Store", "._0.jpg", "Thumbs.db", "Desktop.ini"):
        save(root / "cat" / name)
    return classes(root)


LAYOUTS = {
    "plain": (plain, None, None),
    "train and test": (splits("train", "test"), "train", "train"),
    "train and val": (splits("train", "val"), "val", "val"),
    "train and valid": (splits("train", "valid"), "val", "valid"),
    "Train and Test": (splits("Train", "Test"), "train", "Train"),
    "train alone": (splits("train"), "train", "train"),
    "test_set and training2": (splits("test_set", "training2"), "train", "training2"),
    "too deep": (too_deep, None, None),
    "empty classes": (empty_classes, None, None),
    "suffixes": (suffixes, None, None),
    "links": (links, None, None),
    "system files": (system_files, None, None),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_add_and_classify_read_the_same_images(run: Run, tmp_path: Path, layout: str) -> None:
    make, split, subfolder = LAYOUTS[layout]
    root = tmp_path / "own" / "set"
    count = make(root)
    option = ("--split", split) if split else ()
    added = run("add", "k.db", root, *option, "--embed", "pixels", "--json")
    assert (added.code, document(added)["new"], document(added)["skipped"]) == (0, count, []), (
        added.err
    )
    listed = run("ls", "k.db", "--limit", 100, "--json")
    folder = root / subfolder if subfolder else root
    found = run("classify", "k.db", folder, "--method", "knn", "--json")
    assert {one["source"] for one in document(listed)} == {one["image"] for one in document(found)}
    assert found.code == 0


@pytest.mark.parametrize("layout", [name for name, (_, split, _) in LAYOUTS.items() if split])
def test_splits_are_not_classes(run: Run, tmp_path: Path, layout: str) -> None:
    make, _, subfolder = LAYOUTS[layout]
    make(tmp_path / "tv")
    refused = run("add", "k.db", "tv")
    assert refused.code == 1
    assert "tv contains the split" in refused.err
    assert f"{subfolder} " in f"{refused.err} "
    assert "--split" in refused.err
    assert not Path("k.db").exists()


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        (["train", "extra"], True),  # with the same classes
        (["训练集", "测试集"], True),
        (["training-set", "holdout", "unlabeled"], True),
        (["trainer", "tester"], False),
        (["train", "val", "labels"], True),
        (["VALIDATION", "Training set"], True),
        (["dev-01", "Testing_Images"], True),
    ],
)
def test_names_decide_if_a_folder_is_a_split(
    run: Run, tmp_path: Path, names: list[str], is_refused: bool
) -> None:
    for name in names:
        classes(tmp_path / "set" / name)
    added = run("add", "k.db", "set", "--embed", "pixels")
    assert (added.code, "contains the split" in added.err) == (int(is_refused), is_refused)


def test_a_class_may_be_named_like_a_split(run: Run, tmp_path: Path) -> None:
    for name in ("train", "car"):  # vehicles
        save(tmp_path / "set" / name / f"{name} from the side" / "1.png")
    added = run("add", "k.db", "set", "--embed", "pixels")
    assert added.code == 0, added.err
    assert "2 added" in added.out


def test_a_folder_around_splits_is_named(run: Run, tmp_path: Path) -> None:
    for name in ("train", "test"):
        classes(tmp_path / "set" / "data" / name)
    refused = run("add", "k.db", "set")
    assert refused.code == 1 and "set/data contains the splits train and test" in refused.err
    added = run("add", "k.db", "set", "--split", "train", "--embed", "pixels")
    assert added.code == 0, added.err


def test_a_split_that_several_folders_may_be_is_not_guessed(run: Run, tmp_path: Path) -> None:
    for name in ("val", "train1", "train2"):
        classes(tmp_path / "set" / name)
    refused = run("add", "k.db", "set", "--split", "train")
    assert "choose the split train1 or train2 or val" in refused.err
    assert run("add", "k.db", "set", "--split", "train2", "--embed", "pixels").code == 0


def test_eval_reads_train_and_val(run: Run, tmp_path: Path) -> None:
    for name in ("Train", "val"):
        classes(tmp_path / "set" / name)
    done = run("eval", "image-folder:set", "--methods", "knn", "--embed", "pixels")
    assert (done.code, "only 4 examples available" in done.err) == (0, True), done.err


def test_other_files_are_counted_by_reason(run: Run, tmp_path: Path) -> None:
    empty_classes(tmp_path / "set")
    system_files(tmp_path / "set")
    (tmp_path / "set" / "cat" / "notes.TXT").write_text("no image")
    (tmp_path / "set" / "cat" / "LICENSE").write_text("no image")
    (tmp_path / "set" / "cat" / "gone.png").symlink_to("nowhere.png")
    added = run("add", "k.db", "set", "--embed", "pixels", "--strict")
    assert added.code == 0
    expected = (
        "set: not read: 14 hidden or system, 1 .dcm, 1 .tga, 1 .txt, 1 broken or repeated link,"
        " 1 without a suffix"
    )
    assert f"{expected}; classes without images: empty, medical" in added.err
    assert expected in run("classify", "k.db", "set", "--method", "knn").err
    evaluated = run("eval", "image-folder:set", "--methods", "knn", "--embed", "pixels")
    assert expected in evaluated.err


def test_a_class_that_cannot_be_opened_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes(tmp_path / "set")
    locked = save(tmp_path / "set" / "locked" / "1.png").parent
    entries = scan_module.entries_of

    def refusing(folder: Path) -> list[Path]:
        if folder.name == locked.name:
            raise PermissionError(13, "Permission denied", str(folder))
        return entries(folder)

    monkeypatch.setattr(scan_module, "entries_of", refusing)
    added = run("add", "k.db", "set", "--embed", "pixels", "--json")
    assert (added.code, document(added)["new"]) == (0, 4)
    [skipped] = document(added)["skipped"]
    assert skipped["reason"] == "set/locked cannot be opened: Permission denied"
    assert run("add", "other.db", "set", "--strict").code == 1
    assert "locked cannot be opened" in run("classify", "k.db", "set", "--method", "knn").err


def test_a_folder_that_cannot_be_opened_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes(tmp_path / "locked")
    listed = Path.iterdir

    def refusing(folder: Path) -> Iterator[Path]:
        if folder.name == "locked":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refusing)
    refused = run("add", "k.db", "locked", "--embed", "pixels")
    assert (refused.code, "locked cannot be opened: Permission denied" in refused.err) == (1, True)
    assert not (tmp_path / "k.db").exists()


# Names of classes, and those that the note shows; None for no note.
NAMES: dict[str, tuple[tuple[str, ...], str | None]] = {
    "case": (("Cat", "cat", "dog"), "'Cat' and 'cat';"),
    "width": (("ｶﾞｽ", "ガス", "dog"), "'ガス' and 'ｶﾞｽ';"),
    "invisible": (("cat", "cat\u200b", "dog"), r"'cat' and 'cat\u200b';"),
    "filler": (("cat", "\u3164cat", "dog"), r"'cat' and '\u3164cat';"),
    "two groups": (("A", "B", "a", "b"), "'A' and 'a'; 'B' and 'b';"),
    "different": (("cat", "cats", "c\u00e1t", "x2", "x\u00b2"), None),
}


@pytest.mark.parametrize("kind", NAMES)
def test_labels_that_look_equal_are_named_once(run: Run, tmp_path: Path, kind: str) -> None:
    names, shown = NAMES[kind]
    classes(tmp_path / "set", *names)
    for command in (("add", "k.db", "set", "--embed", "pixels"), ("eval", "image-folder:set")):
        methods = ("--methods", "nearest", "--embed", "pixels") if command[0] == "eval" else ()
        ran = run(*command, *methods)
        assert ran.code == 0, ran.err
        notes = [line for line in ran.err.splitlines() if line.startswith("labels differ")]
        if shown is None:
            assert notes == []
        else:
            [line] = notes
            assert line.startswith(
                f"labels differ only in case, width or invisible characters: {shown}"
            )


def test_images_that_use_little_of_their_16_bits_are_named_once(run: Run, tmp_path: Path) -> None:
    for number, label in enumerate(("cat", "cat", "dog", "dog")):
        path = save(tmp_path / "set" / label / f"{number}.png")
        Pillow.fromarray(np.full((8, 8), 100 + number, np.uint16)).save(path)
    added = run("add", "k.db", "set", "--embed", "pixels")
    evaluated = run("eval", "image-folder:set", "--methods", "nearest", "--embed", "pixels")
    for ran, others in ((added, 3), (evaluated, 1)):
        assert ran.code == 0, ran.err
        [line] = [line for line in ran.err.splitlines() if "less than 1 %" in line]
        assert f"as do {others} of the other images sampled" in line
