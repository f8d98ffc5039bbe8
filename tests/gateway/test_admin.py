from __future__ import annotations

import asyncio
import base64
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger import Ledger
from bottega.gateway.accounting.ledger_schema import Entry
from bottega.gateway.apis.admin import admin_routes
from bottega.knowledge import KnowledgeBase
from bottega.openai_api.errors import ApiError
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.gateway.asgi_client import Received, call
from tests.knowledge.doubles import SeededEmbedder


@dataclass
class Desk:
    """Client of the admin API."""

    folder: Path
    accounts: Accounts
    ledger: Ledger
    caches: dict[str, KnowledgeBase] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _, self.token = self.accounts.add("op", admin=True)
        routes = admin_routes(
            self.accounts,
            self.ledger,
            self.open,
            forget=self.forgotten.append,
            max_import=100_000,
        )
        self.app = Starlette(routes=routes, exception_handlers={ApiError: reject})

    def open(self, namespace: str) -> KnowledgeBase:
        if namespace not in self.caches:
            self.caches[namespace] = KnowledgeBase.open(
                self.folder / "cache.db", SeededEmbedder(), namespace=namespace
            )
        return self.caches[namespace]

    async def __call__(
        self, method: str, path: str, body: object = b"", **params: object
    ) -> Received:
        sent = body if isinstance(body, bytes) else orjson.dumps(body)
        return await call(self.app, method, f"/admin{path}", token=self.token, body=sent, **params)


