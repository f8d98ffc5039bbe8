"""Leave-one-out accuracy of labelled examples, and the selection of settings by it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from bottega._util.identity import image_hashes
from bottega._util.progress import Progress, plural, showing_progress
from bottega.errors import SettingError
from bottega.evaluation.image_copies import CopySearch, signature_of
from bottega.evaluation.methods.logistic import LabelledVectors, LogisticClassifier, check_labelled
from bottega.evaluation.methods.retrieval import CachingEmbedder
from bottega.evaluation.methods.votes import knn
from bottega.evaluation.metrics.metric import (
    Estimate,
    accuracy,
    labels_of,
    mcnemar,
    paired_difference,
)
from bottega.knowledge import JoinedEmbedder, KnowledgeBase, PixelEmbedder, View
from bottega.knowledge.embedders.composite import uncached
from bottega.knowledge.embedders.names import BUNDLED, PIXELS, joined_parts
from bottega.knowledge.embedders.photo_embedder import default_photos
from bottega.knowledge.fitted_vote import NEIGHBOURS, VoteRule, leave_one_out
from bottega.knowledge.metric import MEAN_COUNT, SHRINKAGE, Scatter
from bottega.knowledge.records import unit
from bottega.naming import has_photos
from bottega.protocols import Embedder, Generator
from bottega.recipes import visual_rag
from bottega.reranking import DemonstrationOrder
from bottega.types import Answer, Example, Query

MAX_POOL = 2000
COMPARED = 200  # examples by which two embedders are compared
FOLDS = 5
CONCURRENCY = 16
CHANCE_GAIN = 2  # items; a gain of at most this number may be due to chance


@dataclass(frozen=True)
class Setting:
    """Name of the embedder, number and order of the demonstrations, and `shrinkage` of the fitted
    metric; None is the plain cosine."""

    embedder: str
    shots: int
    order: DemonstrationOrder = "nearest-last"
    shrinkage: float | None = None


@dataclass(frozen=True)
class Trial:
    """Setting, and whether it answers each item correctly; all trials have the same items."""

    setting: Setting
    correct: tuple[bool, ...]

    @property
    def accuracy(self) -> Estimate:
        return accuracy(self.correct)

    def difference(self, other: Trial) -> Estimate:
        """Return the accuracy minus the other one's, paired."""
        return paired_difference(self.correct, other.correct)


@dataclass(frozen=True)
class Selection:
    """Comparison of settings with the current one, the first trial.

    `best` is the most accurate trial; its accuracy is optimistic, because the same items selected
    it. `nested` is an unbiased estimate: each item is answered by the best setting of the other
    folds. `gain` is the difference of `nested` to the current setting. `p_value` of the gain is
    McNemar's, because the interval alone is too narrow for few items. `changes_at_one_error` is
    whether a gain above one standard error suffices for a change.
    """

    trials: tuple[Trial, ...]
    best: Trial
    nested: Estimate
    gain: Estimate
    p_value: float
    changes_at_one_error: bool = False

    @property
    def current(self) -> Trial:
        return self.trials[0]

    @property
    def is_change(self) -> bool:
        """Whether the best setting replaces the current one: its gain has an interval that excludes
        0 and p < 0.05. With `changes_at_one_error`, a gain of more than one standard error of the
        difference and more than `CHANCE_GAIN` items suffices."""
        if self.best == self.current:
            return False
        if self.changes_at_one_error:
            gains = np.subtract(self.best.correct, self.current.correct, dtype=float)
            return bool(gains.sum() > max(gains.std() * np.sqrt(len(gains)), CHANCE_GAIN))
        return self.gain.low > 0 and self.p_value < 0.05

    @property
    def chosen(self) -> Setting:
        return (self.best if self.is_change else self.current).setting


def select(
    trials: Sequence[Trial], *, seed: int = 0, changes_at_one_error: bool = False
) -> Selection:
    """Compare trials on the same items; the first one is the current setting and wins ties."""
    correct = np.array([trial.correct for trial in trials])
    held_out = _held_out(correct, seed)
    return Selection(
        tuple(trials),
        trials[int(correct.sum(1).argmax())],
        accuracy(held_out),
        paired_difference(held_out, trials[0].correct),
        mcnemar(held_out, trials[0].correct),
        changes_at_one_error,
    )


