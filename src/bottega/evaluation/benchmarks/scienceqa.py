"""ScienceQA: school questions, half of them with an image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import orjson

from bottega.errors import LoadError, OnError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.downloads import (
    UNUSABLE,
    image,
    option,
    read_examples,
    required,
    text,
    texts,
)
from bottega.evaluation.benchmarks.source import Source, read_location
from bottega.evaluation.metrics.official_choices import OneStatementParser
from bottega.image import path_text
from bottega.knowledge.loaders.jsonl import Row, parse_rows
from bottega.parsing import ChoiceParser, RationaleParser
from bottega.prompting import SCIENCE_QA, SCIENCE_QA_REASONED
from bottega.protocols import Parser
from bottega.types import Example, Query

TAGS = ("subject", "topic", "category", "grade")
OPTIONS = {"rationales": ("none", "given"), "scoring": ("lenient", "official")}


def scienceqa(source: Source) -> Benchmark:
    """Load ScienceQA: test (4,241 items), with train and validation (16,967) as the knowledge base.

    The source is a folder with the published `problems.json` and `pid_splits.json`, or a table in
    the layout of `derek-thomas/ScienceQA`. Lecture and solution are explanations by people; with
    `rationales=given` they are the rationales of the examples, otherwise examples have none.
    `scoring=official` reads replies like the published code (`OneStatementParser`).
    """
    location, options = read_location(source, OPTIONS)
    folder = Path(location)
    published = (folder / "problems.json").is_file()
    read = _published(folder, source.on_error) if published else _tables(location, source.on_error)
    if options["rationales"] == "none":
        read = {split: [replace(one, rationale=None) for one in read[split]] for split in read}
    parse: Parser = RationaleParser(ChoiceParser(whole_words=True))
    return Benchmark(
        source.spec,
        (*read["train"], *read["val"]),
        tuple(read["test"]),
        parse=OneStatementParser(parse) if options["scoring"] == "official" else parse,
        prompt=SCIENCE_QA,
        rationale_prompt=SCIENCE_QA_REASONED,
        order="nearest-first",
    )


def _tables(location: str, on_error: OnError | None) -> Mapping[str, list[Example]]:
    def make(row: Row, name: str) -> Example:
        return _example(row, location, name, row.get("image"), None)

    splits = {"train": "train", "val": "validation", "test": "test"}
    return {
        ours: read_examples(location, theirs, make, on_error=on_error)
        for ours, theirs in splits.items()
    }


def _published(folder: Path, on_error: OnError | None) -> Mapping[str, list[Example]]:
    problems, splits = _object(folder / "problems.json"), _object(folder / "pid_splits.json")
    return {
        split: _examples(folder, texts(splits, split), problems, split, on_error)
        for split in ("train", "val", "test")
    }


def _examples(
    folder: Path, pids: Iterable[str], problems: Row, split: str, on_error: OnError | None
) -> list[Example]:
    def make(pid: str, name: str) -> Example:
        row = problems.get(pid)
        if not isinstance(row, dict):
            raise LoadError("the problem is not in problems.json", hint=UNUSABLE)
        return _example(row, str(folder), name, _path(folder, split, pid, row), pid)

    rows = ((f"{path_text(folder)}, problem {pid}", pid) for pid in pids)
    return list(parse_rows(rows, make, on_error))


def _path(folder: Path, split: str, pid: str, row: Row) -> str | None:
    """Return the path in the folder: `test/17/image.png` or `images/test/17/image.png`."""
    file = text(row, "image")
    if not file:
        return None
    inside = f"{split}/{pid}/{file}"
    return f"images/{inside}" if (folder / "images").is_dir() else inside


def _example(row: Row, location: str, name: str, pixels: object, pid: str | None) -> Example:
    choices, hint = texts(row, "choices"), text(row, "hint")
    question = required(row, "question")
    worked = (text(row, "lecture"), text(row, "solution"))
    return Example(
        Query(
            f"{question}\nContext: {hint}" if hint else question,
            () if pixels is None else (image(pixels, location, name),),
            choices,
            Path(name).name if pid is None else pid,
        ),
        option(choices, row.get("answer")),
        rationale="\n".join(filter(None, worked)) or None,
        tags={tag: text(row, tag) for tag in TAGS if text(row, tag)},
        source=name,
    )


def _object(file: Path) -> Row:
    try:
        found = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise LoadError(
            f"{path_text(file)} cannot be read: {error}",
            hint="use problems.json and pid_splits.json, as ScienceQA publishes them",
        ) from error
    if not isinstance(found, dict):
        raise LoadError(f"{path_text(file)} is not an object", hint=UNUSABLE)
    return found
