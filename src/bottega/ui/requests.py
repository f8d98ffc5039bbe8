"""Requests: search, the details of one request, asking it again, and feedback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from starlette.responses import Response

from bottega.errors import ImageError, NotFoundError
from bottega.evaluation.page import ENDED, image_hashes, render_explanation
from bottega.gateway.accounting.database import Row
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.feedback import FeedbackEndpoint
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.recording import StoredTrace, TraceStore
from bottega.ui.gateway_client import GatewayClient, Settings
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
# The time narrows the search: it has an index, the id has none.
ROW = f"SELECT {FIELDS} FROM entries WHERE time >= ? AND time <= ? AND request_id = ?"
WRITE_SECONDS = 1.5  # until the ledger and the traces of a request are written
POLL_SECONDS = 0.1
STORE_HINT = 'set [traces] store = "images"'


@dataclass(frozen=True)
class RecordedRequest:
    """Request of the ledger, or of a trace alone. `trace` has its texts, None if not stored. Costs
    are in US dollars, `time` is in unix seconds."""

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
    """Handlers of the requests. Without a `ledger` they show only traces, without `traces` only
    ledger rows. `account_names` returns the names of accounts by id, `base_image` an image of a
    namespace's knowledge base by its SHA-256. Without a `client`, requests cannot be
    repeated; without `feedback`, they cannot be rated."""

    ledger: Ledger | None
    traces: TraceStore | None
    account_names: Callable[[], Mapping[str, str]]
    base_image: Callable[[str, str], Image | None]
    client: GatewayClient | None = None
    feedback: FeedbackEndpoint | None = None

    def browse(self, visit: Visit) -> Result:
        user, text = visit.user, visit.value("text").strip()
        namespace = _scope(visit)
        before = _moment(visit.value("before"))
        if self.ledger is None or text:
            found = self._search(text, namespace, visit.value("tier"), before)
        else:
            found = self._listed(visit, namespace, before)
        more = found[-1].time if len(found) > PAGE_SIZE else None
        names = self.account_names() if user.sees_all else {}
        return Page(
            "requests.html",
            {
                "title": "Requests",
                "requests": found[:PAGE_SIZE],
                "older": found[PAGE_SIZE - 1].time if more is not None else None,
                "states": STATES if self.ledger is not None else (),
                "names": names,
                "searchable": self.traces is not None,
            },
        )

    def show(self, visit: Visit) -> Result:
        recorded = self._visible(visit)
        models = [] if self.client is None else self.client.models(visit.user)
        return Page(
            "request.html",
            {
                "title": "Request",
                "request": recorded,
                "trace": recorded.trace,
                "ended": ENDED,
                "models": models if recorded.trace is not None else [],
                "names": self.account_names() if visit.user.sees_all else {},
                "can_replay": visit.user.can_edit and bool(models),
                "can_rate": visit.user.can_edit and self.feedback is not None,
                "can_correct": visit.user.can_store,
            },
        )

    def replay(self, visit: Visit) -> Result:
        """Ask the question again, with the chosen model of the gateway."""
        visit.require(visit.user.can_edit, "send requests")
        recorded = self._visible(visit)
        if self.client is None or recorded.trace is None:
            raise ApiError("the question of this request is not stored", hint=STORE_HINT)
        images = [self._image(recorded, sha256) for sha256 in recorded.trace.images]
        settings = Settings(visit.value("model", "bottega"))
        outcome = self.client.ask(
            visit.user, recorded.namespace, recorded.trace.question, images, settings, visit.loop
        )
        if outcome.error is not None:
            raise outcome.error
        record = outcome.record
        params = {"time": repr(record.begun)}
        return Redirect(f"/requests/{record.request_id}", "Asked again: see the new answer", params)

    def rate(self, visit: Visit) -> Result:
        """Store a rating or a correction, which becomes a pinned demonstration."""
        visit.require(visit.user.can_edit, "rate answers")
        recorded = self._visible(visit)
        if self.feedback is None:
            raise ApiError("this console has no gateway", hint="open the console of bottega serve")
        given: dict[str, object] = {"request_id": recorded.id}
        if rating := visit.value("rating"):
            given["rating"] = rating == "good"
        if correction := visit.value("correction").strip():
            visit.require(visit.user.can_store, "correct answers")
            given["correction"] = correction
        work = self.feedback.answer(visit.user.account, given)
        asyncio.run_coroutine_threadsafe(work, visit.loop).result()
        message = "Saved the rating"
        if correction:
            message = "Saved the correction as a pinned demonstration"
        return Redirect(f"/requests/{recorded.id}", message, {"time": repr(recorded.time)})

    def image(self, visit: Visit) -> Result:
        image = self._image(self._visible(visit), visit.part("sha256"))
        return image_response(image, visit.number("side", 0, most=1024) or None)

    def explanation(self, visit: Visit) -> Result:
        """Return the page of `bottega explain`, with the complete search tree."""
        recorded = self._visible(visit)
        if recorded.trace is None:
            raise NotFoundError("the trace of this request is not stored", hint=STORE_HINT)
        images = {}
        for sha256 in image_hashes(recorded.trace):
            with suppress(NotFoundError, ImageError):  # not stored, or damaged
                images[sha256] = self._image(recorded, sha256)
        text = render_explanation(recorded.trace, images, absent="they are not stored")
        return Response(text, 200, REPORT_HEADERS, "text/html; charset=utf-8")

    def _image(self, recorded: RecordedRequest, sha256: str) -> Image:
        shown = set[str]() if recorded.trace is None else image_hashes(recorded.trace)
        found = None
        if sha256 in shown:  # else the hash may belong to an image of another namespace
            assert self.traces is not None
            found = self.traces.image(sha256) or self.base_image(recorded.namespace, sha256)
        if found is None:
            raise NotFoundError("the image of this request is not stored", hint=STORE_HINT)
        return found

    def _visible(self, visit: Visit) -> RecordedRequest:
        """Return the request of the address. Raises `NotFoundError` also if the user may not see
        it: the error must not reveal that it exists."""
        id = visit.part("id")
        moment = _moment(visit.value("time"))
        recorded = self._found(id, moment)
        # The ledger and the traces are written in the background.
        while (recorded is None or (recorded.trace is None and self.traces)) and _is_recent(moment):
            time.sleep(POLL_SECONDS)
            recorded = self._found(id, moment)
        if recorded is None or not visit.user.may_read(recorded.namespace):
            raise NotFoundError(
                f"no request {id[:60]!r} is stored", hint="search for it on the page Requests"
            )
        return recorded

    def _found(self, id: str, moment: float | None) -> RecordedRequest | None:
        trace = None if self.traces is None else self.traces.find([id]).get(id)
        around = trace.time if trace is not None else moment
        if self.ledger is not None and around is not None:
            rows = self.ledger.read(ROW, around - 1.0, around + 1.0, id)
            own = [_from_row(row, trace) for row in rows if row[6] != "shadow"]
            if own:
                return own[0]
        if trace is None:
            return None
        assert self.traces is not None
        return _from_trace(trace, self.traces.namespace(id))

    def _listed(
        self, visit: Visit, namespace: str | None, before: float | None
    ) -> list[RecordedRequest]:
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
    ) -> list[RecordedRequest]:
        if self.traces is None:
            raise ApiError(
                "questions and answers are not stored, so they cannot be searched",
                hint='set [traces] store = "texts" or "images"',
            )
        found = self.traces.search(
            text, namespace=namespace, tier=tier or None, before=before, limit=PAGE_SIZE + 1
        )
        # A trace does not contain its namespace: it is known only if the search filtered by it.
        return [_from_trace(trace, namespace or "") for trace in found]


def _scope(visit: Visit) -> str | None:
    """Return the namespace to show, None for all of them. Raises `ApiError`."""
    wanted = visit.value("namespace") or None
    if visit.user.sees_all and wanted is None:
        return None
    return visit.user.namespace(wanted)


def _moment(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _is_recent(moment: float | None) -> bool:
    """Return whether the request may still be waiting to be written."""
    return moment is not None and 0 <= time.time() - moment < WRITE_SECONDS


def _from_row(row: Row, trace: StoredTrace | None) -> RecordedRequest:
    return RecordedRequest(*row, trace)  # type: ignore[call-arg]


def _from_trace(trace: StoredTrace, namespace: str) -> RecordedRequest:
    similarity = max((one.score for one in trace.demonstrations), default=None)
    return RecordedRequest(
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
