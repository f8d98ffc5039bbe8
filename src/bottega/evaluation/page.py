"""One self-contained HTML page that shows what a run did: examples, table, curve."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from PIL import Image as Pillow

from bottega.evaluation.labels import labels_of
from bottega.evaluation.outcomes import Scored
from bottega.evaluation.tally import Result
from bottega.image import Image
from bottega.types import Candidate

THUMBNAIL = 160
SHOWN_ROWS = 8
SHOWN_MISTAKES = 4
# Methods stand a little beside each other, so that no interval hides another.
ASIDE = 5
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 330, 58, 58, 14, 20


@dataclass(frozen=True)
class Mark:
    """One point of the curve with its interval, in SVG units."""

    x: float
    y: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class Line:
    method: str
    marks: tuple[Mark, ...]

    @property
    def points(self) -> str:
        return " ".join(f"{mark.x:.1f},{mark.y:.1f}" for mark in self.marks)


def render(
    results: Sequence[Result],
    scored: Sequence[Scored],
    shown: Mapping[int, Sequence[Candidate]],
    *,
    title: str,
    facts: Mapping[str, str],
    note: str,
) -> str:
    """`scored` are the items of the method whose rows are shown, `shown` its demonstrations by the
    item's place; `facts` go under the title and `note` under the figures."""
    results = [row for row in results if row.value is not None]
    mistakes = [s for s in scored[SHOWN_ROWS:] if not s.correct][:SHOWN_MISTAKES]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.globals.update(thumbnail=_thumbnail, labels_of=labels_of)
    template = files("bottega.evaluation").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=title,
        facts=facts,
        note=note,
        results=results,
        shown=shown,
        rows=[*scored[:SHOWN_ROWS], *mistakes],
        mistakes=mistakes,
        lines=_lines(results),
        ticks=_shot_ticks(results),
        grid=[(share, _y(share)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)],
        frame={"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT},
    )


def _lines(results: Sequence[Result]) -> list[Line]:
    """One line a method; a method without shots is drawn across the whole width."""
    places = dict(_shot_ticks(results))
    lines: list[Line] = []
    for place, method in enumerate(dict.fromkeys(result.method for result in results)):
        rows = sorted((r for r in results if r.method == method), key=lambda r: r.shots)
        if rows[0].shots == 0:
            marks = [_mark(rows[0], float(x)) for x in (LEFT, WIDTH - RIGHT)]
        else:
            marks = [_mark(row, places[row.shots] + ASIDE * (place - 2)) for row in rows]
        lines.append(Line(method, tuple(marks)))
    return lines


def _mark(row: Result, x: float) -> Mark:
    value, low, high = row.value or 0.0, row.low or 0.0, row.high or 0.0
    text = f"{row.method}, {row.shots} shots: {value:.3f} [{low:.3f}, {high:.3f}]"
    return Mark(x, _y(value), _y(low), _y(high), text)


def _shot_ticks(results: Sequence[Result]) -> list[tuple[int, float]]:
    """Numbers of shots at equal distances: 1, 5, 10, 20 would crowd on a linear axis."""
    shots = sorted({row.shots for row in results if row.shots})
    step = (WIDTH - RIGHT - LEFT) / max(len(shots), 1)
    return [(k, LEFT + step * (i + 0.5)) for i, k in enumerate(shots)]


def _y(share: float) -> float:
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def _thumbnail(image: Image) -> str:
    picture = image.decode(at_least=THUMBNAIL).copy()
    picture.thumbnail((THUMBNAIL, THUMBNAIL), Pillow.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG" if max(picture.size) <= 64 else "JPEG", quality=85)
    kind = "png" if max(picture.size) <= 64 else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