def _held_out(correct: NDArray[np.bool_], seed: int) -> list[bool]:
    """Return for each item whether the best setting on the items of other folds is correct."""
    count = correct.shape[1]
    fold_of = np.random.default_rng(seed).permutation(count) % FOLDS
    found = np.zeros(count, bool)
    for fold in np.unique(fold_of):
        inside = fold_of == fold
        best = correct[:, ~inside].sum(1).argmax()
        found[inside] = correct[best, inside]
    return [bool(one) for one in found]


@dataclass(frozen=True)
class LabelledSample:
    """Images to classify (`items`), and the examples among which each finds its neighbours.

    `items` is a part of `pool`. An image whose labels have no other image is only in `pool`,
    because the other examples cannot name its label. `skipped` is the number of such images.
    `copies` are examples that were left out because their images are copies of earlier ones, in
    another size or encoding: each copy would give the other one its label."""

    pool: tuple[Example, ...]
    items: tuple[Example, ...]
    labels: tuple[str, ...]
    multi_label: bool
    skipped: int
    copies: tuple[Example, ...] = ()

    @classmethod
    def of(cls, knowledge: KnowledgeBase, size: int, seed: int) -> LabelledSample:
        """Sample at most `size` items, and `MAX_POOL` examples with them.

        Raises `SettingError` for passages, for examples without an image, with fewer than two
        labels, and if no label has two images.
        """
        check_labelled(knowledge, "tune")
        rng = random.Random(seed)
        ids = list(knowledge.ids())
        pool = knowledge.get_many(rng.sample(ids, min(MAX_POOL, len(ids))))
        return cls.of_pool(pool, size, rng, multi_label=knowledge.is_multi_label())

    @classmethod
    def of_pool(
        cls, examples: Sequence[Example], size: int, rng: random.Random, *, multi_label: bool
    ) -> LabelledSample:
        """Sample at most `size` items of labelled examples. Raises `SettingError` as `of` does."""
        _check_images(examples)
        pool, copies = _without_copies(examples)
        images = _images_by_label(pool)
        if len(images) < 2:
            raise SettingError(
                f"tune needs two labels, got {', '.join(map(repr, images)) or 'none'}",
                hint="add examples of another label",
            )
        named = [one for one in pool if any(len(images[name]) > 1 for name in labels_of(one))]
        if not named:
            raise SettingError(
                f"tune needs a label with two images, got one image for each of {len(images)}",
                hint="add more images of the same labels",
            )
        items = tuple(rng.sample(named, min(size, len(named))))
        skipped = len(pool) - len(named)
        return cls(tuple(pool), items, tuple(images), multi_label, skipped, tuple(copies))

    @property
    def queries(self) -> list[Query]:
        """Return the items without ids and answers. A search excludes their own images."""
        return [Query(item.query.text, item.query.images) for item in self.items]

    def correct(self, answers: Sequence[Answer]) -> tuple[bool, ...]:
        """Return which answers name exactly the labels of their item."""
        pairs = zip(answers, self.items, strict=True)
        return tuple(one.valid and {*one.labels} == {*labels_of(item)} for one, item in pairs)


