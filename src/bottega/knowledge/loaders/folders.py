"""Loaders of labelled images: class folders, scikit-learn's digits."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from bottega._util.progress import plural
from bottega.errors import (
    BottegaError,
    ImageError,
    LoadError,
    NoticeError,
    OnRowError,
    error_handler,
)
from bottega.image import Image, path_text
from bottega.knowledge.loaders.archives import HEADER_BYTES, UNPACK, is_archive, open_archive
from bottega.knowledge.loaders.scan import (
    FolderScan,
    class_folder,
    scan_images,
    split_names,
    splits_below,
    subfolders,
)
from bottega.types import IMAGE_QUESTION, Example, Query

NO_LABEL = "none"
SNAPSHOTS = "snapshots"  # in a repository of a hub's cache
MAX_SIMILAR = 3  # groups of similar labels in a note
MAX_SHOWN = 5  # errors in the one of a folder without images
MAX_LABEL = 1000
MAX_PATH = 4096
URLS = ("http://", "https://")
# Of files that a table names without: 0001 for 0001.jpg.
OMITTED_SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".webp", ".JPG", ".JPEG", ".PNG")
# Default-ignorable characters of Unicode that a label may contain.
INVISIBLE = re.compile(
    r"[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    r"\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\U000e0000-\U000e0fff]"
)
WHOLE = re.compile(r"([+-]?\d+)\.0+")
WIDE = re.compile(r"[\uff00-\uffef]+")  # full-width and half-width forms
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BRIGHTEST = 16
DIGIT_QUESTION = "Which digit is this?"
EXPORTED = ("examples.jsonl", "images")
TABLES = (".csv", ".tsv", ".jsonl")
SEPARATORS = re.compile(r"""[\t,;|"'/\\]""")  # also of folders
ROWS = 20  # of a table that are read to decide if it names images
LAYOUT = "use FOLDER/CLASS/IMAGE.jpg, such as pets/cat/1.jpg and pets/dog/2.jpg"


def label_text(name: str) -> str:
    """Return the label in one Unicode form and on one line, and whole numbers without decimals, so
    labels are equal if they look equal or are equal numbers in another format."""
    text = one_line(name)
    text = whole[1] if (whole := WHOLE.fullmatch(text)) else text
    if not text:
        raise LoadError("the label is empty", hint="give every class a name")
    if len(text) > MAX_LABEL:
        raise LoadError(
            f"the label has {len(text):,} characters, more than {MAX_LABEL:,}: {text[:40]!r}...",
            hint="give long texts as answer, not as label",
        )
    return text


