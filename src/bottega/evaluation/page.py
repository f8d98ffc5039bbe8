"""Demo page: one self-contained HTML page with examples, results and a curve."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image as Pillow

from bottega.evaluation.charts import by_shots, shot_series
from bottega.evaluation.examples import labels_of
from bottega.evaluation.outcomes import ScoredAnswer
from bottega.evaluation.runner import Result
from bottega.image import Image
from bottega.types import Candidate

THUMBNAIL = 160
SHOWN_ROWS = 8
SHOWN_MISTAKES = 4
CURVES = "Accuracy by number of demonstrations; the table has the values"


def render(
    results: Sequence[Result],
    scored: Sequence[ScoredAnswer],
    shown: Mapping[int, Sequence[Candidate]],
    *,
    title: str,
    facts: Mapping[str, str],
    note: str,
) -> str:
    """Render the page.

    `scored` are the answers of the method whose rows are shown, `shown` its demonstrations by item
    index. `facts` appear under the title, `note` under the results.
    """
    results = [row for row in results if row.value is not None]
    mistakes = [s for s in scored[SHOWN_ROWS:] if not s.correct][:SHOWN_MISTAKES]
    environment = page_environment()
    environment.globals.update(thumbnail=_thumbnail, labels_of=labels_of)
    return environment.get_template("page.html").render(
        title=title,
        digest="",
        style=style_sheet("page.css"),
        facts=facts,
        note=note,
        results=results,
        shown=shown,
        rows=[*scored[:SHOWN_ROWS], *mistakes],
        mistakes=mistakes,
        curves=by_shots(shot_series([(row.method, row) for row in results]), CURVES),
    )


def page_environment() -> Environment:
    """Return the template environment of all pages: escaped, with the common style."""
    environment = Environment(
        loader=PackageLoader("bottega.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.globals["base_style"] = style_sheet("base.css")
    return environment


def style_sheet(name: str) -> Markup:
    """Return a style sheet of the package, by its path."""
    return Markup(files("bottega.evaluation").joinpath(name).read_text(encoding="utf-8"))


def _thumbnail(image: Image) -> str:
    pixels = image.decode(at_least=THUMBNAIL).copy()
    pixels.thumbnail((THUMBNAIL, THUMBNAIL), Pillow.Resampling.LANCZOS)
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG" if max(pixels.size) <= 64 else "JPEG", quality=85)
    kind = "png" if max(pixels.size) <= 64 else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
