"""Requests: search, one request as a story, and asking it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from starlette.responses import Response

from bottega.errors import NotFoundError
from bottega.evaluation.page import image_hashes, render_explanation
from bottega.gateway.accounting.database import Row
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.feedback import FeedbackEndpoint
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.recording import StoredTrace, TraceStore
from bottega.ui.asking import Asker, Settings
from bottega.ui.pages import (
    REPORT_HEADERS,
    Page,
    Redirect,
    Result,
    Visit,
    image_response,
)

PAGE_SIZE = 50
STATES = ("answered", "replayed", "passed_through", "failed", "shadow")
FIELDS = (
    "time, request_id, account, namespace, tier, model, state, shots, similarity, prompt_tokens,"
    " completion_tokens, cost_usd, dismissed_usd, seconds, status"
)
# A request is found by its time, which has an index.
ENTRY = f"SELECT {FIELDS} FROM entries WHERE time >= ? AND time <= ? AND request_id = ?"
WRITE_SECONDS = 1.5
POLL_SECONDS = 0.1
STORE_HINT = 'set [traces] store = "images"'


@dataclass(frozen=True)
class Entry:
    """Request in the ledger. `trace` has its texts, None if they are not stored."""

    time: float
    id: str
    account: str
    namespace: str
    tier: str
    model: str
    state: str
    shots: int
    similarity: float | None
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    dismissed_usd: float
    seconds: float
    status: int
    trace: StoredTrace | None = None


@dataclass(frozen=True)
class RequestPages:
    """Handlers of the requests. Without a `ledger` they show the traces alone, without `traces` the
    ledger alone. `account_names` returns the names of accounts by id, `base_image` an image of the
    knowledge base of a namespace by its SHA-256."""

    ledger: Ledger | None
    traces: TraceStore | None
    account_names: Callable[[], Mapping[str, str]]
    base_image: Callable[[str, str], Image | None]
    asker: Asker | None = None
    feedback: FeedbackEndpoint | None = None

    def browse(self, visit: Visit) -> Result:
        viewer, text = visit.viewer, visit.value("text").strip()
        namespace = _scope(visit)
        before = _moment(visit.value("before"))
        if self.ledger is None or text:
            found = self._search(text, namespace, visit.value("tier"), before)
        else:
            found = self._entries(visit, namespace, before)
        more = found[-1].time if len(found) > PAGE_SIZE else None
        names = self.account_names() if viewer.is_admin else {}
        return Page(
            "requests.html",
            {
                "title": "Requests",
                "entries": found[:PAGE_SIZE],
                "older": found[PAGE_SIZE - 1].time if more is not None else None,
                "states": STATES if self.ledger is not None else (),
                "names": names,
                "searchable": self.traces is not None,
            },
        )

    def show(self, visit: Visit) -> Result:
        entry = self._visible(visit)
        models = [] if self.asker is None else self.asker.models(visit.viewer)
        return Page(
            "request.html",
            {
                "title": "Request",
                "entry": entry,
                "trace": entry.trace,
                "models": models if entry.trace is not None else [],
                "names": self.account_names() if visit.viewer.is_admin else {},
                "can_replay": visit.viewer.can_edit and bool(models),
                "can_rate": visit.viewer.can_edit and self.feedback is not None,
                "can_correct": visit.viewer.can_store,
            },
        )

    def replay(self, visit: Visit) -> Result:
        """Ask the question again, with another model of the gateway."""
        visit.require(visit.viewer.can_edit, "send requests")
        entry = self._visible(visit)
        if self.asker is None or entry.trace is None:
            raise ApiError("the question of this request is not stored", hint=STORE_HINT)
        images = [self._image(entry, sha256) for sha256 in entry.trace.images]
        settings = Settings(visit.value("model", "bottega"))
        outcome = self.asker.ask(
            visit.viewer, entry.namespace, entry.trace.question, images, settings, visit.loop
        )
        if outcome.error is not None:
            raise outcome.error
        record = outcome.record
        params = {"time": repr(record.begun)}
        return Redirect(f"/requests/{record.request_id}", "Asked again", params)

    def rate(self, visit: Visit) -> Result:
        """Store a rating or a correction, which becomes a pinned demonstration."""
        visit.require(visit.viewer.can_edit, "rate answers")
        entry = self._visible(visit)
        if self.feedback is None:
            raise ApiError("this console has no gateway", hint="open that of a gateway")
        given: dict[str, object] = {"request_id": entry.id}
        if rating := visit.value("rating"):
            given["rating"] = rating == "good"
        if correction := visit.value("correction").strip():
            visit.require(visit.viewer.can_store, "correct answers")
            given["correction"] = correction
        work = self.feedback.answer(visit.viewer.account, given)
        asyncio.run_coroutine_threadsafe(work, visit.loop).result()
        message = "The correction is a pinned demonstration now" if correction else "Rated"
        return Redirect(f"/requests/{entry.id}", message, {"time": repr(entry.time)})

    def image(self, visit: Visit) -> Result:
        image = self._image(self._visible(visit), str(visit.request.path_params["sha256"]))
        return image_response(image, visit.number("side", 0, most=1024) or None)

    def explanation(self, visit: Visit) -> Result:
        """Return the page with the whole search tree, as `bottega explain` writes it."""
        entry = self._visible(visit)
        if entry.trace is None:
            raise NotFoundError("the trace of this request is not stored", hint=STORE_HINT)
        images = {}
        for sha256 in image_hashes(entry.trace):
            with suppress(NotFoundError):
                images[sha256] = self._image(entry, sha256)
        text = render_explanation(entry.trace, images, absent="they are not stored")
        return Response(text, 200, REPORT_HEADERS, "text/html; charset=utf-8")

    def _image(self, entry: Entry, sha256: str) -> Image:
        shown = set[str]() if entry.trace is None else image_hashes(entry.trace)
        found = None
        if sha256 in shown:  # no other: a hash from another namespace must not open its image
            assert self.traces is not None
            found = self.traces.image(sha256) or self.base_image(entry.namespace, sha256)
        if found is None:
            raise NotFoundError("the image of this request is not stored", hint=STORE_HINT)
        return found

    def _visible(self, visit: Visit) -> Entry:
        """Return the request of the address. Raises `NotFoundError` if the viewer may not see it,
        too: the error must not tell that it exists."""
        id = str(visit.request.path_params["id"])
        moment = _moment(visit.value("time"))
        entry = self._found(id, moment)
        # The ledger and the traces are written in the background.
        while (entry is None or (entry.trace is None and self.traces)) and _is_recent(moment):
            time.sleep(POLL_SECONDS)
            entry = self._found(id, moment)
        if entry is None or not visit.viewer.may_read(entry.namespace):
            raise NotFoundError(
                f"no request {id[:60]!r} is stored", hint="search for it on the page of requests"
            )
        return entry

    def _found(self, id: str, moment: float | None) -> Entry | None:
        trace = None if self.traces is None else self.traces.find([id]).get(id)
        around = trace.time if trace is not None else moment
        if self.ledger is not None and around is not None:
            rows = self.ledger.read(ENTRY, around - 1.0, around + 1.0, id)
            own = [_from_row(row, trace) for row in rows if row[6] != "shadow"]
            if own:
                return own[0]
        if trace is None:
            return None
        assert self.traces is not None
        return _from_trace(trace, self.traces.namespace(id))

    def _entries(self, visit: Visit, namespace: str | None, before: float | None) -> list[Entry]:
        assert self.ledger is not None
        state = visit.value("state")
        conditions: list[tuple[str, str | float]] = []
        if namespace is not None:
            conditions.append(("namespace = ?", namespace))
        if tier := visit.value("tier"):
            conditions.append(("tier = ?", tier))
        conditions.append(("state = ?", state) if state in STATES else ("state != ?", "shadow"))
        if before is not None:
            conditions.append(("time < ?", before))
        where = " AND ".join(condition for condition, _ in conditions)
        rows = self.ledger.read(
            f"SELECT {FIELDS} FROM entries WHERE {where} ORDER BY time DESC LIMIT ?",
            *(value for _, value in conditions),
            PAGE_SIZE + 1,
        )
        traces = {} if self.traces is None else self.traces.find([str(row[1]) for row in rows])
        return [_from_row(row, traces.get(str(row[1]))) for row in rows]

    def _search(
        self, text: str, namespace: str | None, tier: str, before: float | None
    ) -> list[Entry]:
        if self.traces is None:
            raise ApiError(
                "questions and answers are not stored, so they cannot be searched",
                hint='set [traces] store = "texts" or "images"',
            )
        found = self.traces.search(
            text, namespace=namespace, tier=tier or None, before=before, limit=PAGE_SIZE + 1
        )
        # Only a filter for one namespace tells it; the ledger has it for the others.
        return [_from_trace(trace, namespace or "") for trace in found]


def _scope(visit: Visit) -> str | None:
    """Return the namespace to show, None for all of them."""
    wanted = visit.value("namespace") or None
    if visit.viewer.is_admin and wanted is None:
        return None
    return visit.viewer.namespace(wanted)


def _moment(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _is_recent(moment: float | None) -> bool:
    """Return whether a request of this time may not be written yet."""
    return moment is not None and 0 <= time.time() - moment < WRITE_SECONDS


def _from_row(row: Row, trace: StoredTrace | None) -> Entry:
    return Entry(*row, trace)  # type: ignore[call-arg]


def _from_trace(trace: StoredTrace, namespace: str) -> Entry:
    similarity = max((one.score for one in trace.demonstrations), default=None)
    return Entry(
        trace.time,
        trace.id,
        "",
        namespace,
        trace.tier,
        trace.model,
        "answered",
        len(trace.demonstrations),
        similarity,
        trace.usage.prompt_tokens,
        trace.usage.completion_tokens,
        trace.cost_usd,
        0.0,
        trace.seconds,
        200,
        trace,
    )
