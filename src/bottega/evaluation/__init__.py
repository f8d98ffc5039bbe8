"""Evaluation in Python: benchmarks, methods, scores with intervals, paired differences.

`evaluate` runs a method over a benchmark of `load_benchmark`. A method is a pipeline
(`pipeline_method`), or any function from a query to an `Outcome` (`Method`). `MethodComparison` in
`method_comparison` runs what `bottega eval` runs, `StreamRun` in `streams.stream_run` what `bottega
stream` runs.
"""

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
