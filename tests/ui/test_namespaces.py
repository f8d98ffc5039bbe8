"""Every route of the console, for keys that may not see or change what the route names."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from bottega.gateway.accounting.ledger_schema import Account, Entry
from bottega.gateway.accounting.reports import read_feedback
from bottega.types import Answer, Example, Query
from tests.builders import solid_image
from tests.recording.test_traces import trace
from tests.server import Server
from tests.ui.conftest import Console, console
from tests.ui.test_sessions import SAME, jar

ANN = Account("", "ann", namespace="team-a")
BOB = Account("", "zzforeign", namespace="team-b")
EVE = Account("", "eve", viewer=True)
FOREIGN = "zzforeign"  # in all texts of the other namespace
# Status for a key of another namespace by route: with ids of the other namespace, and with the name
# of that namespace. None: the route acts in the namespace of the key.
STATUS: Mapping[str, tuple[int | None, int]] = {
    "GET /overview": (200, 403),
    "GET /requests": (200, 403),
    "GET /requests/{id}": (404, 404),
    "GET /requests/{id}/images/{sha256}": (404, 404),
    "GET /requests/{id}/explanation": (404, 404),
    "POST /requests/{id}/replay": (404, 404),
    "POST /requests/{id}/feedback": (404, 404),
    "GET /playground": (200, 403),
    "POST /playground": (None, 403),
    "GET /cache": (200, 403),
    "POST /cache": (None, 403),
    "POST /cache/import": (None, 403),
    "GET /cache/export": (200, 403),
    "GET /cache/{id}": (404, 403),
    "POST /cache/{id}": (404, 403),
    "GET /cache/{id}/images/{number}": (404, 403),
    "POST /cache/{id}/pin": (404, 403),
    "POST /cache/{id}/unpin": (404, 403),
    "POST /cache/{id}/delete": (404, 403),
    "GET /knowledge": (200, 403),
    "GET /knowledge/map": (200, 403),
    "GET /knowledge/duplicates": (200, 403),
    "GET /knowledge/wrong-labels": (200, 403),
    "POST /knowledge/wrong-labels": (200, 403),
    "GET /knowledge/add": (200, 403),
    "POST /knowledge/add": (None, 403),
    "GET /evaluations": (403, 403),
    "GET /evaluations/run": (403, 403),
    "GET /evaluations/items": (403, 403),
    "GET /evaluations/item": (403, 403),
    "GET /evaluations/image": (403, 403),
    "GET /evaluations/report": (403, 403),
    "GET /keys": (403, 403),
    "POST /keys": (403, 403),
    "POST /keys/{id}/change": (403, 403),
    "POST /keys/{id}/rotate": (403, 403),
    "POST /keys/{id}/revoke": (403, 403),
    "GET /{path:path}": (404, 404),
}
COMMON = {
    *("GET ", "GET /", "GET /login", "POST /login", "POST /logout", "GET /static/{name}"),
}
READS = "POST /cache"  # searches by image
FORMS = (
    {"action": "ask", "question": "Whose?", "answer": "x", "model": "bottega", "rating": "good"},
    {"action": "add", "question": "Whose?", "answer": "x", "correction": "x", "name": "x"},
)
MOMENT = 1_800_000_000.0


@asynccontextmanager
async def session(served: Console, name: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as opened:
        async with opened.post(f"{served.url}/login", data={"key": served.keys[name]}) as reply:
            assert reply.status in (200, 403)  # of the start page
        yield opened


async def send(
    client: aiohttp.ClientSession, url: str, method: str = "GET", form: Mapping[str, str] = FORMS[0]
) -> tuple[int, str]:
    """Return status and text, with files of all kinds in a form; wait for analyses."""
    fields = None
    while True:
        if method == "POST":
            fields = aiohttp.FormData({**form})
            for name in ("images", "image", "file"):
                fields.add_field(name, solid_image(1).data, filename="a.png")
        async with client.request(method, url, data=fields) as reply:
            text = (await reply.read()).decode(errors="replace")  # images, too
            if "refresh" not in reply.headers:
                return reply.status, text


def routes(served: Console) -> Iterator[str]:
    for route in served.routes:
        for method in route.methods or ():
            if method != "HEAD":
                yield f"{method} {route.path.removeprefix('/ui')}"


def add_content(served: Console, number: int, text: str, namespace: str) -> dict[str, str]:
    """Store an example and a request with its trace; return the values of parameters of routes by
    the first part of the route."""
    image = solid_image(number)
    base = served.open_base(namespace)
    base.add([Example(Query(f"{text}?", (image,)), text, (text,), source=text)])
    traces, accounts = served.server.traces, {a.namespace: a for a in served.server.accounts.list()}
    assert traces is not None
    id, account = f"req_{number:032x}", accounts[namespace].id
    one = trace(id, MOMENT)
    one = replace(one, query=Query(f"{text}?", (image,)), answer=Answer(text))
    traces.store.write([one], namespace=namespace, images=True)
    ledger = served.server.ledger
    # The master answers in one namespace only: its mean cost is not shown in others.
    for tier in ("small", "large")[:number]:
        ledger.record(
            Entry(MOMENT, id, account, namespace, tier, "m", "answered", 2, number / 9,
                  cost_usd=float(number), seconds=float(number))
        )  # fmt: skip
    ledger.flush()
    found = {"requests": id, "cache": base.ids()[-1], "keys": account, "sha256": image.sha256}
    return {**found, "number": "0", "path:path": text}


def path_of(route: str, values: Mapping[str, str]) -> str:
    """Return the path of a route with parameters filled in."""
    path = route.partition(" ")[2]
    own = {**values, "id": values.get(path.split("/")[1], "")}
    return re.sub(r"{([^}]+)}", lambda found: own[found[1]], path)


def state(served: Console, endpoint: Server) -> object:
    """Return all that a change through the console could alter."""
    bases = [served.open_base(namespace) for namespace in ("", "team-a", "team-b", "x")]
    return (
        [[(one, base.metadata(str(one.id)).pinned) for one in base] for base in bases],
        served.server.accounts.list(),
        [*read_feedback(served.server.ledger)],
        served.server.ledger.read("SELECT count(*) FROM gateway_entries"),
        len(endpoint.bodies),
    )


@pytest.fixture
def served(endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Console]:
    clock = SimpleNamespace(time=lambda: MOMENT + 100)
    monkeypatch.setattr("bottega.ui.overview.time", clock)
    with console(tmp_path, endpoint, ANN, BOB, EVE) as opened:
        yield opened


async def test_a_key_neither_sees_nor_changes_another_namespace(
    served: Console, endpoint: Server
) -> None:
    assert {*routes(served)} - COMMON == {*STATUS}
    add_content(served, 1, "own", "team-a")
    values = add_content(served, 2, FOREIGN, "team-b")
    before = state(served, endpoint)
    async with session(served, "ann") as client:
        for route, statuses in STATUS.items():
            method, path = route.partition(" ")[0], path_of(route, values)
            for query, status in zip(("", "?namespace=team-b"), statuses, strict=True):
                for form in FORMS[: 2 if method == "POST" else 1]:
                    if status is None:
                        continue
                    form = {**form, "relabel": f"{values['cache']} x"}
                    sent = await send(client, f"{served.url}{path}{query}", method, form)
                    assert sent[0] == status, (route, query, sent)
                    shown = sent[1].replace(path.rpartition("/")[2], "")  # the address itself
                    assert FOREIGN not in shown, route
    assert state(served, endpoint) == before


async def test_another_namespace_does_not_alter_the_pages_of_a_key(served: Console) -> None:
    values = add_content(served, 1, "own", "team-a")
    own = [
        path_of(route, values)
        for route in STATUS
        if route.startswith("GET") and not route.startswith(("GET /evaluations", "GET /keys"))
    ]
    own += ["/requests?text=o", "/cache?text=o", "/knowledge?label=own", "/overview?period=1h"]

    async def pages() -> dict[str, str]:
        found = {}
        async with session(served, "ann") as client:
            for path in own:
                status, text = await send(client, f"{served.url}{path}")
                assert status == (404 if path == "/own" else 200), path
                found[path] = re.sub(r"\d+ \w+ ago", "", text)
        return found

    before = await pages()
    assert "own" in before["/requests"] and "$1.00" in before["/overview"]
    add_content(served, 2, FOREIGN, "team-b")
    assert await pages() == before


async def test_a_viewer_sees_keys_and_changes_nothing(served: Console, endpoint: Server) -> None:
    values = add_content(served, 1, "own", "team-a")
    before = state(served, endpoint)
    async with session(served, "eve") as client:
        status, text = await send(client, f"{served.url}/keys")
        assert status == 200 and FOREIGN in text and "Revoke" not in text
        for route in STATUS:
            if not route.startswith("POST"):
                continue
            for form in FORMS:
                url = f"{served.url}{path_of(route, values)}?namespace=team-a"
                form = {**form, "relabel": f"{values['cache']} x"}
                status, text = await send(client, url, "POST", form)
                assert status == (200 if route == READS else 403), (route, text)
        assert state(served, endpoint) == before
        body = {"model": "bottega", "messages": [{"role": "user", "content": "Whose?"}]}
        headers = {"authorization": f"Bearer {served.keys['eve']}"}
        url = f"{served.api}/chat/completions"
        async with client.post(url, json=body, headers=headers) as reply:
            assert reply.status == 403