async def reject(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    fields = {"message": str(error), "type": error.type, "param": error.param, "code": error.code}
    return JSONResponse({"error": fields}, error.status, error.headers)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    accounts = Accounts(tmp_path / "gateway.db")
    ledger = Ledger(tmp_path / "gateway.db")
    desk = Desk(tmp_path, accounts, ledger)
    yield desk
    for cache in desk.caches.values():
        cache.close()
    ledger.close()
    accounts.close()


def fill(desk: Desk, namespace: str = "a") -> list[str]:
    cache = desk.open(namespace)
    for number in range(5):
        query = Query(f"What is {number}?", (solid_image(number),), ("red", "green"))
        source = "master:gpt" if number % 2 else "master:old"
        cache.add([Example(query, f"Answer {number}", source=source, rationale="because")])
    return cache.ids()


PATHS = [
    ("GET", "/keys"),
    ("POST", "/keys"),
    ("PATCH", "/keys/x"),
    ("POST", "/keys/x/rotate"),
    ("DELETE", "/keys/x"),
    ("GET", "/savings"),
    ("GET", "/stats"),
    ("GET", "/cache"),
    ("GET", "/cache/x"),
    ("DELETE", "/cache/x"),
    ("GET", "/cache/x/images/0"),
    ("POST", "/cache/x/pin"),
    ("POST", "/cache/x/unpin"),
    ("POST", "/import"),
    ("GET", "/export"),
]


def test_every_route_is_tried_without_a_key(desk: Desk) -> None:
    routes = [
        (method, route)
        for route in desk.app.routes
        for method in getattr(route, "methods", ())
        if method != "HEAD"
    ]
    assert len(routes) == len(PATHS)


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_only_admin_keys_are_accepted(desk: Desk, method: str, path: str) -> None:
    _, token = desk.accounts.add("team-a")
    gone, revoked = desk.accounts.add("gone", admin=True)
    desk.accounts.revoke(gone.id)
    before = desk.accounts.list()
    for wrong, status, code in (
        (None, 401, "invalid_api_key"),
        ("", 401, "invalid_api_key"),
        (revoked, 401, "invalid_api_key"),
        (desk.token[:-1], 401, "invalid_api_key"),
        (token, 403, "not_an_admin"),
    ):
        got = await call(desk.app, method, f"/admin{path}", token=wrong, body=b'{"name": "x"}')
        assert (got.status, got.json["error"]["code"]) == (status, code)
    assert desk.accounts.list() == before
    assert desk.caches == {}


async def test_keys_are_listed_added_and_revoked(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wanted = {"name": "team-a", "namespace": "a", "requests_per_minute": 60, "usd_per_month": 5}
    made = await desk("POST", "/keys", wanted)
    assert made.status == 201
    account = desk.accounts.authenticate(made.json["key"])
    assert account is not None
    assert (account.name, account.namespace, account.requests_per_minute) == ("team-a", "a", 60)
    desk.ledger.record(Entry(time.time(), "r", account.id, "a", "m", "m", "answered", cost_usd=1.0))
    listed = await desk("GET", "/keys")
    assert [key["name"] for key in listed.json["keys"]] == ["op", "team-a"]
    assert b"secret" not in listed.body
    assert desk.ledger.spent_this_month(account.id) == 1.0
    assert listed.json["keys"][1]["spent_this_month_usd"] == 1.0
    whole = await desk("DELETE", f"/keys/{made.json['key']}")
    assert (whole.status, "by id" in whole.json["error"]["message"]) == (400, True)
    gone = await desk("DELETE", f"/keys/{account.id}")
    assert gone.json["revoked"] > 0
    assert desk.accounts.authenticate(made.json["key"]) is None
    assert (await desk("DELETE", "/keys/none")).status == 404
    assert "POST /admin/keys" in caplog.text
    assert made.json["key"][24:] not in caplog.text


async def test_keys_are_changed_and_rotated(desk: Desk) -> None:
    made = (await desk("POST", "/keys", {"name": "team-a", "usd_per_month": 5})).json
    path = f"/keys/{made['account']['id']}"
    changed = await desk("PATCH", path, {"usd_per_month": None, "requests_per_minute": 7})
    assert (changed.json["usd_per_month"], changed.json["requests_per_minute"]) == (None, 7)
    assert (await desk("PATCH", path, {"name": None})).status == 400
    assert (await desk("PATCH", path, {"id": "x"})).status == 400
    assert (await desk("PATCH", path, {})).json["requests_per_minute"] == 7
    deep = b'{"tiers": [' + b"[" * 900 + b"]" * 900 + b"]}"
    assert (await desk("PATCH", path, deep)).status == 400
    rotated = await desk("POST", f"{path}/rotate", {"keep_seconds": 60})
    for key in (made["key"], rotated.json["key"]):
        assert desk.accounts.authenticate(key) is not None
    await desk("POST", f"{path}/rotate", {})
    assert desk.accounts.authenticate(made["key"]) is None
    assert (await desk("POST", "/keys/none/rotate", {})).status == 404


async def test_viewers_read_and_change_nothing(desk: Desk) -> None:
    _, desk.token = desk.accounts.add("eve", viewer=True)
    assert (await desk("GET", "/keys")).status == 200
    assert (await desk("POST", "/keys", {"name": "x"})).status == 403
    assert (await desk("DELETE", "/cache/x", namespace="a")).status == 403


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        {},
        {"name": 5},
        {"name": "a", "admin": 1},
        {"name": "a", "requests_per_minute": True},
        {"name": "a", "requests_per_minute": 1.5},
        {"name": "a", "usd_per_month": "5"},
        {"name": "a", "usd_per_month": -1},
        {"name": "a", "secret": "mine"},
        {"name": "a\n"},
        b'{"name": "' + b"a" * 70_000 + b'"}',
    ],
)
async def test_invalid_key_requests_are_rejected(desk: Desk, body: object) -> None:
    got = await desk("POST", "/keys", body)
    assert got.status in (400, 413)
    assert got.json["error"]["message"]
    assert len(desk.accounts.list()) == 1


