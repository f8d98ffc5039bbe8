"""Figures of an exported model, measured with `bottega eval`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bottega.evaluation.benchmarks.loading import load_benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.method_comparison import run_methods
from bottega.evaluation.methods.specifications import METHODS
from bottega.evaluation.runs.paired import PairedDifference, ScoredRun, paired_differences
from bottega.evaluation.runs.runner import MethodResult, RunState
from bottega.generation.bundled_models import BundledGenerator
from bottega.recipes import Classifier

SEED = 0


@dataclass(frozen=True)
class Setting:
    """One `bottega eval` command."""

    benchmark: str
    methods: str
    shots: tuple[int, ...] = (1,)
    retrieve: str = "image"
    per_class: int | None = None
    noise: float = 0.0

    @property
    def name(self) -> str:
        options = f", by {self.retrieve}" if self.retrieve != "image" else ""
        options += f", {self.per_class} examples a class" if self.per_class else ""
        return self.benchmark + options + (f", {self.noise:.0%} wrong" if self.noise else "")


CONTROLLED = "zero-shot,random,visual-rag,vote,nearest,knn,swap-image,swap-question"
FULL = "zero-shot,random,balanced,visual-rag,vote,nearest,knn"
APPRENTICE = (
    Setting("digits", FULL, (5, 10, 20)),
    Setting("digits", "visual-rag,vote", (1, 5, 10), per_class=5),
    Setting("glyphs", "zero-shot,in-context,vote"),
    Setting("glyphs:ways=5", "in-context,vote"),
    Setting("glyphs:ways=10", "in-context,vote"),
    Setting("glyphs:alphabets=20", "in-context,vote"),
    Setting("glyphs:style=any", "in-context,vote"),
    Setting("glyphs:shots=5", "in-context,vote"),
    Setting("attributes", CONTROLLED, (8,), "dual"),
    Setting("attributes", "visual-rag,vote", (8,), "image"),
    Setting("attributes", "visual-rag,vote", (8,), "text"),
    Setting("attributes", "visual-rag,vote", (4, 16), "dual"),
    Setting("attributes:examples=100", "visual-rag,vote", (8,), "dual"),
    Setting("attributes:combos=held-out", "visual-rag,vote", (8,), "dual"),
    Setting("attributes", "visual-rag,vote", (8,), "dual", noise=0.2),
    Setting("rules", "zero-shot,random,visual-rag", (2, 4, 8)),
    Setting("rules", "random,visual-rag", (8,), noise=0.2),
    Setting("facts", "zero-shot,random,oracle", (1, 5, 20)),
)
MASTER = (
    Setting("digits:half=second", "zero-shot,visual-rag", (5,)),
    Setting("digits:half=first", "zero-shot"),
    Setting("attributes:words=plain", "zero-shot,visual-rag,vote", (8,), "dual"),
    Setting("attributes:words=plain,combos=held-out", "zero-shot"),
    Setting("attributes", "zero-shot,visual-rag", (8,), "dual"),
    Setting("glyphs", "zero-shot,in-context,vote"),
    Setting("rules", "zero-shot,visual-rag", (8,)),
    Setting("facts", "zero-shot,oracle", (5,)),
)


def figures(folder: Path, settings: tuple[Setting, ...]) -> str:
    """Return two Markdown tables: the rows of every setting, and the differences from the baselines
    without a model."""
    rows, differences = [], []
    for setting in settings:
        runs = _run(folder, setting)
        rows += [_row(setting.name, result) for result, _ in runs]
        compared = [one for one in paired_differences(runs) if METHODS[one.against].vote]
        differences += [_difference(setting.name, one) for one in compared]
    head = [
        "| benchmark | method | shots | n | value | 95 % interval | invalid |",
        "|---" * 7 + "|",
    ]
    against = [
        "| benchmark | shots | n | visual-rag minus | difference | 95 % interval | p |",
        "|---" * 7 + "|",
    ]
    tables = [*head, *rows]
    return "\n".join([*tables, "", *against, *differences] if differences else tables)


def _run(folder: Path, setting: Setting) -> list[ScoredRun]:
    data = load_benchmark(
        setting.benchmark, seed=SEED, per_class=setting.per_class, label_noise=setting.noise
    )
    generator = BundledGenerator(folder, device="cpu", threads=1, turns_only=True)
    config = RunConfig(
        methods=setting.methods.split(","),
        shots=setting.shots,
        retrieve=setting.retrieve,
        seed=SEED,
    )
    runs: list[ScoredRun] = []
    settings = Classifier(generator, labels=(), seed=SEED)
    run_methods(data, settings, config, runs, state=RunState())
    return runs


def _row(name: str, result: MethodResult) -> str:
    value = f"{result.value:.3f} | {result.low:.3f}-{result.high:.3f}"
    return (
        f"| {name} | {result.method} | {result.shots} | {result.n} | {value} | {result.invalid} |"
    )


def _difference(name: str, one: PairedDifference) -> str:
    interval = f"{one.low:+.3f} to {one.high:+.3f}"
    p_value = f"{one.p_value:.3f}" if one.p_value >= 0.001 else "< 0.001"
    return (
        f"| {name} | {one.shots} | {one.n} | {one.against} | {one.value:+.3f} | {interval} |"
        f" {p_value} |"
    )
