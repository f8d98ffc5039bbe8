"""Exports for other programs: items of a benchmark, and the predictions of a run in the form of
A-OKVQA's leaderboard."""

from __future__ import annotations

import base64
import csv
import mimetypes
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from string import ascii_uppercase
from typing import NamedTuple

import orjson

from bottega._util.durable_files import replace_file
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.outcomes import method_title
from bottega.evaluation.report.runs import opened_run
from bottega.image import Image
from bottega.types import Example

IMAGES = "images"
# The first of these tags becomes VLMEvalKit's category.
CATEGORIES = ("category", "subject", "topic")
DIRECT, BY_CHOICE = "direct_answer", "multiple_choice"


def write_dataset(data: Benchmark, format: str, out: Path) -> Path:
    """Write the items; return the file to pass to the other program. Raises `SettingError`."""
    if format not in FORMATS:
        raise SettingError(f"format is unknown, got {format!r}", hint=f"use {' or '.join(FORMATS)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        return FORMATS[format](data, out)
    except OSError as error:
        raise SettingError(
            f"{out} is not writable: {error.strerror}", hint="set another --out folder"
        ) from error


def options(data: Benchmark, item: Example) -> tuple[str, ...]:
    """Return the choices, if letters suffice for them; empty for an open question."""
    choices = item.query.choices or (() if data.multi_label else data.labels)
    fits = 2 <= len(choices) <= len(ascii_uppercase) and item.answer in choices
    return choices if fits else ()


def _inspect(data: Benchmark, out: Path) -> Path:
    """Write JSON lines for `json_dataset`, with absolute image paths before the question."""
    folder = out.absolute() / IMAGES
    folder.mkdir(exist_ok=True)
    path = out / "dataset.jsonl"
    with path.open("wb") as file:
        for index, item in enumerate(data.items):
            file.write(orjson.dumps(_sample(data, index, item, folder)) + b"\n")
    return path


def _sample(data: Benchmark, index: int, item: Example, folder: Path) -> dict[str, object]:
    content = [
        *({"type": "image", "image": str(_saved(one, folder))} for one in item.query.images),
        {"type": "text", "text": item.query.text},
    ]
    choices = options(data, item)
    return {
        "id": item.query.id or str(index),
        "input": [{"role": "user", "content": content}],
        **({"choices": choices} if choices else {}),
        "target": _letter(choices, item.answer),
        "metadata": dict(item.tags),
    }


def _saved(image: Image, folder: Path) -> Path:
    """Save an image; equal images share a file."""
    kind = mimetypes.guess_extension(image.media_type) or ".bin"
    path = folder / f"{image.sha256[:32]}{kind}"
    if not path.exists():
        path.write_bytes(image.data)
    return path


def _vlmevalkit(data: Benchmark, out: Path) -> Path:
    """Write a table with images for `$LMUData`.

    VLMEvalKit uses the file name as the data set's name, and skips items without an image.
    """
    kind = re.sub(r"\W+", "_", data.name.partition(":")[0])
    max_choices = max(len(options(data, item)) for item in data.items)
    letters = ascii_uppercase[:max_choices]
    tagged = any(_category(item) for item in data.items)
    path = out / f"bottega_{kind}.tsv"
    with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        head = ("index", "image", "question", *letters, "answer")
        writer.writerow((*head, "category") if tagged else head)
        for index, item in enumerate(data.items):
            chosen = options(data, item)
            offered = [chosen[i] if i < len(chosen) else "" for i in range(max_choices)]
            row = (index, _encoded(item), item.query.text, *offered, _letter(chosen, item.answer))
            writer.writerow((*row, _category(item)) if tagged else row)
    return path


def _encoded(item: Example) -> str:
    """Return base64, or a list of it for several images."""
    images = [base64.b64encode(image.data).decode("ascii") for image in item.query.images]
    return images[0] if len(images) == 1 else str(images) if images else ""


def _letter(choices: tuple[str, ...], answer: str) -> str:
    return ascii_uppercase[choices.index(answer)] if choices else answer


def _category(item: Example) -> str:
    return next((item.tags[name] for name in CATEGORIES if name in item.tags), "")


FORMATS: dict[str, Callable[[Benchmark, Path], Path]] = {
    "inspect": _inspect,
    "vlmevalkit": _vlmevalkit,
}


class PredictionCounts(NamedTuple):
    """Number of questions with predictions, and of items without."""

    questions: int
    missing: int


def write_predictions(folders: Iterable[Path], file: Path) -> PredictionCounts:
    """Write the answers of runs over A-OKVQA as one JSON object from question ids to
    `direct_answer` and `multiple_choice`, as `prepare_predictions.py` of allenai/aokvqa does.

    Pass at most one run of each form. Failed items and invalid answers have no prediction. Raises
    `SettingError` for runs of other benchmarks, of several methods or of the same form, and
    `StoreError` for a folder without a run.
    """
    predictions: defaultdict[str, dict[str, str]] = defaultdict(dict)
    read: dict[str, Path] = {}
    missing = 0
    for folder in folders:
        form, answers, items = _answers(folder)
        if form in read:
            raise SettingError(
                f"{read[form]} and {folder} both have predictions of the form {form}",
                hint="pass at most one run with answers=choices and one without",
            )
        read[form] = folder
        missing += items - len(answers)
        for id, text in answers.items():
            predictions[id][form] = text
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, orjson.dumps(predictions))
    except OSError as error:
        raise SettingError(
            f"{file} is not writable: {error.strerror}", hint="set another --predictions file"
        ) from error
    return PredictionCounts(len(predictions), missing)


def _answers(folder: Path) -> tuple[str, dict[str, str], int]:
    """Return the form of a run's predictions, the predictions by question id, and the number of
    items."""
    with opened_run(folder) as (connection, settings):
        benchmark = str(settings["benchmark"])
        if not benchmark.startswith("aokvqa:"):
            raise SettingError(
                f"--predictions needs runs over aokvqa, got {benchmark}",
                hint="remove --predictions, or pass another run",
            )
        methods = connection.execute("SELECT DISTINCT method, shots FROM answers").fetchall()
        if len(methods) > 1:
            titles = ", ".join(method_title(*key) for key in methods)
            raise SettingError(
                f"predictions need a run of one method, got {titles} in {folder}",
                hint="evaluate the method with its own --out folder",
            )
        rows = connection.execute(
            "SELECT answer, json_extract(trace, '$.query_id') FROM answers"
        ).fetchall()
        choices = connection.execute("SELECT choices, count(*) FROM items").fetchone()
    answers = {
        str(id): str(answer["text"])
        for answer, id in ((orjson.loads(text), id) for text, id in rows)
        if answer["valid"] and id is not None
    }
    form = BY_CHOICE if orjson.loads(choices[0]) else DIRECT
    return form, answers, int(choices[1])
