"""Scikit-learn's handwritten digits as a benchmark, whole or one half of them."""

from __future__ import annotations

import random

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, labelled
from bottega.evaluation.benchmarks.knobs import read_knobs
from bottega.evaluation.benchmarks.source import Source
from bottega.knowledge import load_digits

ASKED = 500
# In scikit-learn's order. A model that was trained on the first half never saw the second.
HALVES = {"all": slice(None), "first": slice(898), "second": slice(898, None)}


def digits(source: Source) -> Benchmark:
    """Examples to show and `ASKED` to ask; with `half=first` or `second`, of those rows alone."""
    half = str(read_knobs("digits", source.knobs, {"half": "all"}).get("half", "all"))
    if half not in HALVES:
        raise SettingError(f"half is {half!r}", hint=f"half may be {' or '.join(HALVES)}")
    examples = list(load_digits())[HALVES[half]]
    random.Random(source.seed).shuffle(examples)
    return labelled(source.spec, examples[ASKED:], examples[:ASKED])
