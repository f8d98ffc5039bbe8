"""Evaluation in Python: benchmarks, methods, scores with intervals, paired differences.

`evaluate` runs a method over a benchmark of `load_benchmark`. A method is a pipeline
(`pipeline_method`), or any function from a query to an `Outcome` (`Method`). `MethodComparison` in
`method_comparison` runs what `bottega eval` runs, `StreamRun` in `streams.stream_run` what `bottega
stream` runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bottega._util.progress import Display
    from bottega.evaluation.benchmarks.loading import load_benchmark
    from bottega.evaluation.config import RunConfig
    from bottega.evaluation.outcomes import Budget, Method, Outcome, ScoredAnswer, pipeline_method
    from bottega.evaluation.runs.paired import paired_differences
    from bottega.evaluation.runs.runner import MethodResult, RunState, evaluate

__all__ = [
    "Budget",
    "Display",
    "Method",
    "MethodResult",
    "Outcome",
    "RunConfig",
    "RunState",
    "ScoredAnswer",
    "evaluate",
    "load_benchmark",
    "paired_differences",
    "pipeline_method",
]

# `bottega classify` uses one small module of this package. The module of each public name is
# imported when the name is used first.
_MODULES = {
    "_util.progress": ("Display",),
    "evaluation.benchmarks.loading": ("load_benchmark",),
    "evaluation.config": ("RunConfig",),
    "evaluation.outcomes": ("Budget", "Method", "Outcome", "ScoredAnswer", "pipeline_method"),
    "evaluation.runs.paired": ("paired_differences",),
    "evaluation.runs.runner": ("MethodResult", "RunState", "evaluate"),
}

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept every name

    def __getattr__(name: str) -> object:
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"bottega.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
