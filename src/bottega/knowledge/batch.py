"""Validation, decoding and embedding of one batch before it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bottega._util.identity import CONTEXT, identity, question_digest
from bottega.errors import EmbeddingError, ImageError, LoadError, OnError, SettingError
from bottega.image import CHECKED_SIDE
from bottega.knowledge.eviction import Capacity
from bottega.knowledge.records import EmbeddedBatch, RowMetadata, View, is_text, with_id
from bottega.knowledge.rows import SqliteRows
from bottega.types import Example

TEXTS = (
    "use texts that UTF-8 can encode, without NULs, for question, choices, answer, labels,"
    " rationale, tags and sources"
)


def store_batch(
    examples: Sequence[Example],
    rows: SqliteRows,
    views: Mapping[str, View],
    on_error: OnError,
    capacity: Capacity | None = None,
    metadata_by_id: Mapping[str, RowMetadata] | None = None,
    supersede: bool = False,
) -> tuple[int, int]:
    """Store a batch and return the numbers of new and of failed examples; the others are
    duplicates."""
    storable = [example for example in examples if _is_storable(example, on_error)]
    fresh = _new_examples(storable, rows)
    decoded = [example for example in fresh if _decodes(example, on_error)]
    sound, embedded = _embed_all(decoded, views, on_error)
    new = rows.put(sound, embedded, capacity, metadata_by_id, supersede) if sound else 0
    return new, len(examples) - len(storable) + len(fresh) - len(sound)


def replace_batch(
    examples: Sequence[Example],
    rows: SqliteRows,
    views: Mapping[str, View],
    on_error: OnError,
    capacity: Capacity | None = None,
) -> list[str | None]:
    """Store newer answers and return, for each, the id that now answers its question.

    That is the id of a pinned answer if one exists, and None for an example that failed.
    """
    digests = [
        question_digest(example) if _is_storable(example, on_error) else None
        for example in examples
    ]
    pairs = zip(digests, examples, strict=True)
    newest = {digest: example for digest, example in pairs if digest is not None}
    store_batch(list(newest.values()), rows, views, on_error, capacity, supersede=True)
    ids = {digest: identity(example) for digest, example in newest.items()}
    stored = rows.keys(ids.values())
    answered = {digest: id for digest, id in ids.items() if id in stored}
    pinned = rows.pinned_ids(ids.keys() - answered.keys())
    return [None if digest is None else (pinned | answered).get(digest) for digest in digests]


def check_annotation(rationale: str | None, tags: Mapping[str, str]) -> None:
    """Raise `LoadError` for values that cannot be stored, and `SettingError` for a tag that is part
    of the example's identity."""
    if not all(map(is_text, (*tags, *tags.values(), *([] if rationale is None else [rationale])))):
        raise LoadError("the annotation cannot be stored", hint=TEXTS)
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
        on_error(LoadError(f"{name!a} cannot be stored", hint=TEXTS))
    return storable


def _texts(example: Example) -> Iterator[str]:
    query, tags = example.query, example.tags
    yield from (query.text, *query.choices, example.answer, *(example.labels or ()))
    yield from (*tags, *tags.values())
    optional = [example.rationale, example.source, *(image.source for image in query.images)]
    yield from (text for text in optional if text is not None)


def _new_examples(examples: Sequence[Example], rows: SqliteRows) -> list[Example]:
    named: dict[str, Example] = {}
    for example in examples:
        named.setdefault(identity(example), example)
    stored = rows.keys(named)
    return [with_id(example, id) for id, example in named.items() if id not in stored]


def _decodes(example: Example, on_error: OnError) -> bool:
    # Needed for text embedders too: the image is shown later, in a demonstration.
    try:
        for image in example.query.images:
            image.decode(at_least=CHECKED_SIDE)
    except ImageError as error:
        on_error(error)
        return False
    return True


def _embed_all(
    examples: list[Example], views: Mapping[str, View], on_error: OnError
) -> tuple[list[Example], dict[str, EmbeddedBatch]]:
    """Embed the batch at once; if that fails, embed one by one to leave out only the failing
    ones."""
    try:
        return examples, _vectors(examples, views)
    except EmbeddingError:
        sound = [example for example in examples if _embeds(example, views, on_error)]
        return sound, _vectors(sound, views)


def _embeds(example: Example, views: Mapping[str, View], on_error: OnError) -> bool:
    try:
        _vectors([example], views)
    except EmbeddingError as error:
        name = example.source or repr(example.query.text)
        on_error(EmbeddingError(f"{name}: {error}", hint=error.hint))
        return False
    return True


def _vectors(examples: Sequence[Example], views: Mapping[str, View]) -> dict[str, EmbeddedBatch]:
    return {
        name: EmbeddedBatch(view.embed.fingerprint, view.vectors(examples))
        for name, view in views.items()
    }
