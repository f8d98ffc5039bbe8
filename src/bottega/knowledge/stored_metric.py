"""The metric that was chosen for a knowledge base, stored beside its examples."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from bottega.errors import SettingError, StoreError
from bottega.knowledge.fitted_search import FittedSearch
from bottega.knowledge.fitted_vote import EXPONENTS, VoteCalibration, calibrate
from bottega.knowledge.metric import DIMENSION, SHRINKAGE, Classes, FittedMetric
from bottega.knowledge.records import StoredView
from bottega.knowledge.search import stacked
from bottega.knowledge.stores import RowStore, VectorSearch, labels_by_id, note_key
from bottega.protocols import Vectors

NOTE = "metric"  # key of the note of the default namespace
# The metric is fitted again after a new class, or when the examples have grown by this share.
GROWTH = 0.25


@dataclass(frozen=True)
class StoredMetric:
    """Metric for the vectors of the embedder with this fingerprint, chosen when the namespace had
    this number of labelled `examples` and these `labels` (the digest of their set). `shrinkage` is
    None if the plain cosine was chosen; `metric` is also None if too few examples shared their
    label. `calibration` makes the shares of its vote probabilities."""

    embedder: str
    shrinkage: float | None
    metric: FittedMetric | None
    examples: int
    labels: str
    calibration: VoteCalibration = field(default_factory=VoteCalibration)

    def is_outdated(self, labels: Sequence[tuple[str, ...]]) -> bool:
        """Return whether a fitted metric was chosen, and these labels of all examples require
        fitting it again: another set of labels, or a quarter more or fewer examples."""
        growth = len(labels) / max(self.examples, 1)
        is_near = 1 - GROWTH <= growth <= 1 + GROWTH
        changed = not is_near or label_digest(labels) != self.labels
        return changed and self.shrinkage is not None

    def store(self, rows: RowStore) -> None:
        fitted = self.metric and {
            "centre": packed(self.metric.centre),
            "projection": packed(self.metric.projection),
        }
        document = {**vars(self), "metric": fitted, "calibration": vars(self.calibration)}
        rows.set_note(note_key(NOTE, rows.namespace), orjson.dumps(document).decode())


def stored_metric(rows: RowStore) -> StoredMetric | None:
    """Return the metric stored for the namespace, None without any. Raises `StoreError` if it is
    damaged."""
    note = rows.note(note_key(NOTE, rows.namespace))
    if note is None:
        return None
    try:
        stored = orjson.loads(note)
        fitted, shrinkage = stored["metric"], stored["shrinkage"]
        return StoredMetric(
            str(stored["embedder"]),
            None if shrinkage is None else float(shrinkage),
            None if fitted is None else _fitted(**fitted, shrinkage=float(shrinkage)),
            int(stored["examples"]),
            str(stored["labels"]),
            _calibration(**stored["calibration"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"the stored metric of {rows.name} is damaged, got {note!r:.80}",
            hint=f"run bottega tune {rows.name}",
        ) from error


def metric_in_use(rows: RowStore) -> StoredMetric | None:
    """Return the fitted metric if it belongs to the embedder of a view; None for the plain cosine,
    and if the stored metric is damaged."""
    try:
        stored = stored_metric(rows)
    except StoreError:
        return None
    if stored is None or stored.metric is None:
        return None
    used = any(one.fingerprint == stored.embedder for one in rows.views().values())
    return stored if used else None


def label_digest(labels: Iterable[tuple[str, ...]]) -> str:
    """Return the digest of the set of labels."""
    return sha256(orjson.dumps(sorted(set(labels)))).hexdigest()


def with_stored_metric(rows: RowStore, plain: VectorSearch, *, required: bool) -> VectorSearch:
    """Return a search under the stored metric, or `plain` if there is none for the first view of
    `plain`. Raises `SettingError` if there is none and it is `required`."""
    stored = stored_metric(rows)
    view = rows.views().get(next(iter(plain.views()))) if stored else None
    is_own = stored is not None and view is not None and view.fingerprint == stored.embedder
    if stored is None or stored.metric is None or view is None or not is_own:
        if required:
            raise SettingError(
                f"{rows.name} has no fitted metric",
                hint="open it with metric='cosine' and call fit_metric()",
            )
        return plain
    if len(stored.metric.centre) != view.dimension:
        raise StoreError(
            f"the stored metric of {rows.name} is damaged: it is for vectors of"
            f" {len(stored.metric.centre)} numbers, not {view.dimension}",
            hint=f"run bottega tune {rows.name}",
        )
    return FittedSearch(rows, plain, stored.metric, view.number, stored.calibration.exponent)


def fitted_to(
    rows: RowStore,
    view: StoredView,
    shrinkage: float | None = SHRINKAGE,
    without: Collection[str] = (),
) -> StoredMetric:
    """Return the metric fitted to the labelled examples of the namespace, except the ids in
    `without`. The plain cosine is returned if `shrinkage` is None, if there are fewer than two
    labels, if fewer than half of the examples share their label with another one, or if no class
    has two different vectors."""
    excluded = set(without)
    labelled = {id: one for id, one in labels_by_id(rows).items() if id not in excluded}
    counts = Counter(labelled.values())
    digest = label_digest(labelled.values())
    chosen = StoredMetric(view.fingerprint, shrinkage, None, len(labelled), digest)
    repeated = sum(count for count in counts.values() if count > 1)
    if shrinkage is None or len(counts) < 2 or 2 * repeated < len(labelled):
        return chosen
    number = {labels: index for index, labels in enumerate(counts)}
    classes: Classes = np.array([number[labels] for labels in labelled.values()])
    keys = rows.keys(labelled)
    stored = rows.vectors(keys.values(), view.number)
    found = stacked([(id, stored.get(keys.get(id, 0))) for id in labelled], view)
    metric = FittedMetric.fit(found, classes, shrinkage=shrinkage)
    if metric is None:
        return chosen
    return replace(chosen, metric=metric, calibration=calibrate(found, classes, shrinkage))


def packed(numbers: NDArray[np.floating[Any]]) -> str:
    """Return numbers as text, at the precision of float32."""
    return b64encode(numbers.astype("<f4").tobytes()).decode()


def unpacked(text: str) -> Vectors:
    """Return the numbers of `packed`, flat. Raises `ValueError` unless all are finite."""
    numbers = np.frombuffer(b64decode(text, validate=True), "<f4").astype(np.float32)
    if not (len(numbers) and np.isfinite(numbers).all()):
        raise ValueError("the numbers must be finite")
    return numbers


def _calibration(exponent: float, by_confidence: Sequence[Sequence[float]]) -> VoteCalibration:
    if not 0 < exponent <= EXPONENTS[-1]:
        raise ValueError(f"the exponent must be between 0 and {EXPONENTS[-1]}")
    counts = tuple((least, int(count), int(right)) for least, count, right in by_confidence)
    return VoteCalibration(float(exponent), counts)


def _fitted(centre: str, projection: str, shrinkage: float) -> FittedMetric:
    mean, flat = map(unpacked, (centre, projection))
    matrix = flat.reshape(len(mean), -1)
    if matrix.shape[1] > DIMENSION or not matrix.any(axis=0).all():
        raise ValueError(f"the projection must have up to {DIMENSION} columns that are not zero")
    return FittedMetric(mean, matrix, shrinkage)