async def test_examples_are_listed_newest_first(desk: Desk) -> None:
    ids = fill(desk)
    page = (await desk("GET", "/cache", namespace="a", limit=2)).json
    assert (page["total"], [one["id"] for one in page["examples"]]) == (5, [ids[4], ids[3]])
    last = (await desk("GET", "/cache", namespace="a", limit=2, offset=4)).json
    assert [one["id"] for one in last["examples"]] == [ids[0]]
    one = last["examples"][0]
    assert (one["question"], one["answer"], one["source"]) == (
        "What is 0?",
        "Answer 0",
        "master:old",
    )
    assert (one["pinned"], one["uses"], one["rationale"]) == (False, 0, "because")
    assert one["images"][0]["sha256"] == solid_image(0).sha256
    assert (await desk("GET", f"/cache/{ids[0]}", namespace="a")).json == one
    assert (await desk("GET", "/cache", namespace="a", text="ANSWER 3")).json["total"] == 1
    assert (await desk("GET", "/cache", namespace="a", source="master:old")).json["total"] == 3
    both = await desk("GET", "/cache", namespace="a", source="master:old", text="what is 1")
    assert both.json["total"] == 0


async def test_namespaces_are_separate(desk: Desk) -> None:
    ids = fill(desk, "a")
    fill(desk, "b")
    assert (await desk("GET", "/cache", namespace="c")).json["total"] == 0
    assert (await desk("GET", f"/cache/{ids[0]}", namespace="c")).status == 404
    assert (await desk("DELETE", f"/cache/{ids[0]}", namespace="c")).status == 404
    stats = (await desk("GET", "/stats", namespace="a")).json
    assert (stats["examples"], stats["namespaces"]) == (5, {"a": 5, "b": 5})
    assert "path" not in stats


async def test_image_route_returns_the_stored_bytes(desk: Desk) -> None:
    ids = fill(desk)
    got = await desk("GET", f"/cache/{ids[2]}/images/0", namespace="a")
    assert (got.body, got.headers["content-type"]) == (solid_image(2).data, "image/png")
    assert got.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in got.headers["content-security-policy"]
    assert (await desk("GET", f"/cache/{ids[2]}/images/1", namespace="a")).status == 404


async def test_examples_are_pinned_and_deleted(desk: Desk) -> None:
    first, *_ = fill(desk)
    pinned = await desk("POST", f"/cache/{first}/pin", namespace="a")
    assert pinned.json == {"changed": 1, "pinned": 1}
    assert (await desk("GET", f"/cache/{first}", namespace="a")).json["pinned"] is True
    unpinned = await desk("POST", f"/cache/{first}/unpin", namespace="a")
    assert unpinned.json == {"changed": 1, "pinned": 0}
    assert desk.forgotten == []
    gone = await desk("DELETE", f"/cache/{first}", namespace="a")
    assert gone.json == {"removed": 1, "examples": 4}
    assert desk.forgotten == ["a", "a"]  # before the deletion, and after it
    assert (await desk("DELETE", f"/cache/{first}", namespace="a")).status == 404
    assert len(desk.forgotten) == 3  # the first deletion may have failed half-way


async def test_exported_examples_are_imported_and_marked(desk: Desk) -> None:
    fill(desk, "a")
    exported = await desk("GET", "/export", namespace="a")
    assert exported.body.count(b"\n") == 5
    imported = await desk("POST", "/import", exported.body, namespace="b")
    counted = {"new": 5, "duplicates": 0, "bad": 0, "skipped": [], "examples": 5}
    assert imported.json == counted
    own_key, other_key = list(desk.open("a")), list(desk.open("b"))
    assert [e.query for e in own_key] == [e.query for e in other_key]
    assert [(e.id, e.answer, e.rationale) for e in own_key] == [
        (e.id, e.answer, e.rationale) for e in other_key
    ]
    assert {e.source for e in other_key} == {"imported by op"}
    assert {e.tags["provenance"] for e in other_key} == {"imported"}
    again = await desk("POST", "/import", exported.body, namespace="b")
    assert (again.json["new"], again.json["duplicates"]) == (0, 5)


