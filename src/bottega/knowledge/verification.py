"""Verification and repair of a knowledge base file: images, examples, vectors and index files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from bottega._util.progress import Stages, plural
from bottega.errors import BottegaError, StoreError
from bottega.knowledge.batch import embed_again, reindex
from bottega.knowledge.records import StoredView, View, check_dimensions, find_damage
from bottega.knowledge.stores import (
    ADD_AGAIN,
    KEY_PAGE,
    Finding,
    Repair,
    RowStore,
    counted_pages,
    paged_keys,
)

log = logging.getLogger(__name__)

EMBED_BATCH = 64
SAMPLE = 4
MAX_NAMED = 3
# Relative to the vector's length; a cosine of 0.999 between unit vectors. Another batch size or
# machine does not reproduce the last bits.
TOLERANCE = 0.045


def find_damaged_examples(rows: RowStore, stages: Stages) -> Iterator[Finding]:
    """Yield examples whose images or content do not match their hashes."""
    for keys in counted_pages(rows, "checking examples", stages):
        for example in rows.by_keys(keys).values():
            if (damage := find_damage(example)) is not None:
                yield f"example {example.id}: {damage}; delete it {ADD_AGAIN}", None


def find_missing_views(
    rows: RowStore, views: Mapping[str, View], stages: Stages
) -> Iterator[Finding]:
    """Yield a problem if there are examples but no complete view. Other checks would not notice."""
    if rows.views() or not rows.all_keys(0, 1):
        return

    def fix() -> None:
        for name, view in views.items():
            with stages("embedding", rows.sizes()[0]) as step:
                reindex(rows, name, view, batch_size=EMBED_BATCH, progress=step)

    if views:
        yield "the examples have no vectors at all", fix
    else:
        yield "the examples have no vectors at all; repaired only with the embedder", None


def find_damaged_vectors(
    rows: RowStore, views: Mapping[str, View], stages: Stages
) -> Iterator[Finding]:
    """Yield vectors that are missing or damaged: wrong size, wrong checksum, or not finite."""
    for stored in rows.views().values():
        wrong = [
            key
            for keys in counted_pages(rows, "checking vectors", stages)
            for key, vector in rows.checked_vectors(keys, stored).items()
            if vector is None
        ]
        if not wrong:
            continue
        what = f"{plural(len(wrong), 'vector')} {stored.name!r} missing or damaged"
        what += _example_names(rows, wrong)
        view = views.get(stored.name)
        if view is not None:
            yield what, _embedding_repair(rows, wrong, stored, view, stages)
        else:
            yield f"{what}; repaired only with the embedder", None


def find_mismatched_vectors(
    rows: RowStore, views: Mapping[str, View], stages: Stages
) -> Iterator[Finding]:
    """Yield valid vectors that differ from the embedder's output."""
    for name, stored in rows.views().items():
        view = views.get(name)
        if view is None:
            yield f"vectors {name!r} cannot be compared without their embedder", None
            continue
        try:
            _check_width(stored, view)
        except StoreError as error:
            yield str(error), None
            continue
        mismatched: list[int] = []
        failed: list[BottegaError] = []
        for keys in counted_pages(rows, "embedding again", stages, EMBED_BATCH):
            mismatched += _mismatched_keys(rows, keys, stored, view, failed)
        if mismatched:
            what = f"{plural(len(mismatched), 'vector')} {name!r} unlike those of the embedder"
            yield (
                what + _example_names(rows, mismatched),
                _embedding_repair(rows, mismatched, stored, view, stages),
            )
        if failed:
            yield f"{plural(len(failed), 'vector')} {name!r} not comparable: {failed[0]}", None


def _example_names(rows: RowStore, keys: Sequence[int]) -> str:
    """Return the ids of the first examples, for messages."""
    more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
    return f": of {', '.join(rows.ids_of(keys[:MAX_NAMED]))}{more}"


