"""One folder for each class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bottega.errors import ImageError, LoadError
from bottega.image import Image, path_text
from bottega.knowledge.bad import OnBadRow, or_raise
from bottega.knowledge.loading.labelled import QUESTION, label_text, labelled
from bottega.types import Example

SPLITS = ("train", "test")
SUFFIXES = frozenset(
    [".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm"]
)
EXPORTED = ("examples.jsonl", "images")
LAYOUT = "expected is FOLDER/CLASS/IMAGE.jpg, such as pets/cat/1.jpg and pets/dog/2.jpg"


def load_image_folder(
    folder: str | Path,
    *,
    question: str = QUESTION,
    split: str | None = None,
    on_bad: OnBadRow | None = None,
) -> Iterator[Example]:
    """Each subfolder is a class, named by the folder; deeper folders belong to it too.

    `split` takes the classes in a subfolder, such as FOLDER/train. Ordered by label, then by path.
    Files that are not named like images are ignored. Images that cannot be read go to `on_bad`,
    which raises unless it is given, as does an image that the folder of another class holds too:
    the first class keeps it. What `export_to` wrote is refused.
    """
    report = or_raise(on_bad)
    root = _root(Path(folder), split)
    paths = _labelled_paths(root, report)
    for stray in _images(root, "*"):
        report(LoadError(f"{path_text(stray)} lies in no class folder", hint=LAYOUT))
    first: dict[str, tuple[str, Path]] = {}
    for label, path in paths:
        try:
            image = Image.open(path)
            _check_label(label, path, *first.setdefault(image.sha256, (label, path)))
        except (ImageError, LoadError) as error:
            report(error)
        else:
            yield labelled(image, (label,), question=question, source=path_text(path))


def has_splits(folder: str | Path) -> bool:
    return all((Path(folder) / split).is_dir() for split in SPLITS)


def _root(folder: Path, split: str | None) -> Path:
    if not folder.is_dir():
        raise LoadError(f"{path_text(folder)} is not a folder", hint="check the path")
    if all((folder / name).exists() for name in EXPORTED):  # one class of all, called images
        raise LoadError(
            f"{path_text(folder)} is what export wrote, not a folder of classes",
            hint=f"bottega import K.db {path_text(folder)}, or import_from in Python",
        )
    if split is None and has_splits(folder):
        raise LoadError(
            f"{path_text(folder)} holds the splits train and test",
            hint=f"choose the split train or test (--split), or name {path_text(folder / 'train')}",
        )
    root = folder if split is None else folder / split
    if not root.is_dir():
        raise LoadError(
            f"{path_text(folder)} has no folder {split!r}",
            hint="leave out the split if the class folders lie directly in it",
        )
    return root


def _check_label(label: str, path: Path, first_label: str, first_path: Path) -> None:
    if label != first_label:
        raise LoadError(
            f"{path_text(path)} is the same image as {path_text(first_path)}, in another class",
            hint="delete the one in the wrong folder",
        )


def _labelled_paths(root: Path, on_bad: OnBadRow) -> list[tuple[str, Path]]:
    classes = [folder for folder in root.iterdir() if folder.is_dir() and _visible(folder, root)]
    found: list[tuple[str, Path]] = []
    for folder in classes:
        try:
            label = label_text(path_text(folder.name))
        except LoadError as error:
            on_bad(LoadError(f"{path_text(folder)!r}: {error}", hint=error.hint))
        else:
            found += [(label, path) for path in _images(folder, "**/*")]
    if not classes:
        raise LoadError(f"{path_text(root)} has no class folders", hint=LAYOUT)
    if not found:
        raise LoadError(f"the class folders of {path_text(root)} hold no images", hint=LAYOUT)
    return sorted(found, key=lambda pair: (pair[0], path_text(pair[1])))


def _images(folder: Path, pattern: str) -> list[Path]:
    return sorted(
        path
        for path in folder.glob(pattern)
        if path.suffix.lower() in SUFFIXES and path.is_file() and _visible(path, folder)
    )


def _visible(path: Path, root: Path) -> bool:
    """Not what archives and file managers leave behind."""
    return not any(part.startswith((".", "__MACOSX")) for part in path.relative_to(root).parts)