def value_text(value: object) -> str:
    """Return the text of a value, of whole numbers without decimals."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def one_line(text: str) -> str:
    """Return the text in one Unicode form and on one line."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def similar_labels(labels: Iterable[str]) -> NoticeError | None:
    """Return a note on labels that differ only in case, width or invisible characters."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        visible = INVISIBLE.sub("", label)
        folded = WIDE.sub(lambda wide: unicodedata.normalize("NFKC", wide[0]), visible).casefold()
        shown = INVISIBLE.sub(lambda hidden: f"\\u{ord(hidden[0]):04x}", label)
        groups.setdefault(one_line(folded), []).append(repr(shown[:80]).replace("\\\\", "\\"))
    similar = [" and ".join(group) for group in groups.values() if len(group) > 1]
    if not similar:
        return None
    more = len(similar) - MAX_SIMILAR
    return NoticeError(
        f"labels differ only in case, width or invisible characters: "
        f"{'; '.join(similar[:MAX_SIMILAR])}{f'; and {more} more' if more > 0 else ''};"
        " give the images of one class one label"
    )


def faint_images(images: Iterable[Image]) -> NoticeError | None:
    """Return a note on images that use almost none of their 16 bits."""
    faint = [image for image in images if image.is_faint()]
    if not faint:
        return None
    return NoticeError(
        f"{faint[0].source} uses less than 1 % of its range of values and looks almost uniform"
        f"{f', as do {len(faint) - 1} of the other images sampled' if faint[1:] else ''};"
        " scale the values of the images to the range of 16 bits"
    )


def open_within(folder: Path, name: str) -> Image:
    """Open an image that must be inside the folder.

    A row is untrusted data: it must not send any other file of this computer to an endpoint. Raises
    `ImageError`.
    """
    path = folder / (existing_name(folder, name) or name)
    try:
        inside = path.resolve().is_relative_to(_repository(folder.resolve()))
    except (OSError, ValueError, RuntimeError):  # a NUL, circular links
        inside = False
    if not inside:
        raise ImageError(
            f"{path_text(path)} is outside of {path_text(folder)}",
            hint="keep the images beside or below the file that names them",
        )
    return Image.open(path)


def _repository(folder: Path) -> Path:
    """Return the repository of a snapshot in a hub's cache, whose files are links into its folder
    `blobs`; other folders unchanged."""
    snapshots = (one for one in folder.parents if one.name == SNAPSHOTS)
    return next((one.parent for one in snapshots if (one.parent / "blobs").is_dir()), folder)


def hub_snapshot(path: Path) -> Path:
    """Return the current snapshot of the only data set in a cache of the Hugging Face hub, or of a
    repository in it; other paths unchanged. Raises `LoadError`."""
    repositories = sorted([*path.glob("datasets--*"), *path.glob("models--*")])
    data_sets = [one for one in repositories if one.name.startswith("datasets--")]
    if repositories and len(data_sets) != 1:
        listed = ", ".join(path_text(one) for one in data_sets)
        raise LoadError(
            f"{path_text(path)} is a cache of the Hugging Face hub with {len(data_sets)} data sets",
            hint=f"name one: {listed}" if data_sets else "name a folder of labelled images",
        )
    repository = data_sets[0] if data_sets else path
    snapshots = [one for one in repository.glob(f"{SNAPSHOTS}/*") if one.is_dir()]
    if not (snapshots and repository.name.startswith(("datasets--", "models--"))):
        return path
    main = repository / "refs" / "main"
    current = repository / SNAPSHOTS / (main.read_text("utf-8").strip() if main.exists() else "")
    return current if current in snapshots else max(snapshots, key=lambda one: one.stat().st_mtime)


def existing_name(folder: Path, name: str) -> str | None:
    """Return the name, its form with slashes for a Windows path, or with a suffix that it lacks, if
    the file exists. Raises `ImageError` for a URL."""
    if name.startswith(URLS):
        raise ImageError(
            f"image {name[:80]!r} is not fetched", hint="download the images and give their paths"
        )
    if len(name) > MAX_PATH:  # base64: building a path of it takes long
        return None
    slashed = name.replace("\\", "/")
    for each in (name, slashed, *map(slashed.__add__, OMITTED_SUFFIXES)):
        try:
            if (folder / each).exists():
                return each
        except (OSError, ValueError):  # too long for a path, or a NUL
            continue
    return None


def find_image(folder: Path, name: str, prefixes: Sequence[str]) -> Image | None:
    """Return the image that a table in the folder means by a path, or by a file name or an id in
    one of several subfolders, such as `train/`; None if there is none. Raises `ImageError`."""
    for root in (folder, folder / "images"):
        if existing_name(root, name) is not None:
            return open_within(root, name)
    names = dict.fromkeys(existing_name(folder, f"{root}{name}") for root in prefixes)
    found = [*filter(None, names)]
    if len(found) > 1:
        raise ImageError(
            f"{name!r} may be {' or '.join(found)}", hint="give paths relative to the table"
        )
    return open_within(folder, found[0]) if found else None


def join_labels(labels: Sequence[str]) -> str:
    """Return several labels as the answer of a demonstration."""
    return ", ".join(labels) or NO_LABEL


def labelled_example(
    image: Image, labels: tuple[str, ...], *, question: str, source: str, multi: bool = False
) -> Example:
    """Return an example of one image; `multi` keeps its list of labels."""
    return Example(
        Query(question, (image,)),
        join_labels(labels),
        labels=labels if multi else None,
        source=source,
    )


def load_digits(*, words: bool = True, question: str = DIGIT_QUESTION) -> Iterator[Example]:
    """Yield scikit-learn's 1,797 handwritten digits in order: 8 x 8 pixels, bright on black.

    Labels are "zero" to "nine", or "0" to "9" without `words`.
    """
    for number, (image, digit) in enumerate(_digit_images()):
        label = WORDS[digit] if words else str(digit)
        source = f"scikit-learn digits, {number}"
        yield labelled_example(image, (label,), question=question, source=source)


@cache
def _digit_images() -> list[tuple[Image, int]]:
    from sklearn import datasets  # takes a second to import

    digits = datasets.load_digits()
    pixels = (digits.images * (255 / BRIGHTEST)).round().astype(np.uint8)
    return [
        (Image.from_pillow(Pillow.fromarray(one), source=f"scikit-learn digits, {number}"), digit)
        for number, (one, digit) in enumerate(zip(pixels, digits.target.tolist(), strict=True))
    ]


def load_image_folder(
    folder: str | Path,
    *,
    question: str = IMAGE_QUESTION,
    split: str | None = None,
    on_error: OnRowError | None = None,
) -> Iterator[Example]:
    """Yield the images of class folders, or of a .zip archive of them, by label, then by path.

    Each subfolder is a class, named by the folder; deeper folders and links to folders belong to it
    too. `split` selects a subfolder with classes, such as FOLDER/train. Files are recognized by
    their suffix or content; hidden and system files are skipped. Unreadable images and folders go
    to `on_error`, which raises by default, as do images that another class already contains.
    A given `on_error` also receives one `NoticeError` with the number of other files and the
    classes without images. Exports (`export_to`) are rejected.
    """
    report = error_handler(on_error)
    with _scanned(Path(folder), split) as scan:
        for error in scan.errors:
            report(error)
        first: dict[str, tuple[str, Path]] = {}
        for label, path in _labelled_paths(scan, report):
            try:
                image = scan.open_image(path)
                first_label, first_path = first.setdefault(image.sha256, (label, path))
                if label != first_label:
                    raise LoadError(
                        f"{path_text(path)} equals {path_text(first_path)} of another class",
                        hint="delete the one in the wrong folder",
                    )
            except (ImageError, LoadError) as error:
                report(error)
            else:
                yield labelled_example(image, (label,), question=question, source=path_text(path))
        if on_error is not None and (unread := _unread_text(scan)):
            on_error(NoticeError(f"{path_text(scan.root)}: not read: {unread}"))


def count_images(folder: str | Path, split: str | None = None) -> int:
    """Return the number of images that `load_image_folder` reads. Raises `LoadError`."""
    with _scanned(Path(folder), split) as scan:
        return len(_labelled_paths(scan, ignore_error))


def ignore_error(error: BottegaError) -> None:
    """Ignore the error, which the loader reports."""


def find_splits(folder: Path) -> dict[str, list[str]]:
    """Return the names of the subfolders of a folder or archive that are splits, such as train and
    val, instead of classes. Raises `LoadError`."""
    if not is_archive(folder):
        return splits_below(folder, subfolders)
    with open_archive(folder) as archive:
        return splits_below(archive.root, archive.subfolders)


@contextmanager
def _scanned(folder: Path, split: str | None) -> Iterator[FolderScan]:
    if is_archive(folder):
        with open_archive(folder) as archive:
            scan = archive.scan(class_folder(archive.root, split, archive.subfolders))
            _check_layout(scan, _beside(scan, folder, split), archive.members, archive.read_head)
            yield scan
        return
    if not folder.is_dir():
        raise LoadError(f"{path_text(folder)} is not a folder", hint="check the path")
    if all((folder / name).exists() for name in EXPORTED):  # it would load as one class, images
        raise LoadError(
            f"{path_text(folder)} is an export, not a folder of classes",
            hint=f"run bottega import K.db {path_text(folder)}, or call import_from",
        )
    scan = scan_images(class_folder(folder, split, subfolders))
    places = _beside(scan, folder, split)
    files = chain.from_iterable(place.glob("*") for place in places)
    _check_layout(scan, places, files, _read_head)
    yield scan


def _beside(scan: FolderScan, folder: Path, split: str | None) -> list[Path]:
    """Return the folders whose tables may name the images. Someone who chooses a split with class
    folders does not mean a table outside of it."""
    has_classes = any(path.parent != scan.root for path in scan.images)
    above = [one for one in scan.root.parents if one.is_relative_to(folder)]
    return [scan.root, *([] if split is not None and has_classes else above)]


def _check_layout(
    scan: FolderScan,
    places: Collection[Path],
    files: Iterable[Path],
    read_head: Callable[[Path], bytes],
) -> None:
    """Raise `LoadError` if the folders are not classes: a table names their images, or they are
    the images and boxes of object detection."""
    for path in files:
        is_table = path.parent in places and path.suffix.lower() in TABLES
        if is_table and _names_images(read_head(path), scan):
            name = path_text(path)
            spec = "" if path.suffix == ".jsonl" else f" (bottega eval: table:{name})"
            read = UNPACK if is_archive(path) else f"name the table: {name}{spec}"
            raise LoadError(
                f"{name} names the images, so their folders are not their classes",
                hint=f"{read}, or move the table elsewhere to use the folders",
            )
    filled = {path.relative_to(scan.root).parts[0].casefold() for path in scan.images}
    texts = scan.unread[".txt"]
    if texts and "labels" in {*map(str.casefold, scan.folders)} - filled and "images" in filled:
        raise LoadError(
            f"{path_text(scan.root)} has the folders images and labels, with"
            f" {plural(texts, '.txt file')}, as for object detection, and no classes",
            hint=LAYOUT,
        )


def _names_images(head: bytes, scan: FolderScan) -> bool:
    """Return whether one of the first rows of a table contains the file name of an image, or begins
    with one that lacks the suffix."""
    names = {path.name for path in scan.images}
    numbers = len(scan.folders) < 2  # such as a column of counts beside several classes
    ids = {path.stem for path in scan.images if numbers or not path.stem.isdigit()}
    ids -= {*scan.folders}
    lines = head.decode(errors="replace").splitlines()[:ROWS]
    rows = [[cell.strip() for cell in SEPARATORS.split(line)] for line in lines]
    firsts = (next(filter(None, row), "") for row in rows[1:])
    return not names.isdisjoint(chain.from_iterable(rows)) or not ids.isdisjoint(firsts)


def _read_head(path: Path) -> bytes:
    if path.is_file():
        with suppress(OSError), path.open("rb") as file:
            return file.read(HEADER_BYTES)
    return b""


def _labelled_paths(scan: FolderScan, on_error: OnRowError) -> list[tuple[str, Path]]:
    labels: dict[str, str | None] = {}
    found: list[tuple[str, Path]] = []
    strays: list[Path] = []
    for path in scan.images:
        name, *below = path.relative_to(scan.root).parts
        if not below:
            strays.append(path)
            continue
        if name not in labels:
            labels[name] = _class_label(scan.root / name, on_error)
        if (label := labels[name]) is not None:
            found.append((label, path))
    if not found:
        raise _no_classes(scan, is_class=bool(strays))
    for stray in strays:
        on_error(LoadError(f"{path_text(stray)} is not in a class folder", hint=LAYOUT))
    return sorted(found, key=lambda pair: pair[0])


def _class_label(folder: Path, on_error: OnRowError) -> str | None:
    try:
        return label_text(path_text(folder.name))
    except LoadError as error:
        on_error(LoadError(f"{path_text(folder)!r}: {error}", hint=error.hint))
        return None


def _no_classes(scan: FolderScan, *, is_class: bool) -> LoadError:
    root = scan.root
    if scan.errors:
        shown = "; ".join(map(str, scan.errors[:MAX_SHOWN]))
        more = len(scan.errors) - MAX_SHOWN
        text = f"{shown}{f'; and {more} more' if more > 0 else ''}"
        return LoadError(text, hint=scan.errors[0].hint)
    if scan.folders:
        return LoadError(f"the class folders of {path_text(root)} hold no images", hint=LAYOUT)
    is_class = is_class and not split_names([root.name])  # its parent contains no classes either
    parent = f"use its parent {path_text(root.parent)}, whose folders are the classes"
    return LoadError(f"{path_text(root)} has no class folders", hint=parent if is_class else LAYOUT)


def _unread_text(scan: FolderScan) -> str:
    """Return the numbers of unread files by reason, and the classes without images."""
    filled = {path.relative_to(scan.root).parts[0] for path in scan.images}
    empty = [path_text(name) for name in scan.folders if name not in filled]
    classes = f"classes without images: {', '.join(empty)}" if empty else ""
    return "; ".join(filter(None, (scan.unread_text, classes)))
