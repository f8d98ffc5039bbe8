"""One self-contained page of one trace, without a script. Its policy forbids every request."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.resources import files

from markupsafe import Markup

from bottega.errors import ImageError
from bottega.evaluation.page import house
from bottega.evaluation.report.payload import data_url, thumbnail
from bottega.image import Image
from bottega.recording import StoredNode, StoredTrace

SIDE = 160
LONGEST = 4000
MOST_CHOICES = 40
# Deeper trees are drawn as an indented list: columns would become too narrow to read.
MOST_COLUMNS = 5
ENDED = {
    "rollouts": "after its rollouts",
    "agreement": "early, as the first answers agreed",
    "exhausted": "when every sequence had been tried",
    "budget": "when its budget was spent",
}


def render(trace: StoredTrace, pictures: Mapping[str, Image], *, absent: str) -> str:
    """`pictures` by their sha256; `absent` says why others are not among them."""
    drawn = dict(_thumbnails(pictures))
    environment = house()
    environment.globals.update(cut=_cut, figure=figure, share=_share, picture=drawn.get)
    nodes = [] if trace.tree is None else list(nodes_of(trace.tree.root))
    levels = 0 if trace.tree is None else _levels(trace.tree.root)
    return environment.get_template("explanation.html").render(
        trace=trace,
        tree=trace.tree,
        ended=None if trace.tree is None else ENDED[trace.tree.ended],
        branches=sum(node.answer is not None for node in nodes),
        nodes=len(nodes),
        levels=levels,
        most_choices=MOST_CHOICES,
        deep=levels > MOST_COLUMNS,
        asked=f"{datetime.fromtimestamp(trace.time, UTC):%Y-%m-%d %H:%M} UTC",
        missing=len(pictures_of(trace) - drawn.keys()),
        absent=absent,
        style=Markup(_style()),
    )


def pictures_of(trace: StoredTrace) -> set[str]:
    """The sha256s of all that the page of this trace can show."""
    tree = trace.tree.demonstrations if trace.tree is not None else ()
    of_tree = (sha256 for one in tree for sha256 in one.images)
    shown = (sha256 for one in trace.demonstrations for sha256 in one.images)
    return {*trace.images, *shown, *of_tree}


def nodes_of(node: StoredNode) -> Iterator[StoredNode]:
    yield node
    for child in node.children:
        yield from nodes_of(child)


def figure(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _share(value: float) -> str:
    """Of a bar whose scale is that of rewards, 0 to 1."""
    return f"{0.0 if math.isnan(value) else min(max(value, 0.0), 1.0):.3f}"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} […]"


def _levels(node: StoredNode) -> int:
    return 1 + max(map(_levels, node.children), default=0)


def _thumbnails(pictures: Mapping[str, Image]) -> Iterator[tuple[str, str]]:
    for sha256, image in pictures.items():
        try:
            yield sha256, data_url(thumbnail(image, SIDE))
        except ImageError:  # damaged in the file: drawn as one that is not there
            continue


def _style() -> str:
    here = files("bottega.evaluation")
    return here.joinpath("explanation.css").read_text(encoding="utf-8")
