"""Images against their hashes, examples against their ids. Neither can be derived again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from bottega.errors import StoreError
from bottega.knowledge.findings import Finding, paged_keys
from bottega.knowledge.records import is_itself
from bottega.knowledge.rows import SqliteRows

# What no example shows is told as left over.
SHOWN = "SELECT DISTINCT sha256 FROM example_images JOIN examples USING (key)"
ANEW = "and add again, or restore the file from a copy"


def wrong_images(rows: SqliteRows) -> Iterator[Finding]:
    for (sha256,) in rows.read(f"{SHOWN} ORDER BY sha256"):
        with rows.snapshot():  # another process may be deleting it
            wrong = _wrong_image(rows, sha256)
        if wrong is not None:
            yield wrong, None


def _wrong_image(rows: SqliteRows, sha256: str) -> str | None:
    found = rows.read("SELECT CAST(data AS BLOB) FROM images WHERE sha256 = ?", sha256)
    if found and hashlib.sha256(found[0][0]).hexdigest() == sha256:
        return None
    wrong = f"image {sha256} is missing"
    if found:
        wrong = f"the bytes of image {sha256} are not those that were stored"
    showing = _showing(rows, sha256)
    return f"{wrong}; delete {showing} {ANEW}" if showing else None


def _showing(rows: SqliteRows, sha256: str) -> str:
    """All of them must go: what is added again does not replace the bytes that another shows."""
    found = rows.read(
        "SELECT DISTINCT id, namespace FROM example_images JOIN examples USING (key)"
        " WHERE sha256 = ? ORDER BY key",
        sha256,
    )
    named = [f"{id} of namespace {space!r}" if space else id for id, space in found]
    return f"example{'s' * (len(named) > 1)} {', '.join(named)}" if named else ""


def wrong_identities(rows: SqliteRows) -> Iterator[Finding]:
    for keys in paged_keys(rows):
        try:
            for wrong in _other_identities(rows, keys):
                yield wrong, None
        except StoreError:  # one of them cannot be read
            for key in keys:
                try:
                    for wrong in _other_identities(rows, [key]):
                        yield wrong, None
                except StoreError as error:
                    yield f"row {key} cannot be read: {error}", None


def _other_identities(rows: SqliteRows, keys: list[int]) -> list[str]:
    return [
        f"example {example.id} has another question, answer or image; delete it {ANEW}"
        for example in rows.by_keys(keys).values()
        if not is_itself(example)
    ]
