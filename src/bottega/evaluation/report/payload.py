"""What the page's own program reads: items, answers and pictures as JSON, each text and each
picture once."""

from __future__ import annotations

import base64
import io
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from PIL import Image as Pillow
from PIL import features

from bottega.errors import BottegaError, ImageError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.examples import labels_of
from bottega.evaluation.outcomes import Method
from bottega.evaluation.report.runs import Demonstration, Item, RecordedAnswer
from bottega.evaluation.report.sections import Row, Section
from bottega.evaluation.run_store import BUSY_SECONDS, RUN_FILE
from bottega.image import Image

SIDE = 112
QUALITY = 72
# Pixels of such pictures are meant to be seen one by one.
TINY = 48
BATCH = 64
WANTED = """
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
    """Adds to the run in `path` those that its items and the method's demonstrations still lack;
    returns how many. Whatever stops it, the next call goes on from there."""
    with RUN_FILE.translated(str(path)), closing(_connected(path)) as connection:
        missing = {sha256 for (sha256,) in connection.execute(WANTED, (method.name, method.shots))}
        found = [image for image in _images(data) if image.sha256 in missing]
        for batch in _made(found, on_error):
            connection.executemany("INSERT OR IGNORE INTO thumbnails VALUES (?, ?)", batch)
            progress(len(batch))
    return len(found)


def thumbnail(image: Image, side: int = SIDE) -> bytes:
    """PNG or WebP (JPEG where Pillow lacks it), whichever is smaller; never enlarged."""
    picture = image.decode(at_least=side).copy()
    picture.thumbnail((side, side), Pillow.Resampling.LANCZOS)
    exact = _encoded(picture, "PNG", optimize=True)
    if max(picture.size) <= TINY:
        return exact
    lossy = _encoded(picture, "WEBP" if features.check("webp") else "JPEG", quality=QUALITY)
    return min(exact, lossy, key=len)


def data_url(data: bytes) -> str:
    """Of what `thumbnail` made."""
    kind = "png" if data.startswith(b"\x89PNG") else "webp" if data[8:12] == b"WEBP" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _images(data: Benchmark) -> list[Image]:
    """Each once."""
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


def _encoded(picture: Pillow.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


# Characters that the page holds of a question, of a reply, of a failure or a demonstration.
LONGEST_QUESTION, LONGEST_REPLY, LONGEST_ASIDE = 4000, 1500, 500
MOST_REPLIES = 8
# Bytes of pictures in one page, before base64. What is shown most often goes in first.
PICTURES = 36_000_000


@dataclass
class _TextTable:
    """Texts by number, in the order in which they came."""

    places: dict[str, int] = field(default_factory=dict)

    def __call__(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))

    def cut(self, text: str, longest: int) -> int:
        return self(text if len(text) <= longest else f"{text[:longest]} […]")


@dataclass(frozen=True)
class Payload:
    """`left_out` pictures would have made the page too large; `absent` ones the runs lack."""

    json: bytes
    left_out: int
    absent: int


def payload(sections: Sequence[Section], *, pictures: int = PICTURES) -> Payload:
    texts = _TextTable()
    kept, left_out, absent = _pictures(sections, pictures)
    places = {sha256: place for place, sha256 in enumerate(kept)}
    document = {
        "sections": [_section(one, texts, places) for one in sections],
        "texts": list(texts.places),
        "pictures": [data_url(data) for data in kept.values()],
    }
    return Payload(_embeddable(orjson.dumps(document)), left_out, absent)


def _embeddable(document: bytes) -> bytes:
    """Inside a script element: no text can end it or begin a comment."""
    return document.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")


def _section(section: Section, texts: _TextTable, places: Mapping[str, int]) -> dict[str, object]:
    return {
        "rows": [row.title for row in section.rows],
        "items": [_item(item, texts, places) for item in section.items],
        "answers": [
            [_answer(row, place, texts, places) for place in range(section.asked)]
            for row in section.rows
        ],
    }


def _item(item: Item, texts: _TextTable, places: Mapping[str, int]) -> list[object]:
    example = item.example
    return [
        texts.cut(example.query.text, LONGEST_QUESTION),
        [places.get(sha256, -1) for sha256 in item.images],
        [texts(choice) for choice in example.query.choices],
        [texts(label) for label in labels_of(example)],
        [texts(f"{name}: {value}") for name, value in example.tags.items()],
    ]


def _answer(row: Row, place: int, texts: _TextTable, places: Mapping[str, int]) -> object:
    """A list for an answer, the error's text for a failure, null for what was not asked."""
    if place in row.failures:
        return texts.cut(row.failures[place], LONGEST_ASIDE)
    given = row.answers.get(place)
    if given is None:
        return None
    one = given.scored
    return [
        texts.cut(", ".join(one.answer.labels) or one.answer.text, LONGEST_REPLY),
        int(one.answer.valid),
        round(one.score, 4),
        _rounded(one.answer.confidence, 3),
        list(_replies(given, texts)),
        [_demonstration(shown, texts, places) for shown in given.shown],
        one.prompt_tokens + one.completion_tokens,
        one.cost_usd,
        _rounded(given.seconds, 2),
        given.trace,
    ]


def _demonstration(
    shown: Demonstration, texts: _TextTable, places: Mapping[str, int]
) -> list[object]:
    pictures = [places.get(sha256, -1) for sha256 in shown.images]
    words = texts.cut(shown.text, LONGEST_ASIDE)
    return [texts(shown.answer), pictures, _rounded(shown.score, 3), words]


def _replies(given: RecordedAnswer, texts: _TextTable) -> Iterator[list[int]]:
    """What the model wrote, and how many samples wrote the same; then the parsed rationale where
    no reply holds it."""
    counts = Counter(given.replies)
    for text, n in counts.most_common(MOST_REPLIES):
        yield [texts.cut(text, LONGEST_REPLY), n]
    rationale = given.scored.answer.rationale
    if rationale and not any(rationale in text for text in counts):
        yield [texts.cut(rationale, LONGEST_REPLY), 0]


def _pictures(sections: Sequence[Section], room: int) -> tuple[dict[str, bytes], int, int]:
    """Those of the items first."""
    known = {
        sha256: data
        for section in sections
        for run in section.runs.values()
        for sha256, data in run.thumbnails.items()
    }
    asked = Counter(
        sha256 for section in sections for item in section.items for sha256 in item.images
    )
    shown = Counter(
        sha256
        for section in sections
        for row in section.rows
        for given in row.answers.values()
        for one in given.shown
        for sha256 in one.images
    )
    wanted = dict.fromkeys((*asked, *(sha256 for sha256, _ in shown.most_common())))
    kept: dict[str, bytes] = {}
    left_out = 0
    for sha256 in wanted:
        data = known.get(sha256)
        if data is None:
            continue
        room -= len(data)
        if room < 0:
            left_out += 1
        else:
            kept[sha256] = data
    return kept, left_out, len(wanted.keys() - known.keys())


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
