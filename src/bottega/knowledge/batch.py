"""Embedding of examples: batches before they are stored, and stored ones for another view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from bottega._util.executor import computed_ahead
from bottega._util.identity import CONTEXT, identity, question_digest
from bottega._util.progress import Step
from bottega.errors import EmbeddingError, ImageError, LoadError, OnError, SettingError
from bottega.knowledge.eviction import Capacity
from bottega.knowledge.records import EmbeddedBatch, View, check_name, is_text, with_id
from bottega.knowledge.stores import RowStore
from bottega.protocols import Vectors, embed_concurrency
from bottega.types import Example

TEXT_HINT = (
    "use texts that UTF-8 can encode, without NULs, for question, choices, answer, labels,"
    " rationale, tags and sources"
)
COPY_HINT = "see the error of the first copy"


@dataclass(frozen=True)
class AddResult:
    """Numbers of new, duplicate and failed examples."""

    new: int = 0
    duplicates: int = 0
    failed: int = 0

    def __add__(self, more: AddResult) -> AddResult:
        return AddResult(
            self.new + more.new, self.duplicates + more.duplicates, self.failed + more.failed
        )


class EmbeddedExamples(NamedTuple):
    """Batch of `size` examples: those to store with their vectors by view, and the number of failed
    ones."""

    size: int
    valid: list[Example]
    vectors: dict[str, EmbeddedBatch]
    failed: int


def embedded_batches(
    batches: Iterable[Sequence[Example]],
    rows: RowStore | None,
    views: Mapping[str, View],
    on_error: OnError,
) -> Iterator[EmbeddedExamples]:
    """Embed the examples of each batch that are not stored in `rows`.

    An embedder with workers gets the next batches while the caller stores a batch. Equal examples
    in two of these batches are then both embedded, and one is stored.
    """
    ahead = max((embed_concurrency(view.embed) for view in views.values()), default=1)
    prepared = (_prepared(batch, rows, on_error) for batch in batches)
    for batch, vectors in computed_ahead(
        prepared, lambda batch: _vectors(batch.unstored, views), ahead
    ):
        valid, embedded = _embed_valid(batch.unstored, vectors, views, on_error)
        failed_ids = {example.id for example in batch.unstored} - {one.id for one in valid}
        failed_copies = [example for id, example in batch.copies if id in failed_ids]
        for example in failed_copies:
            name = example.source or repr(example.query.text)
            on_error(LoadError(f"{name} equals an example that failed", hint=COPY_HINT))
        failed = batch.failed + len(failed_ids) + len(failed_copies)
        yield EmbeddedExamples(batch.size, valid, embedded, failed)


class _Prepared(NamedTuple):
    size: int
    unstored: list[Example]
    copies: list[tuple[str, Example]]  # later equal examples of the batch with their id
    failed: int


def _prepared(examples: Sequence[Example], rows: RowStore | None, on_error: OnError) -> _Prepared:
    """Return the examples to embed: different ones that are not stored."""
    storable = [example for example in examples if _is_storable(example, on_error)]
    named: dict[str, Example] = {}
    copies: list[tuple[str, Example]] = []
    for example in storable:
        if (id := identity(example)) in named:
            copies.append((id, example))
        named.setdefault(id, example)
    stored = {} if rows is None else rows.keys(named)
    unstored = [with_id(example, id) for id, example in named.items() if id not in stored]
    return _Prepared(len(examples), unstored, copies, len(examples) - len(storable))


def is_sound(example: Example, on_error: OnError) -> bool:
    """Return whether the texts can be stored and the images decoded, else report the error."""
    return _is_storable(example, on_error) and _is_intact(example, on_error)


def replace_batch(
    examples: Sequence[Example],
    rows: RowStore,
    views: Mapping[str, View],
    on_error: OnError,
    capacity: Capacity | None = None,
    pin: bool = False,
) -> list[str | None]:
    """Store newer answers and return, for each, the id that now answers its question.

    That is the id of a pinned answer if one exists, and None for an example that failed. With
    `pin`, the answers replace pinned ones, too, and are pinned.
    """
    digests = [
        question_digest(example) if _is_storable(example, on_error) else None
        for example in examples
    ]
    pairs = zip(digests, examples, strict=True)
    newest = {digest: example for digest, example in pairs if digest is not None}
    known = None if pin else rows  # a pinned answer replaces even an equal one
    (batch,) = embedded_batches([list(newest.values())], known, views, on_error)
    if batch.valid:
        rows.put(batch.valid, batch.vectors, capacity, supersede=True, pin=pin)
    ids = {digest: identity(example) for digest, example in newest.items()}
    # A pinned answer was stored, even if another one has replaced it since.
    stored = {one.id for one in batch.valid} if pin else rows.keys(ids.values())
    answered = {digest: id for digest, id in ids.items() if id in stored}
    pinned = rows.pinned_ids(ids.keys() - answered.keys())
    return [None if digest is None else (pinned | answered).get(digest) for digest in digests]


def check_annotation(
    rationale: str | None, tags: Mapping[str, str], labels: Sequence[str] = ()
) -> None:
    """Raise `LoadError` for values that cannot be stored, and `SettingError` for a tag that is part
    of the example's identity."""
    texts = (*tags, *tags.values(), *labels, *([] if rationale is None else [rationale]))
    if not all(map(is_text, texts)):
        raise LoadError("the annotation cannot be stored", hint=TEXT_HINT)
    if CONTEXT in tags:
        raise SettingError(
            f"the tag {CONTEXT!r} is part of the example's id and cannot be changed",
            hint="delete the example and add it with the new context",
        )


