"""Requests: search, the details of one request, asking it again, and feedback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from starlette.responses import Response

from bottega.errors import ImageError, NotFoundError
from bottega.evaluation.page import ENDED, image_hashes, render_explanation
from bottega.gateway.accounting.database import Row, Value
from bottega.gateway.accounting.feedback import request_time
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.feedback import FeedbackEndpoint
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.recording import StoredTrace, TraceStore
from bottega.ui.gateway_client import GatewayClient, Settings
from bottega.ui.overview import PERIODS
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
    " completion_tokens, cost_usd, dismissed_usd, seconds, status, variant, reason"
)
# The time narrows the search: it has an index, the id has none.
ROW = f"SELECT {FIELDS} FROM entries WHERE time >= ? AND time <= ? AND request_id = ?"
WRITE_SECONDS = 1.5  # until the ledger and the traces of a request are written
POLL_SECONDS = 0.1
# Texts are those of answered requests, so a search for another state may find few of many.
SEARCH_ROUNDS = 10
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
    variant: str = ""
    reason: str = ""
    trace: StoredTrace | None = None


@dataclass(frozen=True)
class RequestFilter:
    """Filter of requests. `text` is in the question, the answer or a file name; `state` is "" for
    any, and `namespace` None for all. Times are in unix seconds."""

    text: str
    tier: str
    state: str
    namespace: str | None
    since: float | None
    before: float | None

    @classmethod
    def of(cls, visit: Visit) -> RequestFilter:
        """Return the filter of a form. Raises `ApiError` for a namespace of others."""
        state, period = visit.value("state"), PERIODS.get(visit.value("period"))
        return cls(
            visit.value("text").strip(),
            visit.value("tier"),
            state if state in STATES else "",
            _scope(visit),
            None if period is None else time.time() - period[0],
            _moment(visit.value("before")),
        )

    def condition(self) -> tuple[str, list[Value]]:
        """Return the SQL condition on the ledger, except that on the text, and its values."""
        parts: list[tuple[str, Value]] = [
            ("state = ?", self.state) if self.state else ("state != ?", "shadow")
        ]
        if self.namespace is not None:
            parts.append(("namespace = ?", self.namespace))
        if self.tier:
            parts.append(("tier = ?", self.tier))
        if self.since is not None:
            parts.append(("time >= ?", self.since))
        if self.before is not None:
            parts.append(("time < ?", self.before))
        return " AND ".join(sql for sql, _ in parts), [value for _, value in parts]


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
        chosen = RequestFilter.of(visit)
        if self.ledger is None or chosen.text:
            found, older = self._search(chosen)
        else:
            found, older = self._listed(chosen)
        return Page(
            "requests.html",
            {
                "title": "Requests",
                "requests": found[:PAGE_SIZE],
                "older": found[PAGE_SIZE - 1].time if len(found) > PAGE_SIZE else older,
                "states": STATES if self.ledger is not None else (),
                "periods": list(PERIODS),
                "names": self.account_names() if visit.user.sees_all else {},
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
                "images": self._images(recorded),
                "ended": ENDED,
                "models": models if recorded.trace is not None else [],
                "names": self.account_names() if visit.user.sees_all else {},
                "can_replay": visit.user.can_edit and bool(models),
                "can_rate": visit.user.can_edit and self.feedback is not None,
                "can_correct": visit.user.can_store,
                "stores_texts": self.traces is not None,
                "request_time": request_time,
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
        images = self._images(recorded)
        text = render_explanation(recorded.trace, images, absent="they are not stored")
        return Response(text, 200, REPORT_HEADERS, "text/html; charset=utf-8")

    def _images(self, recorded: RecordedRequest) -> dict[str, Image]:
        """Return the stored images of a request by SHA-256: some may not be stored, or be deleted
        with their example since."""
        images = {}
        for sha256 in () if recorded.trace is None else image_hashes(recorded.trace):
            with suppress(NotFoundError, ImageError):  # not stored, or damaged
                images[sha256] = self._image(recorded, sha256)
        return images

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
        moment = _moment(visit.value("time")) or request_time(id)
        recorded, is_complete = self._found(id, moment)
        # The ledger and the traces are written in the background.
        while not is_complete and _is_recent(moment):
            time.sleep(POLL_SECONDS)
            recorded, is_complete = self._found(id, moment)
        if recorded is None or not visit.user.may_read(recorded.namespace):
            raise NotFoundError(
                f"no request {id[:60]!r} is stored", hint="search for it on the page Requests"
            )
        return recorded

    def _found(self, id: str, moment: float | None) -> tuple[RecordedRequest | None, bool]:
        """Return the request, and whether both the ledger and the traces have it."""
        trace = None if self.traces is None else self.traces.find([id]).get(id)
        around = trace.time if trace is not None else moment
        if self.ledger is not None and around is not None:
            rows = self.ledger.read(ROW, around - 1.0, around + 1.0, id)
            own = [_from_row(row, trace) for row in rows if row[6] != "shadow"]
            if own:
                return own[0], trace is not None or self.traces is None
        if trace is None:
            return None, False
        assert self.traces is not None
        return _from_trace(trace, self.traces.namespace(id)), self.ledger is None

    def _listed(self, chosen: RequestFilter) -> tuple[list[RecordedRequest], float | None]:
        """Return the requests of a page and the next one. The second value is that of `_search`."""
        assert self.ledger is not None
        where, values = chosen.condition()
        rows = self.ledger.read(
            f"SELECT {FIELDS} FROM entries WHERE {where} ORDER BY time DESC LIMIT ?",
            *values,
            PAGE_SIZE + 1,
        )
        traces = {} if self.traces is None else self.traces.find([str(row[1]) for row in rows])
        return [_from_row(row, traces.get(str(row[1]))) for row in rows], None

    def _search(self, chosen: RequestFilter) -> tuple[list[RecordedRequest], float | None]:
        """Return the requests with this text, and the time before which older ones may have it if
        the search has stopped early. Raises `ApiError`."""
        if self.traces is None:
            raise ApiError(
                "questions and answers are not stored, so they cannot be searched",
                hint='set [traces] store = "texts" or "images"',
            )
        found: list[RecordedRequest] = []
        before = chosen.before
        for _ in range(SEARCH_ROUNDS):
            traces = self.traces.search(
                chosen.text,
                namespace=chosen.namespace,
                tier=chosen.tier or None,
                before=before,
                since=chosen.since,
                limit=PAGE_SIZE + 1,
            )
            joined = self._joined(traces, chosen.namespace or "")
            found += [one for one in joined if chosen.state in ("", one.state)]
            if len(found) > PAGE_SIZE or len(traces) <= PAGE_SIZE:
                return found, None
            before = traces[-1].time
        return found, before

    def _joined(self, traces: Sequence[StoredTrace], namespace: str) -> list[RecordedRequest]:
        """Return the requests of the traces, with the fields of the ledger where it has them."""
        rows: dict[str, Row] = {}
        if self.ledger is not None and traces:
            # An entry has the time of its trace, and times have an index.
            marks = ", ".join("?" * len(traces))
            sql = f"SELECT {FIELDS} FROM entries WHERE time IN ({marks}) AND state != 'shadow'"
            rows = {str(row[1]): row for row in self.ledger.read(sql, *(t.time for t in traces))}
        return [
            _from_row(rows[one.id], one) if one.id in rows else _from_trace(one, namespace)
            for one in traces
        ]


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
        reason=trace.reason,
        trace=trace,
    )
