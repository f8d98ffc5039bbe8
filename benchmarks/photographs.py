"""Accuracy, calibration and abstention of votes on photographs: python benchmarks/photographs.py
SET ... [--embed photos,photos-both] [--per-class 2,5,20] [--foreign FOLDER] [--cache FOLDER]

Each SET is a folder with train/CLASS/ and test/CLASS/. For every embedder and number of examples a
class (and all), it compares on the same test photographs: the vote of ten neighbours by the plain
cosine, the same under the fitted metric with class means, the same under the metric that
leave-one-out chooses, a logistic regression on the same vectors, and the vote by pixels. Smaller
numbers of examples are sampled with three seeds. Test photographs are only classified: no method
uses them to fit or to choose.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when run as a file

from bottega import Image, load_image_folder
from bottega.evaluation.methods.logistic import LogisticModel, select_c
from bottega.evaluation.metrics.metric import Estimate, accuracy, paired_difference
from bottega.knowledge.embedders.names import open_embedder
from bottega.knowledge.fitted_vote import (
    NEIGHBOURS,
    Similarities,
    VoteRule,
    calibrate,
    leave_one_out,
    plain_leave_one_out,
    sharpened,
    similarities,
)
from bottega.knowledge.loaders.scan import scan_images
from bottega.knowledge.metric import MEAN_COUNT, SHRINKAGE, Classes, FittedMetric, Scatter
from bottega.knowledge.records import unit
from bottega.protocols import Vectors
from bottega.routing.novelty_gate import AVERAGED, FALSE_UNKNOWN, NoveltyGate
from bottega.types import Candidate, Example, Query

SHRINKAGES = (0.5, SHRINKAGE, 0.9)
SEEDS = 3
SURE = 0.8
EMPTY_EXAMPLE = Example(Query(""), "")
BATCH, FOLDS = 64, 5
PLAIN = VoteRule(None, NEIGHBOURS)


@dataclass(frozen=True)
class Photographs:
    """Vectors and classes of a set: `train` with `classes`, `test` with `gold`. Equal numbers are
    equal classes."""

    train: Vectors
    classes: Classes
    test: Vectors
    gold: Classes

    def part(self, each: int | None, seed: int) -> Photographs:
        """Return the set with at most `each` examples a class."""
        if each is None:
            return self
        rng = np.random.default_rng(seed)
        rows = [
            rng.permutation(np.flatnonzero(self.classes == label))[:each] for label in self.labels
        ]
        chosen = np.concatenate(rows)
        return Photographs(self.train[chosen], self.classes[chosen], self.test, self.gold)

    @property
    def labels(self) -> range:
        return range(int(self.classes.max()) + 1)


@dataclass(frozen=True)
class Predictions:
    """Whether a method classifies each test photograph correctly, its confidence in each, and
    `purity`, the mean share of the ten nearest examples with the right label."""

    correct: NDArray[np.bool_]
    confidence: Vectors
    purity: float = np.nan

    @property
    def calibration_error(self) -> float:
        bins = np.minimum((self.confidence * 10).astype(int), 9)
        errors = [
            (inside := bins == one).mean()
            * abs(self.confidence[inside].mean() - self.correct[inside].mean())
            for one in np.unique(bins)
        ]
        return float(sum(errors))

    @property
    def sure(self) -> tuple[float, float]:
        """The share of answers with a confidence of at least `SURE`, and the accuracy of these."""
        chosen = self.confidence >= SURE
        return float(chosen.mean()), float(self.correct[chosen].mean()) if chosen.any() else np.nan


def read(folder: Path, spec: str, cache: Path | None) -> Photographs:
    file = cache and cache / f"{folder.name}-{spec}.npz"
    if file is None or not file.exists():
        arrays: dict[str, Any] = {}
        for part in ("train", "test"):
            found = list(load_image_folder(folder / part, on_error=warn))
            arrays[part] = np.concatenate(list(embedded([one.query for one in found], spec)))
            arrays[f"{part} labels"] = np.array([one.answer for one in found])
        if file is not None:
            np.savez(file, allow_pickle=False, **arrays)
    else:
        arrays = dict(np.load(file))
    names, classes = np.unique(arrays["train labels"], return_inverse=True)
    gold = np.searchsorted(names, arrays["test labels"])
    return Photographs(arrays["train"], classes, arrays["test"], gold)


def warn(problem: Exception) -> None:
    print(problem, file=sys.stderr)


def embedded(queries: Sequence[Query], spec: str) -> Iterator[Vectors]:
    embedder = open_embedder(spec)
    for start in range(0, len(queries), BATCH):
        yield embedder.embed(queries[start : start + BATCH])


def vote(
    found: Similarities, data: Photographs, rule: VoteRule, exponent: float = 1.0
) -> Predictions:
    shares = sharpened(found.shares(data.classes, rule), exponent)
    nearest = np.argsort(-found.examples, axis=1)[:, :NEIGHBOURS]
    purity = float((data.classes[nearest] == data.gold[:, None]).mean())
    return Predictions(shares.argmax(axis=1) == data.gold, shares.max(axis=1), purity)


def chosen_metric(data: Photographs) -> tuple[float | None, NDArray[np.bool_]]:
    """Return the shrinkage that `bottega tune` would choose from the usual one, None for the plain
    cosine, and which examples the others then name correctly."""
    scatter = Scatter.of(data.train, data.classes)
    nothing = np.zeros((len(data.train),) * 2, bool)
    known = np.bincount(data.classes)[data.classes] > 1
    correct: dict[float | None, Vectors] = {}
    correct[None] = plain_leave_one_out(data.train, data.classes, nothing).shares(
        data.classes, PLAIN
    )
    for one in SHRINKAGES:
        rule = VoteRule(one, NEIGHBOURS, MEAN_COUNT)
        correct[one] = leave_one_out(scatter, one, nothing).shares(data.classes, rule)
    right: dict[float | None, Any] = {
        one: (shares.argmax(axis=1) == data.classes) & known for one, shares in correct.items()
    }
    best = max(right, key=lambda one: right[one].sum())
    choice = best if is_clear(right[best], right[SHRINKAGE]) else SHRINKAGE
    return choice, right[choice]


def is_clear(ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> bool:
    """Return whether a gain exceeds one standard error, and two examples."""
    gains = np.subtract(ours, theirs, dtype=float)
    return bool(gains.sum() > max(gains.std() * len(gains) ** 0.5, 2))


def logistic(data: Photographs) -> tuple[Predictions, NDArray[np.bool_]]:
    """Return a logistic regression, and which examples one of five folds names correctly."""
    rows = unit(data.train)
    c = select_c(rows, data.classes, seed=0)
    model = LogisticModel(rows, data.classes, c)
    shares = model.probabilities(unit(data.test))
    named = Predictions(model.classes[shares.argmax(axis=1)] == data.gold, shares.max(axis=1))
    fold_of = np.random.default_rng(0).permutation(len(rows)) % FOLDS
    right = np.zeros(len(rows), bool)
    for fold in range(FOLDS):
        inside = fold_of == fold
        part = LogisticModel(rows[~inside], data.classes[~inside], c)
        chosen = part.probabilities(rows[inside]).argmax(axis=1)
        right[inside] = part.classes[chosen] == data.classes[inside]
    return named, right


def compare(
    data: Photographs, pixels: Photographs
) -> tuple[dict[str, Predictions], float | str | None]:
    """Return the methods on one set, and the choice. `pixels` are the same photographs by
    another embedder."""
    plain = similarities(None, data.test, data.train, data.classes)
    methods = {"cosine": vote(plain, data, PLAIN)}
    choice, right = chosen_metric(data)
    for name, shrinkage in (("fitted", SHRINKAGE), ("chosen", choice)):
        metric = None
        if shrinkage is not None:
            metric = FittedMetric.fit(data.train, data.classes, shrinkage=shrinkage)
        if metric is None or shrinkage is None:
            methods[name] = methods["cosine"]
            continue
        exponent = calibrate(data.train, data.classes, shrinkage).exponent
        found = similarities(metric, data.test, data.train, data.classes)
        methods[name] = vote(found, data, VoteRule(shrinkage, NEIGHBOURS, MEAN_COUNT), exponent)
    by_pixels = similarities(None, pixels.test, pixels.train, pixels.classes)
    logreg, by_logreg = logistic(data)
    methods |= {"logreg": logreg, "pixels": vote(by_pixels, pixels, PLAIN)}
    is_better = is_clear(by_logreg, right)
    methods["tuned"] = logreg if is_better else methods["chosen"]
    return methods, "logreg" if is_better else choice


def foreign_rejected(data: Photographs, foreign: Vectors, share: float) -> tuple[float, float]:
    """Return the shares of foreign and of own test photographs that the photograph model answers by
    unknown, with `--false-unknown share`."""
    rows = unit(data.train)
    gate = NoveltyGate(_nearest(rows @ rows.T, skip=1), share)
    far, near = (_nearest(unit(part) @ rows.T) for part in (foreign, data.test))
    return float(_unknown(gate, far)), float(_unknown(gate, near))


def _nearest(cosines: Vectors, skip: int = 0) -> Vectors:
    ordered: Vectors = -np.sort(-cosines, axis=1)
    return ordered[:, skip : AVERAGED + skip]


def _unknown(gate: NoveltyGate, scores: Vectors) -> float:
    shown = [
        gate.shows([Candidate(EMPTY_EXAMPLE, score) for score in row]) for row in scores.tolist()
    ]
    return 1 - sum(shown) / len(shown)


def text(estimate: Estimate, sign: str = "") -> str:
    return f"{estimate.value:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def run(
    sets: Sequence[Path], specs: Sequence[str], sizes: Sequence[int], options: argparse.Namespace
) -> None:
    means: dict[tuple[str, str], dict[str, list[float]]] = {}
    for folder in sets:
        pixels = read(folder, "pixels", options.cache)
        for spec in specs:
            whole = read(folder, spec, options.cache)
            for each in (None, *sizes):
                runs = [
                    compare(whole.part(each, seed), pixels.part(each, seed))
                    for seed in range(SEEDS if each else 1)
                ]
                report(folder.name, spec, each, runs, len(whole.gold))
                size = "all" if each is None else str(each)
                for name in runs[0][0]:
                    values = [found[name].correct.mean() for found, _ in runs]
                    kept = means.setdefault((spec, size), {}).setdefault(name, [])
                    kept.append(float(np.mean(values)))
            if options.foreign:
                images = map(Image.open, scan_images(options.foreign).images)
                queries = [Query("", (image,)) for image in images]
                foreign = np.concatenate(list(embedded(queries, spec)))
                for share in (FALSE_UNKNOWN, 0.05):
                    far, near = foreign_rejected(whole, foreign, share)
                    print(
                        f"{folder.name} {spec}, --false-unknown {share}: rejects {far:.3f} of"
                        f" foreign, {near:.3f} of own"
                    )
    print("\nmean over the sets")
    for (spec, size), found in means.items():
        line = ", ".join(f"{name} {np.mean(values):.3f}" for name, values in found.items())
        print(f"{spec}, {size} a class: {line}")


def report(
    name: str,
    spec: str,
    each: int | None,
    runs: Sequence[tuple[dict[str, Predictions], float | str | None]],
    n: int,
) -> None:
    """Print the accuracy of each method and paired differences, over all seeds."""

    def correct(method: str) -> list[bool]:
        return [bool(one) for found, _ in runs for one in found[method].correct]

    print(f"\n{name}, {spec}, {each or 'all'} a class, n = {n} x {len(runs)}, chosen", end=" ")
    print(", ".join(str(choice or "cosine") for _, choice in runs))
    for method in runs[0][0]:
        errors = np.mean([found[method].calibration_error for found, _ in runs])
        share, right = np.nanmean([found[method].sure for found, _ in runs], axis=0)
        purity = np.mean([found[method].purity for found, _ in runs])
        print(
            f"  {method:7} {text(accuracy(correct(method)))}  ECE {errors:.3f}"
            f"  >= {SURE}: {share:.2f}, right {right:.3f}  purity {purity:.3f}"
        )
    for ours, theirs in (("fitted", "cosine"), ("fitted", "logreg"), ("chosen", "logreg")):
        difference = paired_difference(correct(ours), correct(theirs))
        print(f"  {ours} - {theirs}: {text(difference, '+')}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sets", nargs="+", type=Path)
    parser.add_argument("--embed", default="photos")
    parser.add_argument("--per-class", default="2,5,20")
    parser.add_argument("--foreign", type=Path)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    sizes = [int(one) for one in options.per_class.split(",") if one]
    run(options.sets, options.embed.split(","), sizes, options)


if __name__ == "__main__":
    main()
