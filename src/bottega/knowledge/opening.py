"""Opening of the rows of a knowledge base: a file, or the tables of a database."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import get_args

from bottega._util.postgres import postgres_url
from bottega.errors import EmbedderMismatchError, SettingError, StoreError
from bottega.image import path_text
from bottega.knowledge.embedders.names import (
    earlier_photos,
    note_of,
    open_embedder,
    packaged_name,
)
from bottega.knowledge.metric import SearchMetric
from bottega.knowledge.records import View, is_text
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.knowledge.stores import RowStore, check_finished


def check_settings(embed: object, metric: str, namespace: object) -> None:
    """Raise `SettingError` for invalid settings of a knowledge base."""
    known = embed is None or embed == "stored" or isinstance(embed, Mapping)
    if not (known or hasattr(embed, "fingerprint")):
        raise SettingError(
            f"embed must be an Embedder, got {embed!r:.80}",
            hint="pass TowerEmbedder.bundled(), PixelEmbedder() or SentenceEmbedder(name)",
        )
    if metric not in get_args(SearchMetric):
        raise SettingError(
            f"metric must be {', '.join(map(repr, get_args(SearchMetric)))}, got {metric!r}",
            hint="use metric='cosine'",
        )
    if not is_text(namespace):
        raise SettingError(
            f"namespace must be a text without NULs, got {namespace!a}",
            hint="use a text such as 'a'",
        )


def named_mismatch(error: EmbedderMismatchError) -> EmbedderMismatchError:
    """Return the error with a hint that names the packaged embedders."""
    stored, given = (packaged_name(one) or one for one in (error.stored, error.given))
    omit = "" if stored == error.stored else f"omit embed= to open it with {stored}, or "
    hint = f"{omit}build a new file with {given}"
    if (successor := earlier_photos(error.stored)) is not None:
        hint = f"embed the examples again: bottega reindex FILE --embed {successor}"
    return EmbedderMismatchError(error.stored, error.given, hint=hint)


def open_rows(
    path: str | Path, *, create: bool, embeds: bool, namespace: str, vectors: str | None = None
) -> RowStore:
    """Open or create the rows of a file or of a `postgresql://` URL, for a search that `embeds` its
    queries. `vectors` is the URL of a Milvus database with their search index."""
    if (url := postgres_url(path)) is None:
        if vectors is not None:
            raise SettingError(
                f"vectors requires a knowledge base in PostgreSQL, got {path_text(path)}",
                hint="open postgresql://user@host/database, or remove vectors",
            )
        create = create and (embeds or not Path(path).exists())
        return SqliteRows(str(path), create=create, namespace=namespace)
    if vectors is not None and embeds:
        from bottega.knowledge.milvus.search import MilvusRows  # needs the extra [milvus]

        return MilvusRows(url, namespace, vectors, create=create)
    from bottega.knowledge.postgres.rows import PostgresRows  # needs the extra [shared]

    return PostgresRows(url, namespace, create=create)


def stored_views(path: str | Path, namespace: str) -> dict[str, View]:
    """Return the views of existing rows with the embedders that fingerprints or notes name."""
    hint = "pass embed=, e.g. KnowledgeBase.open(path, TowerEmbedder.bundled())"
    if postgres_url(path) is None and not Path(path).exists():
        raise SettingError(f"embed is missing for the new file {path_text(path)}", hint=hint)
    with closing(open_rows(path, create=False, embeds=False, namespace=namespace)) as rows:
        check_finished(rows)
        stored = rows.views()
        names = {
            name: packaged_name(view.fingerprint)
            or rows.note(note_of(view))
            or earlier_photos(view.fingerprint)
            for name, view in stored.items()
        }
    unknown = [stored[name].fingerprint for name, spec in names.items() if spec is None]
    if unknown or not names:
        problem = f"names no embedder for {unknown[0]!r}" if unknown else "has no vectors yet"
        raise StoreError(f"{path_text(path)} {problem}", hint=hint)
    return {name: View(open_embedder(str(spec))) for name, spec in names.items()}
