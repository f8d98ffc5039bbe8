"""Evaluation in Python: benchmarks, methods, scores with intervals, paired differences.

`evaluate` runs a method over a benchmark of `load_benchmark`. A method is a pipeline
(`pipeline_method`), or any function from a query to an `Outcome` (`Method`).
"""

from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.outcomes import Budget, Method, Outcome, ScoredAnswer, pipeline_method
from bottega.evaluation.runs.paired import paired_differences
from bottega.evaluation.runs.runner import MethodResult, RunState, evaluate

__all__ = [
    "Budget",
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
