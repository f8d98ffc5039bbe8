"""Operations on the examples of a cache that the administration API and the console share."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import orjson

from bottega._util.identity import identity
from bottega.errors import BottegaError
from bottega.knowledge import KnowledgeBase, read_jsonl
from bottega.openai_api.errors import ApiError
from bottega.types import Example

# Values of the tag `provenance`.
HUMAN, IMPORTED = "human", "imported"

# Called with a namespace after its answers have changed: the response cache may have old ones.
Forget = Callable[[str], None]


@dataclass(frozen=True)
class ImportReport:
    """Numbers of new and duplicate examples, and the errors of the skipped lines."""

    new: int
    duplicates: int
    skipped: Sequence[BottegaError]


def import_jsonl(cache: KnowledgeBase, lines: Iterable[bytes], importer: str) -> ImportReport:
    """Add JSON lines with images as data URLs, in the format of `export_jsonl` or `load_jsonl`.
    Invalid lines are skipped and reported. The examples are marked as imported by `importer`."""
    bad: list[BottegaError] = []
    examples = read_jsonl(lines, "the upload", whole_replies=True, on_error=bad.append)
    marked = (
        replace(one, tags={**one.tags, "provenance": IMPORTED}, source=f"imported by {importer}")
        for one in examples
    )
    added = cache.add(marked, on_error=bad.append)
    return ImportReport(added.new, added.duplicates, bad)


def export_jsonl(cache: KnowledgeBase) -> Iterator[bytes]:
    """Yield the examples as JSON lines. A damaged example ends the stream; `bottega export` reports
    it and writes the others."""
    for example in cache:
        images = [
            f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"
            for image in example.query.images
        ]
        yield orjson.dumps({**fields_of(example), "images": images}) + b"\n"


def delete_example(cache: KnowledgeBase, namespace: str, id: str, forget: Forget) -> int:
    """Delete an example and return the number deleted. Raises `NotFoundError`."""
    # First, too: a deletion whose reply failed is repeated for an id that no longer exists.
    forget(namespace)
    removed = cache.delete([id])
    forget(namespace)
    return removed


def correct_example(
    cache: KnowledgeBase, namespace: str, old: Example, new: Example, forget: Forget
) -> str:
    """Replace an example by its correction and return the id of the correction, which is pinned if
    the old example was. Other answers to the question are removed. Raises `ApiError`."""
    id = str(old.id)
    if identity(new) == id:
        cache.annotate(id, rationale=new.rationale, labels=new.labels, tags=_changed_tags(old, new))
        forget(namespace)
        return id
    (stored,) = cache.replace([new], pin=cache.metadata(id).pinned)
    forget(namespace)
    if stored != identity(new):
        raise ApiError(
            "another answer to this question is pinned",
            status=409,
            hint="unpin or delete that entry first",
        )
    return stored


def _changed_tags(old: Example, new: Example) -> dict[str, str]:
    return {name: tag for name, tag in new.tags.items() if old.tags.get(name) != tag}


def fields_of(example: Example) -> dict[str, object]:
    """Return the fields of an example except its images."""
    query = example.query
    return {
        "id": example.id,
        "question": query.text,
        "answer": example.answer,
        "choices": query.choices,
        "labels": example.labels,
        "rationale": example.rationale,
        "tags": dict(example.tags),
        "source": example.source,
    }
