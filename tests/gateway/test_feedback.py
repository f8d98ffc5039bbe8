"""Feedback on answers: ratings, comments, and corrections that become demonstrations."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from typer.testing import CliRunner

from bottega._util.caching import FairSemaphore
from bottega.cli.app import app
from bottega.errors import StoreError
from bottega.gateway.accounting.access import ANONYMOUS
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import FILE, Feedback
from bottega.gateway.accounting.reports import add_feedback, find_request, read_feedback
from bottega.gateway.apis.feedback import FeedbackEndpoint
from bottega.gateway.config.gateway_settings import FeedbackSettings, TraceSettings
from bottega.gateway.request.exchange import request_id
from bottega.gateway.running.build import build
from bottega.gateway.running.server import GatewayServer
from bottega.knowledge import KnowledgeBase, PixelEmbedder
from bottega.knowledge.eviction import FirstInFirstOutEviction
from bottega.knowledge.sqlite.rows import SqliteRows
from bottega.openai_api.errors import ApiError
from bottega.recording import CacheRecorder
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.gateway.gateways import ENVIRONMENT, gateway_config, run_gateway
from tests.gateway.harness import QUESTION, client, user_messages
from tests.gateway.ledgers import entry
from tests.server import Server, ok, running

MASTER, SMALL = "bottega:route=large", "bottega:route=small"


@dataclass
class Client:
    """OpenAI client with the feedback endpoint."""

    real: openai.OpenAI

    def ask(self, *shades: int, model: str = MASTER, text: str = QUESTION, **more: Any) -> Any:
        return self.real.chat.completions.with_raw_response.create(
            model=model, messages=user_messages(*shades, text=text), **more
        )

    def send(self, reply: Any = None, **fields: Any) -> dict[str, Any]:
        if reply is not None:
            fields["request_id"] = reply.headers["x-request-id"]
        found: Any = self.real.post("/feedback", body=fields, cast_to=object)
        return dict(found)


@contextmanager
def gateway(
    folder: Path,
    endpoint: Server,
    *keys: str,
    change: Callable[[GatewayServer], None] = lambda server: None,
    traces: str = "none",
    **settings: Any,
) -> Iterator[Any]:
    """Start a gateway. Yield a client for each key, or one without keys."""
    config = gateway_config(folder, endpoint.url).override(host=None, port=None, data=folder)
    cache = replace(config.cache, embed="pixels")
    config = replace(config, cache=cache, feedback=FeedbackSettings(**settings))
    config = replace(config, traces=TraceSettings(traces))  # type: ignore[arg-type]
    server = build(config, ENVIRONMENT)
    change(server)
    with run_gateway(server) as url, client(url) as real:
        clients = [Client(real.with_options(api_key=key)) for key in keys]
        yield (server, *clients) if keys else (server, Client(real))


def exported(folder: Path, *options: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["feedback", "export", "--data", str(folder), *options])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_ratings_are_stored_and_counted(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint) as (server, one):
        first, second = one.ask(1), one.ask(2)
        assert one.send(first, rating=True)["rating"] == 1.0
        stored = one.send(second, rating=0.25, comment="too short")
        assert stored == {
            "object": "feedback",
            "request_id": second.headers["x-request-id"],
            "rating": 0.25,
            "correction": None,
            "comment": "too short",
            "example": None,
        }
        one.send(second, rating=0)  # replaces the rating and keeps the comment
        text = server.metrics.exposition().decode()
    assert 'bottega_rating_count{route="large"} 3.0' in text
    assert 'bottega_feedback_total{kind="comment"} 1.0' in text
    rows = exported(tmp_path)
    assert [(row["rating"], row["comment"], row["tier"]) for row in rows] == [
        (1.0, None, "large"),
        (0.0, "too short", "large"),
    ]
    assert exported(tmp_path, "--corrections") == exported(tmp_path, "--namespace", "x") == []


def test_feedback_counts_as_a_request_of_its_key(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        _, single = accounts.add("single", max_concurrent=1)
    answering, go = threading.Event(), threading.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        answering.set()
        await asyncio.to_thread(go.wait, 60)
        return await ok("seven")(request)

    with gateway(tmp_path, endpoint, single) as (_, one), ThreadPoolExecutor(1) as pool:
        reply = one.ask(1, model="bottega")
        endpoint.answers = [hold]
        held = pool.submit(one.ask, 2, model="bottega")
        assert answering.wait(60)
        try:
            with pytest.raises(openai.RateLimitError, match="concurrent requests"):
                one.send(reply, rating=1)
        finally:
            go.set()
        held.result(60)
        for _ in range(2):
            assert one.send(reply, rating=1)["rating"] == 1.0


def test_ids_of_other_apis_are_accepted(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint) as (_, one):
        response = one.real.responses.create(model=MASTER, input="hi")
        assert one.send(response_id=response.id, rating=1)["request_id"].startswith("req_")
        completion = one.real.completions.create(model=MASTER, prompt="hello")
        assert one.send(response_id=completion.id, rating=1)["rating"] == 1.0
        with pytest.raises(openai.BadRequestError, match="x-request-id"):
            one.send(response_id=one.ask(1).parse().id, rating=1)


def test_correction_becomes_a_pinned_demonstration(endpoint: Server, tmp_path: Path) -> None:
    endpoint.answers = [ok("seven")]
    with gateway(tmp_path, endpoint) as (server, one):
        wrong = one.ask(1)  # the stored example has the question and the image
        stored = one.send(wrong, correction="eight", rating=False)
        cache = server.tenants.base("")
        (example,) = cache
        assert (example.id, example.answer) == (stored["example"], "eight")
        assert (example.query.text, example.query.images) == (QUESTION, (solid_image(1),))
        assert (example.tags["provenance"], example.source) == ("human", "corrected by anonymous")
        assert example.tags["request"] == wrong.headers["x-request-id"]
        assert cache.metadata(example.id).pinned
        # The wrong answer is not repeated, and the master's next one replaces nothing.
        again = one.ask(1)
        assert again.headers["x-bottega-cache"] != "replayed"
        assert [one.answer for one in cache] == ["eight"]
        assert one.ask(2, model=SMALL).headers["x-bottega-demonstrations"] == "1"
        shown = [message["content"] for message in endpoint.bodies[-1]["messages"]]
        assert "eight" in shown
        # A second correction replaces the first one.
        assert one.send(wrong, correction="nine")["example"] != stored["example"]
        assert [one.answer for one in cache] == ["nine"]
        assert cache.stats().pinned == 1
    (row,) = exported(tmp_path, "--corrections")
    assert (row["correction"], row["rating"]) == ("nine", 0.0)


def test_question_of_an_apprentice_comes_from_the_client(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint) as (server, one):
        one.ask(1, model=SMALL)  # the cold start needs an answer
        reply = one.ask(5, model=SMALL)
        with pytest.raises(openai.BadRequestError, match="not stored") as refused:
            one.send(reply, correction="eight")
        assert refused.value.code == "question_not_kept"
        system = {"role": "system", "content": "Be short."}
        messages = [system, *user_messages(5)]
        one.send(reply, correction="eight", messages=messages)
        (example,) = server.tenants.base("")
        assert example.query.images == (solid_image(5),) and example.tags["context"]
        seen = one.real.chat.completions.with_raw_response.create(
            model=SMALL, messages=[system, *user_messages(6)]
        )
        assert seen.headers["x-bottega-demonstrations"] == "1"
        with pytest.raises(openai.BadRequestError, match="one turn"):
            turn = {"role": "assistant", "content": "a"}
            one.send(reply, correction="x", messages=[*messages, turn, *user_messages(5)])


def test_question_may_come_from_a_lookup(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint) as (server, one):
        reply = one.ask(5, model=SMALL)
        query = Query(QUESTION, (solid_image(5),))
        own = FeedbackEndpoint(
            server.gateway,
            server.ledger,
            FeedbackSettings(),
            server.tenants.base,
            find_query=lambda id: query if id == reply.headers["x-request-id"] else None,
        )
        given = {"request_id": reply.headers["x-request-id"], "correction": "eight"}
        asyncio.run_coroutine_threadsafe(own.answer(ANONYMOUS, given), server.tenants._loop).result(
            20
        )
        (example,) = server.tenants.base("")
        assert (example.query.images, example.answer) == (query.images, "eight")


def test_question_may_come_from_a_trace_of_one_turn(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, traces="images") as (server, one):
        one.ask(1)
        single = one.ask(5, model=SMALL)
        assert single.headers["x-bottega-demonstrations"] == "1"
        turns = [*user_messages(6), {"role": "assistant", "content": "a"}, *user_messages(7)]
        several = one.real.chat.completions.with_raw_response.create(model=SMALL, messages=turns)
        end = time.monotonic() + 20
        while server.traces.store.summary().count < 3 and time.monotonic() < end:
            time.sleep(0.01)
        id = one.send(single, correction="eight")["example"]
        assert server.tenants.base("").get(id).query.images == (solid_image(5),)
        with pytest.raises(openai.BadRequestError, match="not stored"):
            one.send(several, correction="nine")


def test_keys_see_their_own_namespace_only(endpoint: Server, tmp_path: Path) -> None:
    with closing(Accounts(tmp_path / FILE)) as accounts:
        team = accounts.add("team", namespace="a", tiers=["*"])[1]
        colleague = accounts.add("colleague", namespace="a", can_store=False)[1]
        other = accounts.add("other", namespace="b")[1]
        root = accounts.add("root", admin=True)[1]
    with gateway(tmp_path, endpoint, team, colleague, other, root) as (_, *clients):
        ours, colleagues, others, admin = clients
        reply = ours.ask(1)
        below = ours.ask(1, extra_headers={"x-bottega-namespace": "a/b"})
        with pytest.raises(openai.NotFoundError, match="no such request"):
            others.send(reply, rating=1)
        with pytest.raises(openai.NotFoundError, match="no such request"):
            ours.send(request_id=f"req_{0:032x}", rating=1)
        assert colleagues.send(reply, rating=1)["rating"] == 1.0
        with pytest.raises(openai.PermissionDeniedError, match="may not correct"):
            colleagues.send(reply, correction="eight")
        assert ours.send(below, rating=0)["rating"] == 0.0
        assert ours.send(reply, correction="eight")["example"]
        assert admin.send(reply, rating=0.5)["rating"] == 0.5
    assert {row["namespace"] for row in exported(tmp_path)} == {"a", "a/b"}


def test_corrections_are_limited(endpoint: Server, tmp_path: Path) -> None:
    with gateway(tmp_path, endpoint, max_corrections=1) as (_, one):
        first = one.ask(1)
        for correction in ("a", "b"):  # the second one replaces the first
            one.send(first, correction=correction)
        with pytest.raises(openai.PermissionDeniedError, match="limit of corrections, 1"):
            one.send(one.ask(2), correction="b")
    with (
        gateway(tmp_path / "off", endpoint, corrections=False) as (_, one),
        pytest.raises(openai.PermissionDeniedError, match="may not correct"),
    ):
        one.send(one.ask(1), correction="a")


def test_only_corrections_of_one_question_replace_each_other(
    endpoint: Server, tmp_path: Path
) -> None:
    with gateway(tmp_path, endpoint, max_corrections=1) as (_, one):
        endpoint.answers = [ok("seven")]
        first = one.ask(1)
        one.send(first, correction="seven")  # the master's answer, confirmed
        one.send(first, correction="a", messages=user_messages(1))
        for reply in (first, one.ask(2)):
            with pytest.raises(openai.PermissionDeniedError, match="limit of corrections, 1"):
                one.send(reply, correction="b", messages=user_messages(2))


class ObservedTurns(FairSemaphore):
    """Semaphore of one place that sets `occupied` when a second one has to wait for it."""

    occupied: asyncio.Event

    async def acquire(self, need: int, seconds: float | None = None) -> str:
        if not self.free:
            self.occupied.set()
        return await super().acquire(need, seconds)


def test_concurrent_corrections_respect_the_limit(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, turns, limit = CacheRecorder.store, ObservedTurns(1, 1), FeedbackSettings(True, 1)

    async def store_when_occupied(self: CacheRecorder, example: Example, **more: Any) -> Any:
        await turns.occupied.wait()
        return await store(self, example, **more)

    with gateway(tmp_path, endpoint) as (server, one):
        replies = [one.ask(shade).headers["x-request-id"] for shade in (1, 2)]
        own = FeedbackEndpoint(
            server.gateway, server.ledger, limit, server.tenants.base, _turns=turns
        )

        async def send_both() -> list[Any]:
            turns.occupied = asyncio.Event()
            given = ({"request_id": id, "correction": "c"} for id in replies)
            sending = (own.answer(ANONYMOUS, one) for one in given)
            return await asyncio.gather(*sending, return_exceptions=True)

        monkeypatch.setattr(CacheRecorder, "store", store_when_occupied)
        sent = asyncio.run_coroutine_threadsafe(send_both(), server.tenants._loop).result(60)
        assert server.tenants.base("").stats().pinned == 1
    [refused] = [one.code for one in sent if isinstance(one, ApiError)]
    assert refused == "too_many_corrections"


Write = Callable[[], object]


@contextmanager
def before_each_write(server: Any, interfere: Write) -> Iterator[None]:
    """Call `interfere` before each write of the gateway's knowledge base."""
    own, transaction = server.tenants.base("")._rows, SqliteRows.transaction

    def interleaved(self: SqliteRows) -> Any:
        if self is own:
            interfere()
        return transaction(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SqliteRows, "transaction", interleaved)
        yield


