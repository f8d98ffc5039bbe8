"""Texts of clients and models never become markup of the console."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from bottega.gateway.accounting.ledger import Entry
from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Compression,
    Example,
    Message,
    Prompt,
    Query,
    Reply,
)
from tests.builders import solid_image
from tests.recording.test_traces import trace
from tests.server import Server
from tests.ui.conftest import TOKEN, Console, console
from tests.ui.test_sessions import SAME, jar

MARKER = "zzmarkup"
PARTS = st.sampled_from(
    [
        f"<{MARKER}>",
        f'"><{MARKER} onerror=alert(1)>',
        f"' on{MARKER}='x",
        f'" on{MARKER}="x',
        f"</script><script {MARKER}>",
        f"javascript:{MARKER}",
        f"{{{{ {MARKER} }}}}",
        f"&lt;{MARKER}&gt;",
        "\u2028",
        "--><!--",
    ]
)
TEXT = st.lists(PARTS | st.text(max_size=8), min_size=1, max_size=4).map("".join)


class Finder(HTMLParser):
    """Collects elements, attributes and addresses that come from the marker."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if MARKER in tag:
            self.found.append(tag)
        for name, value in attrs:
            runs = name.startswith("on") or (value or "").strip().lower().startswith("javascript")
            if MARKER in name or (runs and name != "value"):
                self.found.append(f"{tag} {name}={value}")


def markup_of(page: str) -> list[str]:
    finder = Finder()
    finder.feed(page)
    finder.close()
    return finder.found


def test_the_finder_finds_markup() -> None:
    for page in (f"<{MARKER}>", f'<p on{MARKER}="x">', f'<a href="javascript:{MARKER}">'):
        assert markup_of(page)
    assert markup_of(f'<p title="&lt;{MARKER}">&lt;{MARKER}&gt; javascript:</p>') == []


@pytest.fixture
def served(endpoint: Server, tmp_path: Path) -> Iterator[Console]:
    with console(tmp_path, endpoint) as opened:
        yield opened


async def pages(
    served: Console, *paths: str, status: int = 200, policy: str = "script-src 'self'"
) -> str:
    async with aiohttp.ClientSession(cookie_jar=jar()) as session:
        found = []
        for path in (f"login?token={TOKEN}", *paths):
            async with session.get(URL(f"{served.url}/{path}", encoded=True)) as reply:
                assert reply.status == (200 if path.startswith("login") else status), path
                if not path.startswith("login"):
                    assert policy in reply.headers["Content-Security-Policy"]
                found.append(await reply.text())
        return "".join(found)


def test_requests_show_texts_as_texts(served: Console) -> None:
    assert served.server.traces is not None
    store = served.server.traces.store

    @settings(max_examples=20, deadline=None)
    @given(question=TEXT, answer=TEXT, label=TEXT, name=TEXT)
    def check(question: str, answer: str, label: str, name: str) -> None:
        store.prune(time.time() + 10)
        shown = Candidate(Example(Query(label), label, id="e1"), 0.5)
        one = replace(
            trace("req_1", time.time()),
            query=Query(question, (solid_image(1),), (label,)),
            candidates=(shown,),
            prompt=Prompt((Message("user", (question, solid_image(1))),)),
            reply=Reply(name, (Completion(answer),)),
            answer=Answer(answer, rationale=label),
            tier=name,
            compression=Compression(label, name, 8),
        )
        store.write([one])
        text = asyncio.run(pages(served, "requests?text=", "requests/req_1"))
        assert "KV prefix of 8 tokens" in text
        text += asyncio.run(pages(served, "requests/req_1/explanation", policy="img-src data:"))
        assert markup_of(text) == []

    check()


def test_the_ledger_shows_names_as_texts(served: Console) -> None:
    names = [f"<{MARKER}>", f'"><{MARKER} onerror=alert(1)>', f"' on{MARKER}='x"]
    for number, name in enumerate(names):
        served.server.ledger.record(
            Entry(time.time(), f"req_{number}", "", name, name, name, "answered", cost_usd=0.1)
        )
    served.server.ledger.flush()
    missing = f"nothing/{quote(names[1])}"
    assert markup_of(asyncio.run(pages(served, missing, status=404))) == []
    text = asyncio.run(pages(served, "overview", "requests", f"requests?tier={quote(names[0])}"))
    assert MARKER in text and markup_of(text) == []


def test_forms_show_fields_as_texts(served: Console) -> None:
    async def submit(fields: dict[str, Any]) -> str:
        async with aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as session:
            async with session.get(f"{served.url}/login?token={TOKEN}"):
                pass
            texts = []
            form = aiohttp.FormData({"action": "ask", **fields})
            form.add_field("images", b"no image", filename=f"<{MARKER}>.png")
            async with session.post(f"{served.url}/playground", data=form) as reply:
                assert reply.status == 400
                texts.append(await reply.text())
            async with session.post(
                f"{served.url}/playground", data={"action": "ask", **fields}
            ) as reply:
                texts.append(await reply.text())
            message = {"message": fields["question"]}
            async with session.get(f"{served.url}/overview", params=message) as reply:
                texts.append(await reply.text())
            return "".join(texts)

    for text in (f"<{MARKER}>", f'"><{MARKER} onerror=alert(1)>', f"</textarea><{MARKER}>"):
        found = asyncio.run(submit({"question": text, "namespace": text, "shots_a": text}))
        assert MARKER in found and markup_of(found) == []


def test_key_names_are_texts(served: Console) -> None:
    name = f'"><{MARKER} onerror=alert(1)>'
    served.server.accounts.add(name, namespace=f"<{MARKER}>")
    text = asyncio.run(pages(served, "keys"))
    assert MARKER in text and markup_of(text) == []