def _without_copies(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Return the examples to keep, and those whose images are all copies of images of earlier
    examples."""
    signatures = {
        image.sha256: signature_of(image) for one in examples for image in one.query.images
    }
    if not signatures:
        return [], []
    search, order = CopySearch(signatures), {sha: index for index, sha in enumerate(signatures)}
    kept: list[Example] = []
    copies: list[Example] = []
    for example in examples:
        hashes = {image.sha256 for image in example.query.images}
        first = min(order[sha] for sha in hashes)
        is_copy = all(
            any(order[found] < first for found in search.copies(sha, signatures[sha]))
            for sha in hashes
        )
        (copies if is_copy else kept).append(example)
    return kept, copies


def _check_images(examples: Sequence[Example]) -> None:
    missing = sum(not example.query.images for example in examples)
    if missing:
        raise SettingError(
            f"tune needs labelled images, got {plural(missing, 'example')} without an image",
            hint="use a knowledge base of labelled images",
        )


def _images_by_label(examples: Sequence[Example]) -> dict[str, set[tuple[str, ...]]]:
    images: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for example in examples:
        for label in labels_of(example):
            images[label].add(image_hashes(example.query))
    return dict(images)


def cached_embedders(
    specs: Sequence[str],
    knowledge: KnowledgeBase,
    spec: str,
    pool: Sequence[Example],
    open_embedder: Callable[[str], Embedder],
) -> dict[str, Embedder]:
    """Return the embedders by name. Each embeds an image once, even as a part of joined embedders.

    `spec` names the embedder of `knowledge`, whose stored vectors of `pool` are reused.
    """
    own = uncached(knowledge.embedder())
    rows = knowledge.vectors([str(example.id) for example in pool])
    name = spec
    if isinstance(own, JoinedEmbedder) and (parts := joined_parts(spec)):
        name, rows, own = parts[0], own.first_part(rows), own.first
    cached = {name: CachingEmbedder(own), PIXELS: CachingEmbedder(PixelEmbedder())}
    cached[name].keep([example.query for example in pool], rows)

    def part(name: str) -> CachingEmbedder:
        if name not in cached:
            cached[name] = CachingEmbedder(open_embedder(name))
        return cached[name]

    def whole(spec: str) -> Embedder:
        joined = joined_parts(spec)
        if joined is None:
            return part(spec)
        return JoinedEmbedder(part(joined[0]), part(PIXELS), joined[1])

    return {spec: whole(spec) for spec in specs}


def logistic_trial(
    sample: LabelledSample, embedder: Embedder, seed: int, progress: Progress = False
) -> tuple[bool, ...]:
    """Return which items a logistic regression names correctly. It is fitted to the examples of the
    pool without the items of the same fold.

    Copies of an image are in one fold. `progress` receives the number of items named since its last
    call.
    """
    different = dict.fromkeys(item.query.images for item in sample.items)
    fold_of = {images: n % FOLDS for n, images in enumerate(different)}
    with KnowledgeBase.open(":memory:", embedder) as base:
        base.add(sample.pool)
        data, vectors = LabelledVectors.of(base), unit(embedder.embed(sample.queries))
        folds = {str(one.id): fold_of.get(one.query.images) for one in base}
    answers: list[Answer] = [Answer("", valid=False)] * len(sample.items)
    with showing_progress("Logistic regression", len(sample.items), progress) as step:
        for fold in sorted(set(fold_of.values())):
            rest = data.without({id for id, one in folds.items() if one == fold})
            model = LogisticClassifier(rest, multi_label=sample.multi_label, seed=seed)
            for number, item in enumerate(sample.items):
                if fold_of[item.query.images] == fold:
                    answers[number] = model(vectors[number])
                    step(1)
    return sample.correct(answers)


def vote_trials(
    sample: LabelledSample,
    embedders: Mapping[str, Embedder],
    shots: Sequence[int],
    progress: Progress = False,
) -> dict[tuple[str, int], tuple[bool, ...]]:
    """Return which items `knn` names correctly, by embedder and number of neighbours.

    `progress` receives the number of examples embedded since its last call.
    """
    views = {f"{number}": View(embedder) for number, embedder in enumerate(embedders.values())}
    found: dict[tuple[str, int], tuple[bool, ...]] = {}
    with KnowledgeBase.open(":memory:", views) as base:
        base.add(sample.pool, progress=progress)
        for name, view in zip(embedders, views, strict=True):
            nearest = base.search_many(sample.queries, max(shots), by=view)
            for count in shots:
                votes = [knn(one[:count], multi_label=sample.multi_label) for one in nearest]
                found[name, count] = sample.correct(votes)
    return found


def fits_metric(sample: LabelledSample) -> bool:
    """Return whether a metric can be fitted: each example has one label, and all ask the same
    question."""
    return not sample.multi_label and len({one.query.text for one in sample.pool}) == 1


def fitted_trials(
    sample: LabelledSample, embedder: Embedder, shots: Sequence[int], shrinkages: Sequence[float]
) -> dict[tuple[float, int], tuple[bool, ...]]:
    """Return which items the vote of neighbours and class means names correctly under the fitted
    metric, by shrinkage and number of neighbours. Each item is left out of the metric that it is
    classified by. The result is empty if no metric can be fitted."""
    labels = [labels_of(one) for one in sample.pool]
    number = {one: index for index, one in enumerate(dict.fromkeys(labels))}
    classes = np.array([number[one] for one in labels])
    vectors = embedder.embed([one.query for one in sample.pool])
    if (scatter := Scatter.of(vectors, classes)).has_no_scatter:
        return {}
    images = [image_hashes(one.query) for one in sample.pool]
    different = {one: index for index, one in enumerate(dict.fromkeys(images))}
    copies = np.array([different[one] for one in images])
    position = {id(one): index for index, one in enumerate(sample.pool)}
    rows = [position[id(item)] for item in sample.items]
    found: dict[tuple[float, int], tuple[bool, ...]] = {}
    for shrinkage in shrinkages:
        near = leave_one_out(scatter, shrinkage, copies[:, None] == copies)
        for count in shots:
            named = near.shares(classes, VoteRule(shrinkage, count, MEAN_COUNT)).argmax(axis=1)
            correct = (named == classes)[rows]
            found[shrinkage, count] = tuple(bool(one) for one in correct)
    return found


def embedder_by_evidence(
    examples: Sequence[Example], open_embedder: Callable[[str], Embedder], *, seed: int = 0
) -> tuple[str, str] | None:
    """Compare the default embedder of photographs with `bundled` by leave-one-out. Return its name
    and the reason for it if it is clearly more accurate, else None.

    At most `COMPARED` examples are classified, each by the vote of the others. None is also
    returned if one of the embedders is not installed, or no label has two images.
    """
    if not has_photos() or find_spec("torch") is None:
        return None
    rng = random.Random(seed)
    some = rng.sample(examples, min(COMPARED, len(examples)))
    multi_label = any(len(labels_of(one)) > 1 for one in some)
    try:
        sample = LabelledSample.of_pool(some, COMPARED, rng, multi_label=multi_label)
    except SettingError:
        return None
    names = BUNDLED, default_photos()
    embedders = {name: CachingEmbedder(open_embedder(name)) for name in names}
    found = vote_trials(sample, embedders, [NEIGHBOURS])
    trials = [Trial(Setting(name, NEIGHBOURS), found[name, NEIGHBOURS]) for name in names]
    if fits_metric(sample):
        fitted = fitted_trials(sample, embedders[names[1]], [NEIGHBOURS], [SHRINKAGE])
        trials += [Trial(Setting(names[1], NEIGHBOURS), one) for one in fitted.values()]
    chosen = select(trials, seed=seed, changes_at_one_error=True)
    if not chosen.is_change:
        return None
    least, most = (f"{one.accuracy.value:.2f}" for one in (chosen.current, chosen.best))
    count = plural(len(sample.items), "labelled image")
    return names[1], f"leave-one-out accuracy {most} on {count}, {least} with {BUNDLED}"


async def model_trials(
    sample: LabelledSample,
    embedder: Embedder,
    generator: Generator,
    settings: Sequence[Setting],
    progress: Progress = False,
) -> list[tuple[bool, ...]]:
    """Return which items the model names correctly, for each number and order of demonstrations,
    by the plain cosine.

    `progress` receives the number of items answered since its last call. The caller closes the
    model.
    """
    found = []
    with KnowledgeBase.open(":memory:", embedder) as base:
        base.add(sample.pool)
        for setting in settings:
            pipeline = visual_rag(
                base,
                generator,
                labels=sample.labels,
                shots=setting.shots,
                order=setting.order,
                multi_label=sample.multi_label,
            )
            answers = await pipeline.answer_batch(
                sample.queries, concurrency=CONCURRENCY, progress=progress
            )
            found.append(sample.correct(answers))
    return found