@pytest.mark.parametrize("event", ["newer answer", "eviction"])
def test_acknowledged_correction_survives_concurrent_writes(
    endpoint: Server, tmp_path: Path, event: str
) -> None:
    with gateway(tmp_path, endpoint) as (server, one):
        wrong = one.ask(1)
        numbers = itertools.count()
        with KnowledgeBase.open(
            tmp_path / "cache.db", PixelEmbedder(), capacity=2, evict=FirstInFirstOutEviction()
        ) as others:

            def write() -> None:
                answer, question = f"other {next(numbers)}", Query(QUESTION, (solid_image(1),))
                if event == "newer answer":
                    others.replace([Example(question, answer, tags={"context": ""})])
                else:
                    others.add(
                        Example(Query(f"{n}{answer}", (solid_image(3),)), answer) for n in "ab"
                    )

            with before_each_write(server, write):
                stored = one.send(wrong, correction="eight")["example"]
            write()
        assert next(numbers) >= 2
        assert server.tenants.base("").metadata(stored).pinned


def test_question_is_found_while_a_newer_answer_replaces_its_example(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gateway(tmp_path, endpoint) as (server, one):
        wrong = one.ask(1)
        base, ids = server.tenants.base(""), KnowledgeBase.ids
        (example,) = base
        replaced = threading.Event()

        def find_and_replace(self: KnowledgeBase, **filters: Any) -> list[str]:
            found = ids(self, **filters)
            if not replaced.is_set():
                replaced.set()
                base.replace([replace(example, answer="other", id=None)])
            return found

        monkeypatch.setattr(KnowledgeBase, "ids", find_and_replace)
        stored = one.send(wrong, correction="eight")["example"]
        assert replaced.is_set() and base.get(stored).query.images == (solid_image(1),)


@pytest.mark.parametrize("failing", range(4))
def test_failed_correction_keeps_the_earlier_one(
    endpoint: Server, tmp_path: Path, failing: int
) -> None:
    with gateway(tmp_path, endpoint) as (server, one):
        wrong = one.ask(1)
        acknowledged = one.send(wrong, correction="eight")["example"]
        writes = itertools.count()

        def fail() -> None:
            if next(writes) == failing:
                raise StoreError("the disk is full")

        with before_each_write(server, fail):
            try:
                acknowledged = one.send(wrong, correction="nine")["example"]
            except openai.APIStatusError:
                assert next(writes) > failing
        assert server.tenants.base("").metadata(acknowledged).pinned


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, None),
        ({"rating": 2}, "rating"),
        ({"rating": "good"}, "rating"),
        ({"rating": float(-1)}, "rating"),
        ({"correction": " "}, "correction"),
        ({"comment": "x" * 20_000}, "comment"),
        ({"rating": 1, "score": 1}, "score"),
        ({"rating": 1, "request_id": "chatcmpl-1"}, "request_id"),
        ({"rating": 1, "request_id": None}, "request_id"),
    ],
)
def test_invalid_feedback_is_rejected(
    shared: Client, given: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        shared.send(**{"request_id": f"req_{0:032x}", **given})
    assert refused.value.param == param


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with running() as endpoint, gateway(tmp_path_factory.mktemp("f"), endpoint) as (_, one):
        yield one


@pytest.fixture(params=["file", "postgres"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        url: str = request.getfixturevalue("gateway_database")
        return url
    return str(tmp_path / "gateway.db")


def test_feedback_in_both_databases(location: str) -> None:
    id, other = request_id(), request_id()
    one = Feedback(1.0, id, "a", "ns", "master", rating=0.5, comment="\0é")
    with closing(Ledger(location, clock=lambda: 100 * 86_400.0)) as ledger:
        ledger.record(replace(entry(1), request_id=id, state="shadow"))
        ledger.flush()
        assert find_request(ledger, id) is None
        ledger.record(replace(entry(1), request_id=id))
        ledger.flush()
        found = find_request(ledger, id)
        assert found is not None and found.namespace == "ns"
        assert find_request(ledger, other) is find_request(ledger, "r1") is None
        add_feedback(ledger, one)
        add_feedback(ledger, replace(one, time=2.0, rating=None, comment=None, correction="c"))
        add_feedback(ledger, replace(one, account="b", time=3.0))
        merged = replace(one, time=2.0, comment="�é", correction="c")
        assert next(read_feedback(ledger)) == merged
        assert len(list(read_feedback(ledger, since=2.5))) == 1
        assert list(read_feedback(ledger, namespace="other")) == []
        ledger.prune(30)
        assert list(read_feedback(ledger)) == []