def _is_storable(example: Example, on_error: OnError) -> bool:
    try:
        storable = all(map(is_text, _texts(example)))
    except (TypeError, AttributeError):  # a field has another type
        storable = False
    if not storable:
        name = example.source or example.query.text
        on_error(LoadError(f"{name!a} cannot be stored", hint=TEXT_HINT))
    return storable


def _texts(example: Example) -> Iterator[str]:
    query, tags = example.query, example.tags
    yield from (query.text, *query.choices, example.answer, *(example.labels or ()))
    yield from (*tags, *tags.values())
    optional = [example.rationale, example.source, *(image.source for image in query.images)]
    yield from (text for text in optional if text is not None)


def _embed_valid(
    examples: list[Example],
    vectors: Callable[[], dict[str, EmbeddedBatch]],
    views: Mapping[str, View],
    on_error: OnError,
) -> tuple[list[Example], dict[str, EmbeddedBatch]]:
    """Return the examples whose images are intact and that can be embedded, and their vectors.
    `vectors` embeds all examples."""
    try:
        made: dict[str, EmbeddedBatch] | None = vectors()
    except ImageError:
        made = None
    except EmbeddingError:
        return _embed_singly(_with_intact_images(examples, on_error), views, on_error)
    # After embedding: images that an embedder has decoded are not decoded again.
    intact = _with_intact_images(examples, on_error)
    if made is not None and len(intact) == len(examples):
        return intact, made
    try:
        return intact, _vectors(intact, views)
    except EmbeddingError:
        return _embed_singly(intact, views, on_error)


def _with_intact_images(examples: Sequence[Example], on_error: OnError) -> list[Example]:
    return [example for example in examples if _is_intact(example, on_error)]


def _is_intact(example: Example, on_error: OnError) -> bool:
    # Needed for text embedders too: the image is shown later, in a demonstration.
    try:
        for image in example.query.images:
            image.check()
    except ImageError as error:
        on_error(error)
        return False
    return True


def _embed_singly(
    examples: list[Example], views: Mapping[str, View], on_error: OnError
) -> tuple[list[Example], dict[str, EmbeddedBatch]]:
    """Embed one by one to leave out only the examples that fail."""
    valid = []
    for example in examples:
        try:
            _vectors([example], views)
            valid.append(example)
        except EmbeddingError as error:
            name = example.source or repr(example.query.text)
            on_error(EmbeddingError(f"{name}: {error}", hint=error.hint))
    return valid, _vectors(valid, views)


def _vectors(examples: Sequence[Example], views: Mapping[str, View]) -> dict[str, EmbeddedBatch]:
    return {
        name: EmbeddedBatch(view.embed.fingerprint, view.vectors(examples))
        for name, view in views.items()
    }


def reindex(
    rows: RowStore,
    name: str,
    view: View,
    *,
    batch_size: int,
    progress: Step,
) -> int:
    """Embed all examples of every namespace that lack the new vector and return their number.

    Searches use the old vectors until all new ones are stored; then one commit replaces them. An
    interrupted run resumes. If two runs reindex one view, the later one continues and the other
    raises `StoreError`.
    """
    check_name(name)
    if batch_size < 1:
        raise SettingError(f"batch_size must be at least 1, got {batch_size}", hint="use 64")
    number, complete = rows.begin_view(name, view.embed.fingerprint, view.embed.dimension)
    progress(rows.count_vectors(number))
    done = 0
    # Again until none is missing: other processes may add examples meanwhile.
    while not rows.complete_view(name, number):
        keys = rows.missing_keys(number)
        batches = (keys[start : start + batch_size] for start in range(0, len(keys), batch_size))
        stored = (rows.by_keys(batch) for batch in batches)
        ahead = embed_concurrency(view.embed)
        for examples, vectors in computed_ahead(stored, partial(_view_vectors, view), ahead):
            # Indexes of a complete view lack these vectors, so the log must name them.
            rows.set_vectors(number, dict(zip(examples, vectors(), strict=True)), logged=complete)
            done += len(examples)
            progress(len(examples))
    return done


def embed_again(rows: RowStore, keys: Sequence[int], number: int, view: View) -> None:
    """Replace the vectors of these rows and log the changes for the indexes."""
    examples = rows.by_keys(keys)
    vectors = dict(zip(examples, _view_vectors(view, examples), strict=True))
    rows.set_vectors(number, vectors, logged=True)


def _view_vectors(view: View, examples: Mapping[int, Example]) -> Vectors:
    try:
        return view.vectors(list(examples.values()))
    except EmbeddingError as error:
        # Embed one by one to name the example that fails.
        for example in examples.values():
            try:
                view.vectors([example])
            except EmbeddingError as single_error:
                hint = (
                    single_error.hint
                    or f"remove it with bottega rm K.db {example.id}; finished vectors are kept"
                )
                raise EmbeddingError(f"example {example.id}: {single_error}", hint=hint) from error
        raise
