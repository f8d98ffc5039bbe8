"""Demonstration page and search explanation: self-contained HTML pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bottega._util.progress import plural
from bottega.errors import ImageError
from bottega.evaluation.examples import labels_of
from bottega.evaluation.outcomes import ScoredAnswer
from bottega.evaluation.report.charts import Chart, by_shots, shot_series
from bottega.evaluation.report.payload import thumbnail
from bottega.evaluation.runs.paired import PairedDifference
from bottega.evaluation.runs.runner import MethodResult
from bottega.image import Image
from bottega.pixels import data_url
from bottega.recording import StoredNode, StoredTrace
from bottega.types import Candidate

SIDE = 160  # of images, in pixels
SHOWN_ROWS = 8
SHOWN_MISTAKES = 4
CURVES = "Accuracy by number of demonstrations; the table has the values"


@dataclass(frozen=True)
class DemoPart:
    """Results on one benchmark. `scored` are the answers of the method whose rows are shown,
    `shown` its demonstrations by item index, `facts` appear under the title and `note` under the
    results."""

    title: str
    results: Sequence[MethodResult]
    differences: Sequence[PairedDifference]
    scored: Sequence[ScoredAnswer]
    shown: Mapping[int, Sequence[Candidate]]
    facts: Mapping[str, str]
    note: str

    @property
    def measured(self) -> list[MethodResult]:
        return [row for row in self.results if row.value is not None]

    @property
    def rows(self) -> list[ScoredAnswer]:
        return list(self.scored[:SHOWN_ROWS])

    @property
    def mistakes(self) -> list[ScoredAnswer]:
        return [s for s in self.scored[SHOWN_ROWS:] if not s.correct][:SHOWN_MISTAKES]

    @property
    def curves(self) -> Chart:
        return by_shots(shot_series([(row.method, row) for row in self.measured]), CURVES)


def render_demo(parts: Sequence[DemoPart], *, title: str, facts: Mapping[str, str]) -> str:
    """Render the page; `facts` appear under its title."""
    template = page_environment().get_template("page.html")
    return template.render(
        title=title,
        digest="",
        style=style_sheet("page.css"),
        facts=facts,
        parts=parts,
        thumbnail=lambda image: data_url(thumbnail(image, SIDE)),
        labels_of=labels_of,
    )


@cache
def page_environment() -> Environment:
    """Return the template environment of all pages: escaped, with the common style."""
    environment = Environment(
        loader=PackageLoader("bottega.evaluation", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["plural"] = partial(plural, spec=",")
    environment.globals["base_style"] = style_sheet("base.css") + style_sheet("chart.css")
    return environment


def style_sheet(name: str) -> Markup:
    """Return a style sheet of the package, by its path."""
    return Markup(files("bottega.evaluation").joinpath(name).read_text(encoding="utf-8"))


LONGEST = 4000
MAX_CHOICES = 40
# Deeper trees become an indented list, because columns would be too narrow.
MAX_COLUMNS = 5
ENDED = {
    "rollouts": "after its rollouts",
    "agreement": "early, because the first answers agreed",
    "exhausted": "when all sequences had been tried",
    "budget": "when its budget was spent",
}


def render_explanation(trace: StoredTrace, images: Mapping[str, Image], *, absent: str) -> str:
    """Render the page with `images` by SHA-256; `absent` explains why others are missing."""
    thumbnails = dict(_thumbnails(images))
    template = page_environment().get_template("explanation.html")
    nodes = [] if trace.tree is None else list(nodes_of(trace.tree.root))
    levels = 0 if trace.tree is None else _levels(trace.tree.root)
    return template.render(
        title=f"Trace {trace.id}",
        digest="",
        trace=trace,
        tree=trace.tree,
        ended=None if trace.tree is None else ENDED[trace.tree.ended],
        branches=sum(node.answer is not None for node in nodes),
        nodes=len(nodes),
        levels=levels,
        most_choices=MAX_CHOICES,
        deep=levels > MAX_COLUMNS,
        time=f"{datetime.fromtimestamp(trace.time, UTC):%Y-%m-%d %H:%M} UTC",
        missing=len(image_hashes(trace) - thumbnails.keys()),
        absent=absent,
        style=style_sheet("explanation.css"),
        cut=_cut,
        figure=format_value,
        share=_share,
        image=thumbnails.get,
    )


def image_hashes(trace: StoredTrace) -> set[str]:
    """Return the SHA-256 hashes of all images on the page of this trace."""
    tree = trace.tree.demonstrations if trace.tree is not None else ()
    of_tree = (sha256 for one in tree for sha256 in one.images)
    shown = (sha256 for one in trace.demonstrations for sha256 in one.images)
    return {*trace.images, *shown, *of_tree}


def nodes_of(node: StoredNode) -> Iterator[StoredNode]:
    yield node
    for child in node.children:
        yield from nodes_of(child)


def format_value(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _share(value: float) -> str:
    """Return the length of a reward bar, from 0 to 1."""
    return f"{0.0 if math.isnan(value) else min(max(value, 0.0), 1.0):.3f}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} […]"


def _levels(node: StoredNode) -> int:
    return 1 + max(map(_levels, node.children), default=0)


def _thumbnails(images: Mapping[str, Image]) -> Iterator[tuple[str, str]]:
    for sha256, image in images.items():
        try:
            yield sha256, data_url(thumbnail(image, SIDE))
        except ImageError:  # damaged in the file: shown as missing
            continue