async def test_upload_does_not_open_server_files(desk: Desk, tmp_path: Path) -> None:
    solid_image(7).decode().save(tmp_path / "secret.png")
    (tmp_path / "here.png").write_bytes(solid_image(8).data)
    names = [str(tmp_path / "secret.png"), "here.png", f"file://{tmp_path}/secret.png", "http://x/"]
    lines = [orjson.dumps({"question": "q", "answer": "a", "image": name}) for name in names]
    got = await desk("POST", "/import", b"\n".join(lines), namespace="a")
    assert (got.json["new"], got.json["bad"]) == (0, 4)
    assert "send images as data URLs" in got.json["skipped"][0]["hint"]


async def test_invalid_lines_are_reported_and_others_stored(desk: Desk) -> None:
    url = f"data:image/png;base64,{base64.b64encode(solid_image(1).data).decode()}"
    lines = [
        b"not json",
        orjson.dumps({"question": "good", "answer": "yes", "image": url}),
        orjson.dumps({"question": "no answer", "image": url}),
        orjson.dumps({"question": "q", "answer": "a", "image": "data:image/png;base64,AAAA"}),
        orjson.dumps({"question": "text alone", "answer": "yes"}),
    ]
    got = (await desk("POST", "/import", b"\n".join(lines), namespace="a")).json
    assert (got["new"], got["bad"], got["examples"]) == (2, 3, 2)
    assert [re.split(": | is", one["reason"])[0] for one in got["skipped"]] == [
        "the upload, line 1",
        "the upload, line 3",
        "the upload, line 4",
    ]


async def test_oversized_upload_is_rejected_and_not_stored(desk: Desk) -> None:
    line = orjson.dumps({"question": "q", "answer": "a"}) + b"\n"
    chunks = [line * 100] * 40
    got = await call(
        desk.app, "POST", "/admin/import", token=desk.token, body=chunks, namespace="a"
    )
    assert got.status == 413
    assert desk.caches == {}


@pytest.mark.parametrize(
    "params",
    [
        {"limit": "x"},
        {"limit": 201},
        {"limit": -1},
        {"offset": "٣"},
        {"offset": "9" * 5000},
        {"text": "\0"},
        {"source": "\0"},
        {"namespace": "\0"},
    ],
)
async def test_invalid_parameters_are_rejected(desk: Desk, params: dict[str, object]) -> None:
    assert (await desk("GET", "/cache", **params)).status == 400


async def test_savings_are_reported(desk: Desk) -> None:
    desk.ledger.record(Entry(5.0, "r", "k", "a", "master", "m", "answered", cost_usd=0.5))
    desk.ledger.record(Entry(9.0, "r", "k", "b", "master", "m", "answered", cost_usd=0.25))
    desk.ledger.flush()
    found = (await desk("GET", "/savings")).json
    assert (found["requests"], found["spent_usd"], found["master_only"]["usd"]["n"]) == (2, 0.75, 2)
    assert (await desk("GET", "/savings", namespace="b")).json["requests"] == 1
    assert (await desk("GET", "/savings", since=7)).json["requests"] == 1
    assert (await desk("GET", "/savings", since="soon")).status == 400
    assert (await desk("GET", "/savings", since="nan")).status == 400


async def test_caches_are_opened_in_threads(desk: Desk) -> None:
    first, *_ = fill(desk)
    event_loop_threads: list[bool] = []
    opened = desk.open

    def open_and_record(namespace: str) -> KnowledgeBase:
        try:
            asyncio.get_running_loop()
            event_loop_threads.append(True)
        except RuntimeError:
            event_loop_threads.append(False)
        return opened(namespace)

    app = Starlette(routes=admin_routes(desk.accounts, desk.ledger, open_and_record))
    paths = [(method, path.replace("/x", f"/{first}")) for method, path in PATHS[6:]]
    for method, path in sorted(paths, key=lambda each: each[0] == "DELETE"):
        await call(app, method, f"/admin{path}", token=desk.token, namespace="a")
    assert event_loop_threads == [False] * len(paths)
