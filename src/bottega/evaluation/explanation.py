"""Explanation page: one self-contained HTML page of one trace, without scripts or requests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from bottega.errors import ImageError
from bottega.evaluation.page import page_environment, style_sheet
from bottega.evaluation.report.payload import data_url, thumbnail
from bottega.image import Image
from bottega.recording import StoredNode, StoredTrace

SIDE = 160
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


def render(trace: StoredTrace, images: Mapping[str, Image], *, absent: str) -> str:
    """Render the page with `images` by SHA-256; `absent` explains why others are missing."""
    thumbnails = dict(_thumbnails(images))
    environment = page_environment()
    environment.globals.update(cut=_cut, figure=format_value, share=_share, image=thumbnails.get)
    nodes = [] if trace.tree is None else list(nodes_of(trace.tree.root))
    levels = 0 if trace.tree is None else _levels(trace.tree.root)
    return environment.get_template("explanation.html").render(
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