def makes_vectors(rows: RowStore, name: str, view: View) -> bool:
    """Return whether the view reproduces any vector among the first examples.

    The file does not record a view's `to_query`, and a different view may have the same name.
    """
    keys = next(paged_keys(rows, SAMPLE), [])
    return not keys or len(_mismatched_keys(rows, keys, rows.views()[name], view, [])) < len(keys)


def _mismatched_keys(
    rows: RowStore,
    keys: Sequence[int],
    stored: StoredView,
    view: View,
    failed: list[BottegaError],
) -> list[int]:
    """Return the keys whose vectors differ from the embedder's output. Errors go to `failed`, and
    the rest of the batch is compared."""
    try:
        examples = {
            # Another check reports damaged examples, whose vectors would be wrong too.
            key: example
            for key, example in rows.by_keys(keys).items()
            if find_damage(example) is None
        }
        made = dict(zip(examples, view.vectors(list(examples.values())), strict=True))
    except BottegaError as error:
        if len(keys) == 1:
            failed.append(error)
            return []
        return [key for one in keys for key in _mismatched_keys(rows, [one], stored, view, failed)]
    stored_vectors = rows.checked_vectors(list(made), stored)
    return [
        key
        for key, vector in stored_vectors.items()
        if vector is not None
        and np.linalg.norm(vector - made[key]) > TOLERANCE * np.linalg.norm(made[key])
    ]


def _embedding_repair(
    rows: RowStore, keys: list[int], stored: StoredView, view: View, stages: Stages
) -> Repair:
    def fix() -> None:
        _check_width(stored, view)
        with stages("repairing vectors", len(keys)) as step:
            for start in range(0, len(keys), KEY_PAGE):
                page = keys[start : start + KEY_PAGE]
                embed_again(rows, page, stored.number, view)
                step(len(page))

    return fix


def _check_width(stored: StoredView, view: View) -> None:
    """Raise `StoreError` if the dimension differs: an embedder with the same fingerprint but other
    vectors would damage valid rows."""
    check_dimensions({stored.name: stored}, {stored.name: view.embed.dimension})


@dataclass(frozen=True)
class Problem:
    """Problem in a file. `repaired` is possible for derived data only, not for the bytes of an
    image."""

    what: str
    repaired: bool


@dataclass(frozen=True)
class VerificationReport:
    """Numbers of parts checked in all namespaces, and the problems found."""

    examples: int
    images: int
    vectors: int
    snapshots: int
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        return all(problem.repaired for problem in self.problems)


def verify(
    rows: RowStore, views: Mapping[str, View], *, deep: bool, repair: bool, stages: Stages
) -> VerificationReport:
    """Check the file; `deep` also embeds every example again and compares, `repair` rebuilds
    derived data."""
    found = [
        (what, repair and fix is not None and _run_repair(fix))
        for what, fix in _findings(rows, views, deep, stages)
    ]
    again = any(fixed for _, fixed in found)
    remaining = [what for what, _ in _findings(rows, views, deep, stages)] if again else []
    problems = [Problem(what, fixed and what not in remaining) for what, fixed in found]
    already_found = {what for what, _ in found}
    problems += [Problem(what, repaired=False) for what in remaining if what not in already_found]
    snapshots = rows.checks(stages).snapshots
    return VerificationReport(*rows.sizes(), snapshots, tuple(problems))


def _findings(
    rows: RowStore, views: Mapping[str, View], deep: bool, stages: Stages
) -> Iterator[Finding]:
    """Yield problems in order; each is repaired before the next check runs."""
    own = rows.checks(stages)
    return chain(
        own.structure,
        find_missing_views(rows, views, stages),
        find_damaged_examples(rows, stages) if own.content is None else own.content,
        find_damaged_vectors(rows, views, stages),
        find_mismatched_vectors(rows, views, stages) if deep else (),
        own.derived,
    )


def _run_repair(fix: Repair) -> bool:
    """Run a repair and return whether it succeeded. A failure does not stop the other repairs."""
    try:
        fix()
    except (BottegaError, OSError) as error:
        log.warning("not repaired: %s", error)
        return False
    return True
