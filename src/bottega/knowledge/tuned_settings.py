"""Settings that `bottega tune` chose for a knowledge base, stored in its file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Literal

import orjson

from bottega.errors import StoreError
from bottega.knowledge.base import KnowledgeBase
from bottega.knowledge.stores import note_key

NOTE = "tuned"  # key of the note of the default namespace
ORDERS = ("nearest-last", "nearest-first", "shuffled")
VISUAL_RAG, LOGREG = "visual-rag", "logreg"


@dataclass(frozen=True)
class TunedSettings:
    """Number and order of demonstrations, for searches by the embedder with this fingerprint.
    `method` is the default of `bottega classify`: `VISUAL_RAG` (a model with demonstrations) or
    `LOGREG` (logistic regression)."""

    embedder: str
    shots: int
    order: Literal["nearest-last", "nearest-first", "shuffled"] = "nearest-last"
    method: str = VISUAL_RAG

    def store(self, knowledge: KnowledgeBase) -> None:
        """Store the settings of the namespace in the file."""
        knowledge.set_note(note_key(NOTE, knowledge.namespace), orjson.dumps(asdict(self)).decode())


def tuned_settings(knowledge: KnowledgeBase) -> TunedSettings | None:
    """Return the stored settings of the namespace, None without any.

    Settings for an embedder that no view uses any more are ignored. Raises `StoreError` for a
    damaged note.
    """
    note = knowledge.note(note_key(NOTE, knowledge.namespace))
    if note is None:
        return None
    try:
        stored = orjson.loads(note)
        settings = TunedSettings(**{one.name: stored[one.name] for one in fields(TunedSettings)})
        if settings.embedder not in {view.fingerprint for view in knowledge.views().values()}:
            return None
        if settings.order not in ORDERS or type(settings.shots) is not int or settings.shots < 1:
            raise ValueError
        if settings.method not in (VISUAL_RAG, LOGREG):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"the stored settings are damaged, got {note!r:.80}", hint="run bottega tune again"
        ) from error
    return settings


def tuned_for(knowledge: KnowledgeBase) -> TunedSettings | None:
    """Return the stored settings if they belong to the embedder that `knowledge` searches by
    default."""
    settings = tuned_settings(knowledge)
    is_own = settings is not None and settings.embedder == knowledge.embedder().fingerprint
    return settings if is_own else None
