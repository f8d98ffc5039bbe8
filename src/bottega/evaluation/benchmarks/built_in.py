"""Benchmarks without files: synthetic tasks, which need torch, and tiles of two photographs of
scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image as Pillow

from bottega.errors import LoadError, needs_extra
from bottega.evaluation.benchmark import Benchmark, labelled_benchmark
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.methods.controls import Corruption
from bottega.image import Image
from bottega.naming import read_options
from bottega.types import IMAGE_QUESTION, Example, Query

if TYPE_CHECKING:
    from bottega.tasks.task import TaskData

SYNTHETIC = ("glyphs", "attributes", "rules", "facts", "codes", "contradictions")

SIDE = 32  # of a tile, in pixels
PER_CLASS = 12  # tiles of a class in the knowledge base, and as many items
LICENCES = (
    "tiles of china.jpg (danielbuechele) and flower.jpg (vultilion), both CC BY 2.0, from"
    " scikit-learn"
)
Box = tuple[int, int, int, int]  # left, top, right, bottom
# Per class: the photograph, areas of the knowledge base, and areas of the items. No areas overlap.
AREAS: dict[str, tuple[str, tuple[Box, ...], tuple[Box, ...]]] = {
    "sky": ("china", ((0, 0, 96, 96), (336, 0, 464, 160)), ((480, 0, 640, 128),)),
    "lake": ("china", ((352, 240, 448, 304),), ((448, 240, 544, 304),)),
    "tower": ("china", ((96, 128, 192, 256),), ((208, 128, 304, 256),)),
    "trees": ("china", ((0, 352, 224, 424),), ((352, 320, 560, 424),)),
    "petals": ("flower", ((192, 128, 304, 320),), ((304, 128, 416, 320),)),
    "leaves": ("flower", ((0, 96, 96, 320),), ((512, 0, 640, 320),)),
}


def synthetic(source: Source) -> Benchmark:
    """Generate a task with options such as `ways=5,shots=5`. Raises `SettingError`."""
    make = _maker(source.kind)
    defaults: dict[str, Any] = {field.name: field.default for field in fields(make)}
    task: TaskData = make(**read_options(source.kind, source.options, defaults)).generate(
        source.seed
    )
    return Benchmark(
        source.spec,
        task.knowledge,
        task.items,
        task.labels,
        episode_of=task.episode_of,
        passage_scores=task.passage_scores,
    )


def task_corruption(spec: str) -> Corruption | None:
    """Return a task's own corruption, where another label alone would be inconsistent."""
    if spec.partition(":")[0] != "rules":
        return None
    with needs_extra("local"):
        from bottega.tasks.rules import misapply_rule

        return misapply_rule


def _maker(kind: str) -> Any:
    with needs_extra("local"):
        from bottega.tasks.attributes import AttributeTask
        from bottega.tasks.codes import CodeTask
        from bottega.tasks.contradictions import ContradictionTask
        from bottega.tasks.glyphs import FactTask, GlyphTask
        from bottega.tasks.rules import RuleTask

        makers = (GlyphTask, AttributeTask, RuleTask, FactTask, CodeTask, ContradictionTask)
        return dict(zip(SYNTHETIC, makers, strict=True))[kind]


def tiles(source: Source) -> Benchmark:
    """Return tiles of 32 x 32 pixels in six classes. Items and examples show different areas of the
    same photographs, so the task is easy."""
    read_options("tiles", source.options, {})
    photographs = _photographs()
    knowledge, items = (
        [
            Example(Query(IMAGE_QUESTION, (tile,)), label, source=f"{name}.jpg")
            for label, (name, *areas) in AREAS.items()
            for tile in _cut(photographs[name], areas[part])
        ]
        for part in (0, 1)
    )
    return labelled_benchmark(source.spec, knowledge, items)


def _photographs() -> dict[str, Pillow.Image]:
    from sklearn.datasets import load_sample_image

    try:
        found = {name: load_sample_image(f"{name}.jpg") for name in ("china", "flower")}
    except (ImportError, OSError, AttributeError) as error:
        raise LoadError(
            "this installation of scikit-learn has no sample photographs",
            hint="run pip install --force-reinstall scikit-learn",
        ) from error
    return {name: Pillow.fromarray(np.asarray(pixels)) for name, pixels in found.items()}


def _cut(photograph: Pillow.Image, areas: tuple[Box, ...]) -> Iterator[Image]:
    """Yield up to PER_CLASS tiles of the areas, in reading order."""
    corners = [
        (x, y)
        for left, top, right, bottom in areas
        for y in range(top, bottom - SIDE + 1, SIDE)
        for x in range(left, right - SIDE + 1, SIDE)
    ]
    for x, y in corners[:PER_CLASS]:
        yield Image.from_pillow(photograph.crop((x, y, x + SIDE, y + SIDE)))
