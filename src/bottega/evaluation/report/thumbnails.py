"""Small pictures of what was asked and shown, kept with a run: a report needs nothing else."""

from __future__ import annotations

import base64
import io
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from PIL import Image as Pillow
from PIL import features

from bottega.errors import BottegaError, ImageError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.journal import BUSY_SECONDS, JOURNAL
from bottega.evaluation.outcomes import Method
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
    on_bad: Callable[[BottegaError], object] = lambda error: None,
) -> int:
    """Adds to the run in `path` those that its items and the method's demonstrations still lack;
    returns how many. Whatever stops it, the next call goes on from there."""
    with JOURNAL.translated(str(path)), closing(_connected(path)) as connection:
        missing = {sha256 for (sha256,) in connection.execute(WANTED, (method.name, method.shots))}
        found = [image for image in _images(data) if image.sha256 in missing]
        for batch in _made(found, on_bad):
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
    images: Sequence[Image], on_bad: Callable[[BottegaError], object]
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
                    on_bad(one)
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
