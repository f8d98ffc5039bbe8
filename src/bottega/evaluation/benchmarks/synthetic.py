"""Synthetic tasks with options. They need torch."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bottega.errors import needs_extra
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.benchmarks.source import Source
from bottega.evaluation.methods.controls import Corruption
from bottega.naming import read_options

if TYPE_CHECKING:
    from bottega.tasks.task import TaskData


SYNTHETIC = ("glyphs", "attributes", "rules", "facts", "codes", "contradictions")


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
