"""One self-contained HTML page that shows what a run did: examples, table, curve."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image as Pillow

from bottega.evaluation.curves import Point, Series, by_shots
from bottega.evaluation.labels import labels_of
from bottega.evaluation.outcomes import Scored
from bottega.evaluation.tally import Result
from bottega.image import Image
from bottega.types import Candidate

THUMBNAIL = 160
SHOWN_ROWS = 8
SHOWN_MISTAKES = 4
CURVES = "Share of right answers by number of demonstrations; the table has the figures"


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
    environment = house()
    environment.globals.update(thumbnail=_thumbnail, labels_of=labels_of)
    return environment.get_template("page.html").render(
        title=title,
        facts=facts,
        note=note,
        results=results,
        shown=shown,
        rows=[*scored[:SHOWN_ROWS], *mistakes],
        mistakes=mistakes,
        curves=by_shots(shot_series([(row.method, row) for row in results]), CURVES),
    )


def house() -> Environment:
    """What our pages are made with: everything escaped, and one style."""
    environment = Environment(
        loader=PackageLoader("bottega.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    style = files("bottega.evaluation").joinpath("house.css").read_text(encoding="utf-8")
    environment.globals["house"] = Markup(style)
    return environment


def shot_series(results: Sequence[tuple[str, Result]]) -> list[Series]:
    """One line a name; what has no shots is flat."""
    named: dict[str, list[Result]] = {}
    for name, result in results:
        named.setdefault(name, []).append(result)
    return [
        Series(name, tuple(map(_point, sorted(rows, key=lambda row: row.shots))), not rows[0].shots)
        for name, rows in named.items()
    ]


def _point(row: Result) -> Point:
    value, low, high = row.value or 0.0, row.low or 0.0, row.high or 0.0
    text = f"{row.method}, {row.shots} shots: {value:.3f} [{low:.3f}, {high:.3f}]"
    return Point(row.shots, value, low, high, text)


def _thumbnail(image: Image) -> str:
    picture = image.decode(at_least=THUMBNAIL).copy()
    picture.thumbnail((THUMBNAIL, THUMBNAIL), Pillow.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG" if max(picture.size) <= 64 else "JPEG", quality=85)
    kind = "png" if max(picture.size) <= 64 else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
