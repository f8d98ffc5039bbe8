"""JSON data of the report's script: items, answers and images, with each text and image once."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from bottega import pixels
from bottega.errors import BottegaError, ImageError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.metrics.metric import labels_of
from bottega.evaluation.outcomes import Method
from bottega.evaluation.report.runs import Demonstration, Item, RecordedAnswer
from bottega.evaluation.report.sections import ReportRow, Section
from bottega.evaluation.runs.run_store import BUSY_SECONDS, RUN_FILE
from bottega.image import Image

SIDE = 112
BATCH = 64
MISSING_IMAGES = """
SELECT image.value FROM items, json_each(items.images) AS image
UNION SELECT image.value
FROM answers, json_each(answers.trace, '$.demonstrations') AS shown,
     json_each(shown.value, '$.images') AS image
WHERE method = ? AND shots = ?
EXCEPT SELECT sha256 FROM thumbnails
"""


def keep_thumbnails(
    path: Path,
    data: Benchmark,
    method: Method,
    *,
    progress: Callable[[int], object] = lambda made: None,
    on_error: Callable[[BottegaError], object] = lambda error: None,
) -> int:
    """Store missing thumbnails of the items and the method's demonstrations; return their number.

    An interrupted call can be repeated.
    """
    with RUN_FILE.connected(path, busy_seconds=BUSY_SECONDS) as connection:
        rows = connection.execute(MISSING_IMAGES, (method.name, method.shots))
        missing = {sha256 for (sha256,) in rows}
        found = [image for image in _images(data) if image.sha256 in missing]
        for batch in _made(found, on_error):
            connection.executemany("INSERT OR IGNORE INTO thumbnails VALUES (?, ?)", batch)
            progress(len(batch))
    return len(found)


def thumbnail(image: Image, side: int = SIDE) -> bytes:
    """Return an image's thumbnail. Raises `ImageError` for a damaged image."""
    return pixels.thumbnail(image.decode(at_least=side), side)


def _images(data: Benchmark) -> list[Image]:
    """Return the distinct images."""
    examples = (*data.items, *data.knowledge)
    return list({i.sha256: i for example in examples for i in example.query.images}.values())


def _made(
    images: Sequence[Image], on_error: Callable[[BottegaError], object]
) -> Iterator[list[tuple[str, bytes]]]:
    def make(image: Image) -> tuple[str, bytes] | ImageError:
        try:
            return image.sha256, thumbnail(image)
        except ImageError as error:
            return error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(images), BATCH):
            made: list[tuple[str, bytes]] = []
            for one in pool.map(make, images[start : start + BATCH]):
                if isinstance(one, ImageError):
                    on_error(one)
                else:
                    made.append(one)
            yield made


# Maximum characters of a question, of a reply, and of a failure or a demonstration.
LONGEST_QUESTION, LONGEST_REPLY, LONGEST_ASIDE = 4000, 1500, 500
MAX_REPLIES = 8
# Maximum bytes of images in one page, before base64; the most frequent come first.
MAX_IMAGE_BYTES = 36_000_000


@dataclass
class _TextTable:
    """Texts by number, in order of first use."""

    positions: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> int:
        return self.positions.setdefault(text, len(self.positions))

    def cut(self, text: str, longest: int) -> int:
        return self(text if len(text) <= longest else f"{text[:longest]} […]")


@dataclass(frozen=True)
class Payload:
    """JSON document; `left_out` images exceed the page size, `absent` ones are not in the runs."""

    json: bytes
    left_out: int
    absent: int


def payload(sections: Sequence[Section], *, images: int = MAX_IMAGE_BYTES) -> Payload:
    texts = _TextTable()
    kept, left_out, absent = _select_images(sections, images)
    positions = {sha256: index for index, sha256 in enumerate(kept)}
    document = {
        "sections": [_section(one, texts, positions) for one in sections],
        "texts": list(texts.positions),
        "images": [pixels.data_url(data) for data in kept.values()],
    }
    return Payload(_embeddable(orjson.dumps(document)), left_out, absent)


def _embeddable(document: bytes) -> bytes:
    """Escape the document: no text can end the script element or begin a comment."""
    return document.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")


def _section(
    section: Section, texts: _TextTable, positions: Mapping[str, int]
) -> dict[str, object]:
    return {
        "rows": [row.title for row in section.rows],
        "runs": [row.run for row in section.rows],
        "items": [_item(item, texts, positions) for item in section.items],
        "answers": [
            [_answer(row, index, texts, positions) for index in range(section.item_count)]
            for row in section.rows
        ],
    }


def _item(item: Item, texts: _TextTable, positions: Mapping[str, int]) -> list[object]:
    example = item.example
    return [
        texts.cut(example.query.text, LONGEST_QUESTION),
        [positions.get(sha256, -1) for sha256 in item.images],
        [texts(choice) for choice in example.query.choices],
        [texts(label) for label in labels_of(example)],
        [texts(f"{name}: {value}") for name, value in example.tags.items()],
    ]


def _answer(row: ReportRow, index: int, texts: _TextTable, positions: Mapping[str, int]) -> object:
    """Return a list for an answer, the error text for a failure, None for a missing item."""
    if index in row.failures:
        return texts.cut(row.failures[index], LONGEST_ASIDE)
    given = row.answers.get(index)
    if given is None:
        return None
    one = given.scored
    return [
        texts.cut(", ".join(one.answer.labels) or one.answer.text, LONGEST_REPLY),
        int(one.answer.valid),
        round(one.score, 4),
        _rounded(one.answer.confidence, 3),
        list(_replies(given, texts)),
        [_demonstration(shown, texts, positions) for shown in given.shown],
        one.prompt_tokens + one.completion_tokens,
        one.cost_usd,
        _rounded(given.seconds, 2),
        given.trace,
    ]


def _demonstration(
    shown: Demonstration, texts: _TextTable, positions: Mapping[str, int]
) -> list[object]:
    images = [positions.get(sha256, -1) for sha256 in shown.images]
    words = texts.cut(shown.text, LONGEST_ASIDE)
    return [texts(shown.answer), images, _rounded(shown.score, 3), words]


def _replies(given: RecordedAnswer, texts: _TextTable) -> Iterator[list[int]]:
    """Yield distinct replies with their counts, then a rationale that no reply contains."""
    counts = Counter(given.replies)
    for text, n in counts.most_common(MAX_REPLIES):
        yield [texts.cut(text, LONGEST_REPLY), n]
    rationale = given.scored.answer.rationale
    if rationale and not any(rationale in text for text in counts):
        yield [texts.cut(rationale, LONGEST_REPLY), 0]


def _select_images(
    sections: Sequence[Section], max_bytes: int
) -> tuple[dict[str, bytes], int, int]:
    """Select the images that fit, those of the items first."""
    stored = {
        sha256: data
        for section in sections
        for run in section.runs.values()
        for sha256, data in run.thumbnails.items()
    }
    query_counts = Counter(
        sha256 for section in sections for item in section.items for sha256 in item.images
    )
    demonstration_counts = Counter(
        sha256
        for section in sections
        for row in section.rows
        for given in row.answers.values()
        for one in given.shown
        for sha256 in one.images
    )
    wanted = dict.fromkeys(
        (*query_counts, *(sha256 for sha256, _ in demonstration_counts.most_common()))
    )
    kept: dict[str, bytes] = {}
    left_out = 0
    for sha256 in wanted:
        data = stored.get(sha256)
        if data is None:
            continue
        max_bytes -= len(data)
        if max_bytes < 0:
            left_out += 1
        else:
            kept[sha256] = data
    return kept, left_out, len(wanted.keys() - stored.keys())


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
