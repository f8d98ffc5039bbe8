"""Knowledge base: browse by label, map, near-duplicates, likely wrong labels, and add images."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import PurePosixPath

from starlette.routing import Route

from bottega._util.progress import plural
from bottega.errors import BottegaError, LoadError
from bottega.gateway.request.cached_examples import Forget, correct_example
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.loaders.folders import label_text
from bottega.knowledge.loaders.scan import is_system_name, named_folders, splits_below
from bottega.openai_api.errors import ApiError
from bottega.types import IMAGE_QUESTION, Example, Query
from bottega.ui.background import RELOAD_SECONDS
from bottega.ui.base_analysis import NEIGHBOURS, BaseAnalyses, likely_wrong_labels, near_duplicates
from bottega.ui.bases import NamespacePages, existing, human_tags, paged, uploaded_image
from bottega.ui.forms import MAX_FILES
from bottega.ui.pages import Page, PageResult, Redirect, Renderer, Visit

PAGE_SIZE = 60
MAX_LISTED = 60
DEFAULT_THRESHOLD = "0.98"
BATCH = 16  # images in memory at a time: each may have 40 megapixels


@dataclass(frozen=True)
class KnowledgePages(NamespacePages):
    """Handlers of the pages on the knowledge base. After a change, `forget` removes the namespace's
    replies from the response cache."""

    forget: Forget
    analyses: BaseAnalyses = field(default_factory=BaseAnalyses)

    def browse(self, visit: Visit) -> PageResult:
        """Show each label with one of its examples, or all examples of one label."""
        base = self.base(visit)
        if (other := self.elsewhere(visit, base, "/knowledge")) is not None:
            return other
        ids = base.ids_by_label()
        label, text = visit.value("label"), visit.value("text").strip()
        if label:
            found = paged(visit, ids.get(label, [])[::-1], PAGE_SIZE)
            values = {"found": found, "entries": existing(base, found.items)}
            return self._page(visit, base, "knowledge_label.html", {"label": label, **values})
        labels = sorted(ids, key=lambda name: (-len(ids[name]), name))
        if text:
            labels = [name for name in labels if text.casefold() in name.casefold()]
        shown = paged(visit, labels, PAGE_SIZE)
        first = {str(one.id): one for one in existing(base, [ids[name][0] for name in shown.items])}
        tiles = [(name, len(ids[name]), first.get(ids[name][0])) for name in shown.items]
        values = {"found": shown, "tiles": tiles, "examples": len(base)}
        return self._page(visit, base, "knowledge.html", values)

    def map(self, visit: Visit) -> PageResult:
        base = self.base(visit)
        found = self.analyses.map(base, visit.namespace)
        if found is None:
            return self._waiting(visit, base)
        return self._page(visit, base, "knowledge_map.html", {"map": found})

    def duplicates(self, visit: Visit) -> PageResult:
        base = self.base(visit)
        threshold = _threshold(visit)
        found = self.analyses.neighbourhood(base, visit.namespace)
        if found is None:
            return self._waiting(visit, base)
        pairs = near_duplicates(found, threshold)
        shown = pairs[:MAX_LISTED]
        values = {
            "pairs": shown,
            "number": len(pairs),
            "threshold": threshold,
            "found": found,
            "examples": _by_id(base, {id for pair in shown for id in pair[:2]}),
        }
        return self._page(visit, base, "knowledge_duplicates.html", values)

    def wrong_labels(self, visit: Visit) -> PageResult:
        base = self.base(visit)
        found = self.analyses.neighbourhood(base, visit.namespace)
        if found is None:
            return self._waiting(visit, base)
        wrong = likely_wrong_labels(found)
        shown = wrong[:MAX_LISTED]
        values = {
            "wrong_labels": shown,
            "number": len(wrong),
            "neighbours": NEIGHBOURS,
            "found": found,
            "examples": _by_id(base, {one.id for one in shown}),
        }
        return self._page(visit, base, "knowledge_wrong_labels.html", values)

    def relabel(self, visit: Visit) -> PageResult:
        """Give each checked example the label that its neighbours suggest. Examples that were
        changed or deleted since the page was rendered are skipped, and those with several labels,
        of which others may be right."""
        base, changed = self.base(visit), 0
        chosen = dict(one.partition(" ")[::2] for one in visit.values("relabel"))
        if not chosen:
            raise ApiError("no example was chosen", hint="check the box of each wrong label")
        for id, old in _by_id(base, chosen).items():
            if len(old.labels or ()) > 1:
                continue
            label = label_text(chosen[id])
            labels = None if old.labels is None else (label,)
            tags = {**old.tags, **human_tags(visit)}
            new = replace(old, answer=label, labels=labels, tags=tags)
            correct_example(base, visit.namespace, old, new, self.forget)
            changed += 1
        params = {"namespace": visit.namespace} if visit.namespace else {}
        return Redirect(
            "/knowledge/wrong-labels", f"{plural(changed, 'label')} changed", params=params
        )

    def form(self, visit: Visit) -> PageResult:
        return self._form(visit, {})

    def add(self, visit: Visit) -> PageResult:
        """Add images with the given label, else with the names of their folders as labels. The page
        lists the files that failed."""
        base = self.base(visit)
        if not (visit.files("images") or visit.files("folder")):
            raise ApiError("no files were sent", hint="drop images, or choose a folder")
        failed: list[BottegaError] = []
        added = base.add(_examples(visit, failed.append), batch_size=BATCH, on_error=failed.append)
        return self._form(visit, {"added": added, "failed": failed})

    def _form(self, visit: Visit, values: dict[str, object]) -> Page:
        empty = {"added": None, "failed": (), "question": IMAGE_QUESTION, "max_files": MAX_FILES}
        return self._page(visit, self.base(visit), "knowledge_add.html", {**empty, **values})

    def _waiting(self, visit: Visit, base: KnowledgeBase) -> Page:
        page = self._page(visit, base, "knowledge_waiting.html", {"examples": len(base)})
        return replace(page, reload_seconds=RELOAD_SECONDS)

    def _page(
        self, visit: Visit, base: KnowledgeBase, template: str, values: dict[str, object]
    ) -> Page:
        return self.page(visit, base, template, {"title": "Knowledge base", **values})


def knowledge_routes(renderer: Renderer, pages: KnowledgePages) -> list[Route]:
    page = renderer.route
    return [
        page("/knowledge", pages.browse),
        page("/knowledge/map", pages.map),
        page("/knowledge/duplicates", pages.duplicates),
        page("/knowledge/wrong-labels", pages.wrong_labels),
        page("/knowledge/wrong-labels", pages.relabel, method="POST", right="can_store"),
        page("/knowledge/add", pages.form),
        page("/knowledge/add", pages.add, method="POST", right="can_store"),
    ]


def _examples(visit: Visit, on_error: Callable[[BottegaError], None]) -> Iterator[Example]:
    """Yield the uploaded images as examples. The label comes from the form, else from the name of
    the class folder. Unreadable files and files without a label go to `on_error`."""
    question = visit.value("question").strip() or IMAGE_QUESTION
    given, tags = visit.value("label").strip(), human_tags(visit)
    files = [
        (path, file)
        for file in (*visit.files("images"), *visit.files("folder"))
        if not any(map(is_system_name, (path := PurePosixPath(file.filename or "")).parts))
    ]
    folders = partial(named_folders, paths=[path for path, _ in files])
    splits = cache(lambda root: set(chain(*splits_below(root, folders).values())))
    for path, file in files:
        try:
            label = given or _class_of(path, splits)
            query = Query(question, (uploaded_image(file),))
            example = Example(query, label_text(label), tags=tags, source=file.filename or "")
        except BottegaError as error:
            on_error(error)
        else:
            yield example


def _class_of(path: PurePosixPath, splits: Callable[[PurePosixPath], Collection[str]]) -> str:
    """Return the folder below the chosen one, or the chosen folder itself. Raises `LoadError` if
    `splits` of the chosen folder contains it."""
    chosen, *below = path.parent.parts or [""]
    if below and below[0] in splits(PurePosixPath(chosen)):
        raise LoadError(
            f"{path}: {below[0]} is a split, not a class",
            hint=f"choose the folder {chosen}/{below[0]}, or enter a label",
        )
    if not chosen:
        raise LoadError(f"{path} has no label", hint="enter a label, or choose a folder")
    return below[0] if below else chosen


def _by_id(base: KnowledgeBase, ids: Collection[str]) -> dict[str, Example]:
    return {str(one.id): one for one in existing(base, sorted(ids))}


def _threshold(visit: Visit) -> float:
    """Return the minimum cosine of near-duplicates. Raises `ApiError`."""
    text = visit.value("threshold", DEFAULT_THRESHOLD)
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= 1:
        raise ApiError(
            f"threshold must be a number from 0 to 1, got {text[:40]!r}", hint="enter e.g. 0.98"
        )
    return found
