"""Cache: search, show, correct, pin, delete, import and export the entries of a namespace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.responses import StreamingResponse
from starlette.routing import Route

from bottega._util.progress import plural
from bottega.errors import EmbeddingError, EmptyKnowledgeBaseError, NotFoundError
from bottega.gateway.request.cached_examples import (
    HUMAN,
    IMPORTED,
    Forget,
    ImportReport,
    correct_example,
    delete_example,
    export_jsonl,
    import_jsonl,
)
from bottega.knowledge import And, Contains, Eq, Filter, In, KnowledgeBase, Range
from bottega.openai_api.errors import ApiError
from bottega.types import Candidate, Example, Query
from bottega.ui.bases import MASTER, NamespacePages, existing, human_tags, paged, uploaded_image
from bottega.ui.pages import (
    HEADERS,
    Page,
    PageResult,
    Redirect,
    Renderer,
    Visit,
    image_response,
    require,
)

PAGE_SIZE = 50
NEAREST = 12
MAX_REPORTED = 100
PROVENANCES = (MASTER, IMPORTED, HUMAN)
# Bytes of the form of a search, which read-only sessions may send.
MAX_SEARCH = 24 << 20


@dataclass(frozen=True)
class CachePages(NamespacePages):
    """Handlers of the cache. `forget` removes old replies from the response cache after a change.
    Users without admin rights pin at most `max_pinned` entries: pinned ones are never evicted."""

    forget: Forget
    max_pinned: int

    def browse(self, visit: Visit) -> PageResult:
        """List entries, newest first. A text search also finds entries with similar questions."""
        base, text = self.base(visit), visit.value("text").strip()
        if (other := self.elsewhere(visit, base, "/cache")) is not None:
            return other
        found = paged(visit, _matching(base, text, visit.value("provenance")), PAGE_SIZE)
        nearest: Sequence[Candidate] = ()
        problem = ""
        if text and found.number == 1:
            nearest, problem = _nearest(base, Query(text))
        values = {"entries": existing(base, found.items), "found": found}
        return self._list(visit, base, {**values, "nearest": nearest, "problem": problem})

    def search(self, visit: Visit) -> PageResult:
        """List the entries that are most similar to an image."""
        require(visit.user.may_read(visit.namespace), "search this namespace")
        base, files = self.base(visit), visit.files("image")
        if not files:
            raise ApiError("no image was sent", hint="drop an image, or choose a file")
        image = uploaded_image(files[0])
        nearest, problem = _nearest(base, Query(visit.value("text").strip(), (image,)))
        return self._list(
            visit, base, {"nearest": nearest, "problem": problem, "searched": image.source}
        )

    def show(self, visit: Visit) -> PageResult:
        base = self.base(visit)
        example = _example(base, visit)
        values = {
            "title": "Entry",
            "entry": example,
            "metadata": base.metadata(str(example.id)),
            "request_id": example.tags.get("request", ""),
        }
        return self.page(visit, base, "cache_entry.html", values)

    def image(self, visit: Visit) -> PageResult:
        images = _example(self.base(visit), visit).query.images
        for number, image in enumerate(images):
            if str(number) == visit.part("number"):
                return image_response(image, visit.number("side", 0, most=1024) or None)
        raise NotFoundError("the entry has no such image", hint="open the entry's page")

    def edit(self, visit: Visit) -> PageResult:
        """Correct the answer, and the labels and the rationale of an entry that has them."""
        base = self.base(visit)
        old = _example(base, visit)
        new = _edited(visit, old)
        if new == old:
            return _redirect(visit, f"/cache/{old.id}", "Nothing changed")
        tags = {**old.tags, **human_tags(visit)}
        new = replace(new, tags=tags, source=f"corrected by {visit.user.name}")
        id = correct_example(base, visit.namespace, old, new, self.forget)
        return _redirect(visit, f"/cache/{id}", "Saved")

    def pin(self, visit: Visit) -> PageResult:
        base = self.base(visit)
        id = str(_example(base, visit).id)
        if not visit.user.can_administer and base.stats().pinned >= self.max_pinned:
            raise ApiError(
                f"this namespace has {plural(self.max_pinned, 'pinned entry')}, the maximum",
                status=403,
                hint="unpin some, or ask the operator to raise feedback.max_corrections",
            )
        base.pin([id])
        return _redirect(visit, f"/cache/{id}", "Pinned: the entry is never evicted")

    def unpin(self, visit: Visit) -> PageResult:
        base = self.base(visit)
        id = str(_example(base, visit).id)
        base.unpin([id])
        return _redirect(visit, f"/cache/{id}", "Unpinned: the entry may be evicted")

    def delete(self, visit: Visit) -> PageResult:
        base = self.base(visit)
        id = str(_example(base, visit).id)
        delete_example(base, visit.namespace, id, self.forget)
        return _redirect(visit, "/cache", "Deleted the entry")

    def import_(self, visit: Visit) -> PageResult:
        """Import JSON lines. The page lists the lines that were skipped."""
        base, files = self.base(visit), visit.files("file")
        if not files:
            raise ApiError("no file was sent", hint="choose a file with JSON lines")
        report = import_jsonl(base, files[0].file, visit.user.name)
        return self._list(visit, base, {"report": report})

    def export(self, visit: Visit) -> PageResult:
        lines = export_jsonl(self.base(visit))
        headers = {**HEADERS, "content-disposition": 'attachment; filename="cache.jsonl"'}
        return StreamingResponse(lines, 200, headers, "application/x-ndjson")

    def _list(self, visit: Visit, base: KnowledgeBase, values: dict[str, object]) -> Page:
        empty: dict[str, object] = {
            "title": "Cache",
            "entries": (),
            "found": None,
            "nearest": (),
            "problem": "",
            "searched": None,
            "report": None,
            "provenances": PROVENANCES,
        }
        report = values.get("report")
        if isinstance(report, ImportReport):
            empty["skipped"] = report.skipped[:MAX_REPORTED]
        return self.page(visit, base, "cache.html", {**empty, **values})


def cache_routes(renderer: Renderer, pages: CachePages) -> list[Route]:
    page = renderer.route
    return [
        page("/cache", pages.browse),
        page("/cache", pages.search, method="POST", right=None, max_bytes=MAX_SEARCH),
        page("/cache/import", pages.import_, method="POST", right="can_store"),
        page("/cache/export", pages.export),
        page("/cache/{id}", pages.show),
        page("/cache/{id}", pages.edit, method="POST", right="can_store"),
        page("/cache/{id}/images/{number}", pages.image),
        page("/cache/{id}/pin", pages.pin, method="POST", right="can_store"),
        page("/cache/{id}/unpin", pages.unpin, method="POST", right="can_store"),
        page("/cache/{id}/delete", pages.delete, method="POST", right="can_store"),
    ]


def _example(base: KnowledgeBase, visit: Visit) -> Example:
    return base.get(visit.part("id"))


def _redirect(visit: Visit, path: str, message: str) -> Redirect:
    return Redirect(path, message, {"namespace": visit.namespace})


def _matching(base: KnowledgeBase, text: str, provenance: str) -> list[str]:
    """Return the ids of the entries with this text and provenance, newest first."""
    parts: list[Filter] = [Contains(text)] if text else []
    others = set[str]()
    if provenance in (HUMAN, IMPORTED):
        parts.append(Eq("tags.provenance", provenance))
    elif provenance == MASTER:
        parts.append(Range("tags.request", low=""))  # any request
        others.update(base.ids(where=In("tags.provenance", (HUMAN, IMPORTED))))
    return [id for id in base.ids(where=And(tuple(parts))) if id not in others][::-1]


def _nearest(base: KnowledgeBase, query: Query) -> tuple[Sequence[Candidate], str]:
    """Return the nearest entries and, if the search is impossible, the reason."""
    try:
        return base.search(query, NEAREST, include_self=True), ""
    except EmptyKnowledgeBaseError:
        return (), ""
    except EmbeddingError as error:  # e.g. an image embedder and a query without an image
        return (), f"Similarity search is not possible: {error}"


def _edited(visit: Visit, old: Example) -> Example:
    """Return the example with the fields of the form. Raises `ApiError`."""
    answer = _lines(visit, "answer")
    if not answer and old.answer:
        raise ApiError("the answer is empty", hint="enter an answer, or delete the entry")
    labels, rationale = old.labels, old.rationale
    if labels is not None:
        given = map(str.strip, _lines(visit, "labels").split("\n"))
        labels = tuple(dict.fromkeys(filter(None, given)))
    if rationale is not None:
        rationale = _lines(visit, "rationale") or None
    return replace(old, answer=answer, labels=labels, rationale=rationale)


def _lines(visit: Visit, name: str) -> str:
    return visit.value(name).replace("\r\n", "\n").strip()
