"""Views: named vectors of an example, and the embedder of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bottega.errors import EmbedderMismatchError, EmbeddingError, SettingError
from bottega.knowledge.ports import StoredView
from bottega.knowledge.writer import check_views
from bottega.protocols import Embedder, Vectors
from bottega.types import Example, Query

DEFAULT = "default"
# View names become parts of file names.
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
# Lone surrogates: valid in JSON, but rejected by tokenizers.
SURROGATES = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True)
class View:
    """Embedder of a named vector. `to_query` selects the content to embed; by default the example's
    query."""

    embed: Embedder
    to_query: Callable[[Example], Query] | None = None

    def vectors(self, examples: Sequence[Example]) -> Vectors:
        """Return one finite row (n, dimension) per example. Raises `EmbeddingError`."""
        if not examples:
            return np.empty((0, self.embed.dimension), np.float32)
        to_query = self.to_query or (lambda example: example.query)
        return embed_checked(self.embed, [to_query(example) for example in examples], "examples")


class Views:
    """Views of one handle. A single embedder is one view named `default`."""

    def __init__(self, given: Embedder | Mapping[str, View] | None) -> None:
        self._bare = None if given is None or isinstance(given, Mapping) else View(given)
        self._named = dict(given) if isinstance(given, Mapping) else {}
        if isinstance(given, Mapping) and not given:
            raise SettingError("embed has no views", hint="use embed={'image': View(embedder)}")
        for name, view in self._named.items():
            check_name(name)
            if not isinstance(view, View):
                raise SettingError(
                    f"view {name!r} must be a View, got {type(view).__name__}",
                    hint=f"use embed={{{name!r}: View(embedder)}}",
                )

    def __bool__(self) -> bool:
        return self._bare is not None or bool(self._named)

    def resolve(self, stored: Mapping[str, StoredView]) -> dict[str, View]:
        """Return the views by name, the default first. Raises if the stored vectors have other
        fingerprints."""
        named = self._named
        if self._bare is not None:
            named = {_name_of(self._bare.embed, stored): self._bare}
        if stored:
            check_views(stored, {name: view.embed.fingerprint for name, view in named.items()})
        return named

    def replace(self, name: str, view: View, stored: Mapping[str, StoredView]) -> None:
        """Use another embedder for this view, if the handle has the view."""
        if self._bare is not None:
            # A single embedder denotes one view; the file may have gained others.
            if _stored_name(self._bare.embed, stored) in (name, None):
                self._bare = view
        elif name in self._named:
            self._named[name] = view


def _name_of(embed: Embedder, stored: Mapping[str, StoredView]) -> str:
    name = _stored_name(embed, stored)
    if name is None:
        raise EmbedderMismatchError(next(iter(stored.values())).fingerprint, embed.fingerprint)
    return name


def _stored_name(embed: Embedder, stored: Mapping[str, StoredView]) -> str | None:
    if not stored or DEFAULT in stored:
        return DEFAULT
    made = (name for name, view in stored.items() if view.fingerprint == embed.fingerprint)
    return next(made, None)


def check_name(name: str) -> None:
    """Raise `SettingError` unless the name is valid for a view."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise SettingError(
            f"view name is invalid, got {name!r}", hint="use up to 40 letters, digits, - and _"
        )


def embed_checked(embed: Embedder, queries: Sequence[Query], what: str) -> Vectors:
    """Return one finite row per query, or raise `EmbeddingError`."""
    for query in queries:
        if not query.text.isascii() and SURROGATES.search(query.text):
            raise EmbeddingError(
                f"the text contains lone surrogates, got {query.text!a}", hint="send valid Unicode"
            )
    made = embed.embed(queries)
    try:
        with np.errstate(over="ignore"):
            vectors = np.asarray(made, np.float32)
            lengths = np.square(vectors).sum(axis=-1)
    except (TypeError, ValueError) as error:
        raise EmbeddingError(
            f"{embed.fingerprint} returned {type(made).__name__} for {len(queries)} {what}",
            hint=f"return an array with one row of {embed.dimension} numbers per query",
        ) from error
    if vectors.shape != (len(queries), embed.dimension):
        raise EmbeddingError(
            f"{embed.fingerprint} returned {vectors.shape} for {len(queries)} {what}",
            hint=f"return one row of {embed.dimension} numbers per query",
        )
    if not np.isfinite(lengths).all():
        raise EmbeddingError(
            f"{embed.fingerprint} returned NaN, infinite or too large numbers",
            hint="check the weights; half precision may overflow",
        )
    return vectors
