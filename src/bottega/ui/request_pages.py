"""Requests: search, the details of one request, asking it again, and feedback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

from starlette.responses import Response

from bottega.errors import ImageError, NotFoundError
from bottega.evaluation.report.explanation import ENDED, image_hashes, render_explanation
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry, State
from bottega.gateway.accounting.reports import (
    EntryFilter,
    find_request,
    list_requests,
    request_time,
    requests_at,
)
from bottega.gateway.apis.feedback import FeedbackEndpoint
from bottega.image import Image
from bottega.openai_api.errors import ApiError
from bottega.recording import StoredTrace, TraceStore
from bottega.ui.gateway_client import GatewayClient, QuestionOptions
from bottega.ui.overview import PERIODS
from bottega.ui.pages import (
    REPORT_HEADERS,
    Page,
    PageResult,
    Redirect,
    Visit,
    image_response,
    require,
)

PAGE_SIZE = 50
STATES = get_args(State)
WRITE_SECONDS = 1.5  # until the ledger and the traces of a request are written
POLL_SECONDS = 0.1
# Only answered requests have texts, so a search for another state may find few of many.
SEARCH_ROUNDS = 10
STORE_HINT = 'set [traces] store = "images"'


@dataclass(frozen=True)
class RecordedRequest:
    """Request of the ledger, or of a trace alone. `trace` has its texts, None if not stored."""

    entry: Entry
    trace: StoredTrace | None = None


@dataclass(frozen=True)
class RequestFilter:
    """Filter of requests. `text` is in the question, the answer or a file name."""

    text: str
    entries: EntryFilter

    @classmethod
    def of(cls, visit: Visit) -> RequestFilter:
        """Return the filter of a form. Raises `ApiError` for a namespace of others."""
        state, period = visit.value("state"), PERIODS.get(visit.value("period"))
        entries = EntryFilter(
            state=state if state in STATES else None,
            namespace=_scope(visit),
            tier=visit.value("tier") or None,
            since=None if period is None else time.time() - period[0],
            before=_moment(visit.value("before")),
        )
        return cls(visit.value("text").strip(), entries)


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

    def browse(self, visit: Visit) -> PageResult:
        chosen = RequestFilter.of(visit)
        if self.ledger is None or chosen.text:
            found, older = self._search(chosen)
        else:
            found, older = self._listed(self.ledger, chosen.entries), None
        return Page(
            "requests.html",
            {
                "title": "Requests",
                "requests": found[:PAGE_SIZE],
                "older": found[PAGE_SIZE - 1].entry.time if len(found) > PAGE_SIZE else older,
                "states": STATES if self.ledger is not None else (),
                "periods": list(PERIODS),
                "names": self.account_names() if visit.user.sees_all else {},
                "searchable": self.traces is not None,
            },
        )

    def show(self, visit: Visit) -> PageResult:
        recorded = self._visible(visit)
        models = [] if self.client is None else self.client.models(visit.user)
        return Page(
            "request.html",
            {
                "title": "Request",
                "request": recorded.entry,
                "trace": recorded.trace,
                "images": self._images(recorded),
                "ended": ENDED,
                "models": models if recorded.trace is not None else [],
                "names": self.account_names() if visit.user.sees_all else {},
                "can_replay": visit.user.can_edit and bool(models),
                "can_rate": visit.user.can_edit and self.feedback is not None,
                "can_correct": visit.user.can_store,
                "stores_texts": self.traces is not None,
                "sees_all": visit.user.sees_all,
                "request_time": request_time,
            },
        )

    def replay(self, visit: Visit) -> PageResult:
        """Ask the question again, with the chosen model of the gateway."""
        recorded = self._visible(visit)
        if self.client is None or recorded.trace is None:
            raise ApiError("the question of this request is not stored", hint=STORE_HINT)
        images = [self._image(recorded, sha256) for sha256 in recorded.trace.images]
        settings = QuestionOptions(visit.value("model", "bottega"))
        outcome = self.client.ask(
            visit.user,
            recorded.entry.namespace,
            recorded.trace.question,
            images,
            settings,
            visit.loop,
        )
        if outcome.error is not None:
            raise outcome.error
        record = outcome.record
        params = {"time": repr(record.begun)}
        return Redirect(f"/requests/{record.request_id}", "Asked again: see the new answer", params)

    def rate(self, visit: Visit) -> PageResult:
        """Store a rating or a correction, which becomes a pinned demonstration."""
        entry = self._visible(visit).entry
        if self.feedback is None:
            raise ApiError("this console has no gateway", hint="open the console of bottega serve")
        given: dict[str, object] = {"request_id": entry.request_id}
        if rating := visit.value("rating"):
            given["rating"] = rating == "good"
        if correction := visit.value("correction").strip():
            require(visit.user.can_store, "correct answers")
            given["correction"] = correction
        work = self.feedback.answer(visit.user.account, given)
        asyncio.run_coroutine_threadsafe(work, visit.loop).result()
        message = "Saved the rating"
        if correction:
            message = "Saved the correction as a pinned demonstration"
        return Redirect(f"/requests/{entry.request_id}", message, {"time": repr(entry.time)})

    def image(self, visit: Visit) -> PageResult:
        image = self._image(self._visible(visit), visit.part("sha256"))
        return image_response(image, visit.number("side", 0, most=1024) or None)

    def explanation(self, visit: Visit) -> PageResult:
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
            found = self.traces.image(sha256) or self.base_image(recorded.entry.namespace, sha256)
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
        if recorded is None or not visit.user.may_read(recorded.entry.namespace):
            raise NotFoundError(
                f"no request {id[:60]!r} is stored", hint="search for it on the page Requests"
            )
        return recorded

    def _found(self, id: str, moment: float | None) -> tuple[RecordedRequest | None, bool]:
        """Return the request, and whether both the ledger and the traces have it."""
        trace = None if self.traces is None else self.traces.find([id]).get(id)
        around = trace.time if trace is not None else moment
        if self.ledger is not None and around is not None:
            entry = find_request(self.ledger, id, around)
            if entry is not None:
                return RecordedRequest(entry, trace), trace is not None or self.traces is None
        if trace is None:
            return None, False
        assert self.traces is not None
        return _from_trace(trace, self.traces.namespace(id)), self.ledger is None

    def _listed(self, ledger: Ledger, chosen: EntryFilter) -> list[RecordedRequest]:
        """Return the requests of a page and the next one."""
        entries = list_requests(ledger, chosen, PAGE_SIZE + 1)
        ids = [entry.request_id for entry in entries]
        traces = {} if self.traces is None else self.traces.find(ids)
        return [RecordedRequest(entry, traces.get(entry.request_id)) for entry in entries]

    def _search(self, chosen: RequestFilter) -> tuple[list[RecordedRequest], float | None]:
        """Return the requests with this text, and the time before which older ones may have it if
        the search has stopped early. Raises `ApiError`."""
        if self.traces is None:
            raise ApiError(
                "questions and answers are not stored, so they cannot be searched",
                hint='set [traces] store = "texts" or "images"',
            )
        found: list[RecordedRequest] = []
        entries = chosen.entries
        before = entries.before
        for _ in range(SEARCH_ROUNDS):
            traces = self.traces.search(
                chosen.text,
                namespace=entries.namespace,
                tier=entries.tier,
                before=before,
                since=entries.since,
                limit=PAGE_SIZE + 1,
            )
            joined = self._joined(traces, entries.namespace or "")
            found += [one for one in joined if entries.state in (None, one.entry.state)]
            if len(found) > PAGE_SIZE or len(traces) <= PAGE_SIZE:
                return found, None
            before = traces[-1].time
        return found, before

    def _joined(self, traces: Sequence[StoredTrace], namespace: str) -> list[RecordedRequest]:
        """Return the requests of the traces, with the fields of the ledger where it has them."""
        entries: dict[str, Entry] = {}
        if self.ledger is not None and traces:
            # An entry has the time of its trace, and times have an index.
            found = requests_at(self.ledger, [trace.time for trace in traces])
            entries = {entry.request_id: entry for entry in found}
        return [
            RecordedRequest(entries[one.id], one)
            if one.id in entries
            else _from_trace(one, namespace)
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


def _from_trace(trace: StoredTrace, namespace: str) -> RecordedRequest:
    entry = Entry(
        trace.time,
        trace.id,
        account="",
        namespace=namespace,
        tier=trace.tier,
        model=trace.model,
        state="answered",
        shots=len(trace.demonstrations),
        similarity=max((one.score for one in trace.demonstrations), default=None),
        prompt_tokens=trace.usage.prompt_tokens,
        completion_tokens=trace.usage.completion_tokens,
        cost_usd=trace.cost_usd,
        seconds=trace.seconds,
        reason=trace.reason,
    )
    return RecordedRequest(entry, trace)
