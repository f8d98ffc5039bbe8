"""Retrieval methods of a gateway: that of [cache] and those of the variants of an experiment."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import get_args

from bottega.gateway.config.gateway_settings import CacheSettings
from bottega.gateway.config.variant_settings import Retrieve
from bottega.knowledge import KnowledgeBase, TowerTokenEmbedder, View
from bottega.knowledge.embedders.names import open_embedder
from bottega.knowledge.records import DEFAULT
from bottega.protocols import Embedder, Retriever
from bottega.recipes.cache_retrieval import (
    BY_DRAFT,
    BY_RESPONSE,
    TEXT_ONLY,
    WITHOUT_METRIC,
    CacheRetrieval,
    DraftModel,
)
from bottega.recording.recorders import Tagger
from bottega.retrieval import BM25Retriever, DenseRetriever, tag_keywords

# Prefix of the names of views that only variants search.
EXPERIMENT = "experiment-"
VARIANT_VIEW = re.compile(rf"{EXPERIMENT}({'|'.join(get_args(Retrieve))})(-.*)?")


@dataclass(frozen=True)
class RetrievalMethod:
    """Retrieval method of a cache. `names` maps the method's own view names to those in the cache.
    Without `parts` it searches by `cache.embed` alone, or by words."""

    name: Retrieve
    names: Mapping[str, str] = field(default_factory=dict)
    parts: CacheRetrieval | None = None

    def retriever(self, base: KnowledgeBase) -> Retriever:
        """Return the retriever over a cache. Blocks while it groups stored examples."""
        if self.name == "bm25":
            return BM25Retriever(base, exclude="same-question")
        if self.parts is not None:
            return self.parts.retriever(base)
        by = self.names.get(DEFAULT)
        return DenseRetriever(partial(base.search, by=by, exclude="same-question"))


class Retrievals:
    """Retrieval methods over one cache, which share their embedders. `views` has the views of all
    of them; `main` is the method of [cache]. Blocks while it loads the embedders."""

    def __init__(
        self, settings: CacheSettings, more: Iterable[Retrieve], draft: Callable[[], DraftModel]
    ) -> None:
        self._settings = settings
        self._open = cache(open_embedder)
        self._draft = cache(draft)
        parts = self._parts(settings.retrieve)
        self.main = RetrievalMethod(settings.retrieve, parts=parts)
        self.views = {DEFAULT: self._embed_view()} if parts is None else parts.views()
        self.methods = {settings.retrieve: self.main}
        for name in more:
            if name not in self.methods:
                self.methods[name] = self._added(name)

    @property
    def embed(self) -> Embedder | Mapping[str, View]:
        """Embedder or views to open the cache with. A file that was made elsewhere may have the
        embedder of `nearest` under another name."""
        has_one = self.main.parts is None and len(self.views) == 1
        return self.views[DEFAULT].embed if has_one else self.views

    @property
    def tagged_by(self) -> CacheRetrieval | None:
        """Method that compares the keywords of answers, None if none does."""
        found = (one.parts for one in self.methods.values() if one.name in BY_RESPONSE)
        return next(found, None)

    @property
    def tagger(self) -> Tagger | None:
        """Function that tags answers with their keywords, if searches compare them."""
        by = self.tagged_by
        return None if by is None else partial(tag_keywords, extractor=by.extract)

    def _added(self, name: Retrieve) -> RetrievalMethod:
        """Return the method of a variant, and add the views that no other method has."""
        parts = self._parts(name)
        if name in WITHOUT_METRIC:  # searches no view
            return RetrievalMethod(name, parts=parts)
        own = {DEFAULT: self._embed_view()} if parts is None else parts.views()
        names = {}
        for part, view in own.items():
            suffix = "" if part == DEFAULT else f"-{part}"
            names[part] = self._matching_view(view) or f"{EXPERIMENT}{name}{suffix}"
            self.views.setdefault(names[part], replace(view, optional=True))
        return RetrievalMethod(name, names, parts and replace(parts, names=names))

    def _matching_view(self, wanted: View) -> str | None:
        """Return the name of a view with equal vectors."""
        return next(
            (
                name
                for name, view in self.views.items()
                if view.embed.fingerprint == wanted.embed.fingerprint
                and view.to_query is wanted.to_query
            ),
            None,
        )

    def _embed_view(self) -> View:
        return View(self._open(self._settings.embed))

    def _parts(self, name: Retrieve) -> CacheRetrieval | None:
        settings = self._settings
        if name == "nearest" or name == "bm25":
            return None
        return CacheRetrieval(
            name,
            image=None if name in TEXT_ONLY else self._open(settings.image_embed),
            text=None if name == "image" else self._open(settings.embed_text),
            tokens=TowerTokenEmbedder.bundled() if name == "hybrid" else None,
            draft=self._draft() if name in BY_DRAFT else None,
            groups=settings.groups,
        )
