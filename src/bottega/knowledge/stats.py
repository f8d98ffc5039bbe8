"""Size and settings of a knowledge base, and their display in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bottega import notebook
from bottega.errors import BottegaError
from bottega.knowledge.stores import RowStore

MAX_DISPLAYED = 20_000  # examples of a knowledge base whose labels a notebook counts


@dataclass(frozen=True)
class Stats:
    """Size and settings of the knowledge base at `path`.

    `examples`, different `images`, different `labels` and `pinned` examples are counted. `metric`
    compares vectors; `format_version` is the version of the stored format. `bytes` is the size of
    the whole file; all other numbers are of this namespace. `views` maps names to fingerprints;
    `embedder` and `dimension` describe the first view; they are None without a view.
    """

    path: str
    namespace: str
    examples: int
    images: int
    labels: int
    pinned: int
    bytes: int
    embedder: str | None
    dimension: int | None
    views: Mapping[str, str]
    metric: str
    format_version: int


def stats_of(rows: RowStore, path: str, metric: str) -> Stats:
    size = rows.footprint()
    views = rows.views()
    first = next(iter(views.values()), None)
    return Stats(
        path=path,
        namespace=rows.namespace,
        examples=size.examples,
        images=size.images,
        labels=len(rows.labels()),
        pinned=size.pinned,
        bytes=size.bytes,
        embedder=None if first is None else first.fingerprint,
        dimension=None if first is None else first.dimension,
        views={name: view.fingerprint for name, view in views.items()},
        metric=metric,
        format_version=size.format_version,
    )


def render_stats(rows: RowStore, path: str, metric: str) -> str:
    """Return HTML with the sizes and, for the most frequent labels, an example each."""
    try:
        stats = stats_of(rows, path, metric)
        ids = rows.labels() if stats.examples <= MAX_DISPLAYED else {}
        frequent = sorted(ids, key=lambda label: -len(ids[label]))[: notebook.MAX_IMAGES]
        found = rows.get([ids[label][0] for label in frequent])
    except BottegaError as error:
        return notebook.render("problem", error)
    shown = [
        (label, len(ids[label]), found[ids[label][0]])
        for label in frequent
        if ids[label][0] in found  # another process may have deleted it
    ]
    return notebook.render("knowledge_base", stats, shown)
