"""What a cache file holds: retrieval methods and their views, checks, tuned settings."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import get_args

from bottega._util.event_loops import BACKGROUND_LOOP
from bottega._util.locations import StoreLocation
from bottega.errors import SettingError, StoreBusyError, StoreReadOnlyError, store_errors
from bottega.gateway.config.gateway_settings import CacheSettings, Config
from bottega.gateway.config.routing_settings import Retrieve
from bottega.knowledge import KnowledgeBase, TowerTokenEmbedder, View
from bottega.knowledge.embedders.names import NOTE, earlier_photos, open_embedder, packaged_name
from bottega.knowledge.records import DEFAULT, StoredView
from bottega.knowledge.tuned_settings import TunedSettings, tuned_settings
from bottega.naming import EMBEDDERS
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
from bottega.retrieval.keywords import TAG

# Prefix of the names of views that only variants search.
EXPERIMENT = "experiment-"
VARIANT_VIEW = re.compile(rf"{EXPERIMENT}({'|'.join(get_args(Retrieve))})(-.*)?")

log = logging.getLogger(__name__)

NEAREST = "nearest"
PREPARED = "cache.retrieve"  # key of the note that names the method with these vectors


def cache_location(config: Config) -> StoreLocation:
    return config.cache.location(os.environ, config.gateway.data)


def check_cache(config: Config) -> None:
    """Raise `StoreError` if the cache cannot be read, and `SettingError` if another packaged
    embedder filled it. Load no model."""
    location = cache_location(config)
    if not location.may_hold_examples():
        return
    # A start of the gateway retries a busy file.
    with (
        suppress(StoreBusyError),
        store_errors(config.cache.database_setting),
        KnowledgeBase.open(location.target, None) as base,
    ):
        views = [one for name, one in base.views().items() if not VARIANT_VIEW.fullmatch(name)]
        stored, cache = next(iter(views), None), config.cache
        if stored is None or cache.retrieve != NEAREST:
            return
        if earlier_photos(stored.fingerprint) is not None:
            raise filled_with_error(config, stored.fingerprint)
        filled = base.note(NOTE) or packaged_name(stored.fingerprint)
        if filled in EMBEDDERS and cache.embed in EMBEDDERS and filled != cache.embed:
            raise filled_with_error(config, filled)


def filled_with_error(config: Config, stored: str) -> SettingError:
    """Return the error for a file that the embedder with this name or fingerprint filled."""
    embed, file = config.cache.embed, cache_location(config)
    other = "" if earlier_photos(stored) is not None else "set cache.embed to that one, or "
    return SettingError(
        f"{config.file}: cache.embed is {embed!r}, and {file} was filled with {stored!r}",
        hint=f"{other}run bottega reindex {file} --embed {embed}",
    )


def prepare_views(file: StoreLocation, retrievals: Retrievals) -> None:
    """Embed the stored examples again for views that `file` lacks, or that another retrieval
    method filled, and delete the views of earlier experiments. Blocks. Raises `SettingError` for a
    file with further views."""
    if not file.may_hold_examples():
        return
    with KnowledgeBase.open(file.target, None) as base:
        stored, prepared = base.views(), base.note(PREPARED)
    if not stored:
        return  # the first example creates the views
    has_parts = retrievals.main.parts is not None
    name = retrievals.main.name if has_parts else NEAREST
    if prepared != name and (has_parts or DEFAULT in stored):
        _prepare_main(file, retrievals, [one for one in stored if not VARIANT_VIEW.fullmatch(one)])
    try:
        _prepare_variants(file, retrievals, stored)
    except StoreReadOnlyError as error:
        log.warning("variants of the experiment cannot search the cache: %s", error)


def _prepare_main(file: StoreLocation, retrievals: Retrievals, stored: Collection[str]) -> None:
    parts = retrievals.main.parts
    name = NEAREST if parts is None else parts.name
    views = {name: view for name, view in retrievals.views.items() if not view.optional}
    if more := set(stored) - views.keys():
        raise SettingError(
            f"{file} has the view {min(more)!r}, which cache.retrieve does not fill",
            hint="set cache.retrieve to the method that filled it, or export it and import it into"
            " a new file",
        )
    if parts is not None and name in BY_RESPONSE:
        _tag_all(file, parts)
    own = {name: view for name, view in views.items() if name in stored}
    with KnowledgeBase.open(file.target, own) as base:
        if not all(base.is_made_by(*one) for one in own.items()):
            log.info("embedding the examples of %s again for cache.retrieve %s", file, name)
            base.verify(deep=True, repair=True)
        for missing in views.keys() - own.keys():
            base.reindex(missing, views[missing])
        with suppress(StoreReadOnlyError):  # a read-only file is compared at each start
            base.set_note(PREPARED, name)


def _prepare_variants(
    file: StoreLocation, retrievals: Retrievals, stored: Mapping[str, StoredView]
) -> None:
    missing = {
        name: view
        for name, view in retrievals.views.items()
        if view.optional
        and (name not in stored or stored[name].fingerprint != view.embed.fingerprint)
    }
    if missing and retrievals.tagged_by is not None:
        _tag_all(file, retrievals.tagged_by)
    with KnowledgeBase.open(file.target, None) as base:
        for name in stored:
            if VARIANT_VIEW.fullmatch(name) and name not in retrievals.views:
                log.info("deleting the view %s of %s: no variant searches it", name, file)
                base.drop_view(name)
        for name, view in missing.items():
            log.info("embedding the examples of %s for the view %s of a variant", file, name)
            base.reindex(name, view)


def _tag_all(file: StoreLocation, retrieval: CacheRetrieval) -> None:
    with KnowledgeBase.open(file.target, None) as base:
        namespaces = list(base.namespaces())
    for namespace in namespaces:
        with KnowledgeBase.open(file.target, None, namespace=namespace) as base:
            examples = list(base)
            tagged = BACKGROUND_LOOP.run(tag_keywords(examples, retrieval.extract))
            for before, after in zip(examples, tagged, strict=True):
                if before.id is not None and after.tags != before.tags:
                    base.tag(before.id, {TAG: after.tags[TAG]})


def with_tuned_settings(config: Config) -> Config:
    """Return the configuration with the stored shots and order where it sets none.

    They are read from the namespace without a name. Tiers whose answers are stored keep their
    default of no demonstrations. Raises `StoreError` for a file that is not a cache.
    """
    stored = _stored(cache_location(config))
    if stored is None:
        return config
    tiers = tuple(
        replace(tier, shots=stored.shots)
        if tier.shots is None and tier.name not in config.stored_tiers
        else tier
        for tier in config.tiers
    )
    cache = replace(config.cache, order=config.cache.order or stored.order)
    return replace(config, tiers=tiers, cache=cache)


def _stored(file: StoreLocation) -> TunedSettings | None:
    if not file.may_hold_examples():
        return None
    with suppress(StoreBusyError), KnowledgeBase.open(file.target, None) as knowledge:
        return tuned_settings(knowledge)
    return None


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
