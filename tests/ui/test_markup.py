"""Texts of clients and models never become markup of the console."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from yarl import URL

from bottega.gateway.accounting.ledger_schema import Entry
from bottega.knowledge.records import is_text
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
from tests import server
from tests.builders import solid_image
from tests.evaluation.report.builders import benchmark, store_streams
from tests.recording.test_traces import trace
from tests.server import Server, ok, refuse
from tests.ui.conftest import TOKEN, Console, console
from tests.ui.test_sessions import SAME, jar

MARKER = "zzmarkup"
ADDRESSES = ("href", "src", "action", "formaction", "data")
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


def printable(text: str) -> str:
    return "".join(one for one in text if one.isprintable())


class Finder(HTMLParser):
    """Collects elements, attributes and addresses that come from the marker."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if MARKER in tag:
            self.found.append(tag)
        for name, value in attrs:
            script = (value or "").strip().lower().startswith("javascript")
            if MARKER in name or name.startswith("on") or (script and name in ADDRESSES):
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


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with server.running() as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def served(
    upstream: Server, runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Console]:
    more = f'\n[console]\nruns = "{runs}"\n'
    with console(tmp_path_factory.mktemp("gateway"), upstream, more=more) as opened:
        yield opened


@asynccontextmanager
async def session(served: Console) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cookie_jar=jar(), headers=SAME) as opened:
        async with opened.get(f"{served.url}/login?token={TOKEN}") as reply:
            assert reply.status == 200
        yield opened


async def pages(
    served: Console, *paths: str, status: int = 200, policy: str = "script-src 'self'"
) -> str:
    """Return the texts of the pages. Pages of analyses and runs are loaded until complete."""
    found, left = [], list(paths)
    async with session(served) as client:
        while left:
            async with client.get(URL(f"{served.url}/{left[0]}", encoded=True)) as reply:
                assert reply.status == status, left[0]
                assert policy in reply.headers["Content-Security-Policy"]
                found.append(await reply.text())
                if "refresh" not in reply.headers:
                    del left[0]
    return "".join(found)


async def submit(served: Console, path: str, form: aiohttp.FormData, status: int = 200) -> str:
    async with (
        session(served) as client,
        client.post(f"{served.url}/{path}", data=form) as reply,
    ):
        text = await reply.text()
        assert reply.status == status, text
        return text


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


def test_the_ledger_shows_names_as_texts(served: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.ui.request_pages.WRITE_SECONDS", 0.0)  # there are no traces

    @settings(max_examples=4)
    @given(names=st.lists(TEXT, min_size=8, max_size=8))
    def check(names: list[str]) -> None:
        now, ledger = time.time(), served.server.ledger
        names = [f"<{MARKER}>{printable(name).replace('/', '')}" for name in names]
        for number, name in enumerate(names):
            other = names[number - 1]
            ledger.record(
                Entry(now, f"req_{name}", other, name, name, other, "answered", cost_usd=0.1)
            )
        ledger.flush()
        first = quote(names[0], safe="")
        asked = [f"{name}={first}" for name in ("tier", "namespace", "text", "state", "message")]
        shown = ["overview", "requests", *(f"requests?{one}" for one in asked)]
        shown += [f"overview?period=1h&{asked[1]}", f"requests/req_{first}?time={now}"]
        text = asyncio.run(pages(served, *shown))
        text += asyncio.run(pages(served, f"nothing/{first}", status=404))
        assert MARKER in text and markup_of(text) == []

    check()


def test_names_of_keys_are_texts(served: Console) -> None:
    accounts = served.server.accounts

    @settings(max_examples=6)
    @given(name=TEXT, namespace=TEXT)
    def check(name: str, namespace: str) -> None:
        name, namespace = printable(f"<{MARKER}>{name}"), printable(namespace)
        form = aiohttp.FormData({"name": name, "namespace": namespace})
        created = asyncio.run(submit(served, "keys", form))
        account = accounts.list()[-1]
        assert (account.name, account.namespace) == (name.strip(), namespace.strip())
        accounts.revoke(account.id)
        text = created + asyncio.run(pages(served, "keys"))
        assert text.count(account.id) >= 2 and MARKER in text and markup_of(text) == []

    check()


def test_answers_and_demonstrations_of_the_playground_are_texts(
    served: Console, upstream: Server
) -> None:
    base = served.open_base("")
    # Repeated, so that the two stay similar with any words. The page cuts long words of answers.
    question = "Which of these many words are common to both questions? " * 5

    @settings(max_examples=8)
    @given(answer=TEXT, asked=TEXT, shown=TEXT.filter(is_text))
    def check(answer: str, asked: str, shown: str) -> None:
        base.delete(base.ids())
        base.add([Example(Query(f"{question} {shown}!"), f"demonstration <{MARKER}> {shown}")])
        fields = {
            "action": "ask",
            "question": f"{question} Now {asked}",
            "model_a": "bottega/small",
        }
        for reply, found in (
            (ok(f"answer <{MARKER}>{answer}"), "demonstration &lt;"),
            (refuse(400, f"answer <{MARKER}>{answer}"), 'class="notice problem"'),
        ):
            upstream.answers = [reply]
            page = asyncio.run(submit(served, "playground", aiohttp.FormData(fields)))
            assert "answer &lt;" in page and found in page
            assert markup_of(page) == []

    check()


def test_names_of_files_are_texts(served: Console) -> None:
    served.open_base("").add([Example(Query("common words"), "seven")])
    uploads = (
        ("playground", "images", b"no image", 400),
        ("cache", "image", b"no image", 400),
        ("cache", "image", solid_image(3).data, 200),
        ("cache/import", "file", b"no JSON", 200),
        ("knowledge/add", "images", b"no image", 200),
    )

    @settings(max_examples=4)
    @given(name=TEXT, text=TEXT)
    def check(name: str, text: str) -> None:
        for path, field, data, status in uploads:
            fields = {"action": "ask", "question": text, "text": f"common {text}"}
            form = aiohttp.FormData(fields, quote_fields=False)
            form.add_field(field, data, filename=f"<{MARKER}>{printable(name)}")
            page = asyncio.run(submit(served, path, form, status))
            assert markup_of(page) == [], path
            assert MARKER in page or path == "cache/import"

    check()


def test_names_of_namespaces_are_texts(served: Console, upstream: Server) -> None:
    upstream.answers = [ok("seven")]
    url = f"{served.api}/chat/completions"

    async def ask(name: str) -> None:
        message = {"role": "user", "content": f"Is it {name}?"}
        body = {"model": "bottega/large", "messages": [message]}
        headers = {"x-bottega-namespace": name}
        async with aiohttp.request("POST", url, json=body, headers=headers) as reply:
            assert reply.status == 200

    @settings(max_examples=4)
    @given(name=TEXT)
    def check(name: str) -> None:
        name = "".join(one for one in f"<{MARKER}>{name}" if " " <= one <= "~").strip()
        asyncio.run(ask(name))
        served.server.ledger.flush()
        base = served.open_base(name)
        assert len(base) == 1
        wanted = f"namespace={quote(name, safe='')}"
        paths = [f"{page}?{wanted}" for page in ("overview", "requests", "cache", "knowledge")]
        paths += [f"cache/{base.ids()[0]}?{wanted}", "cache", "requests"]
        views = ("map", "duplicates", "wrong-labels", "add")
        paths += [f"knowledge/{view}?{wanted}" for view in views]
        text = asyncio.run(pages(served, *paths))
        assert "Is it &lt;" in text and markup_of(text) == []

    check()


def test_a_run_of_streams_shows_names_as_texts(served: Console, runs: Path) -> None:
    data = benchmark(3, examples=3, side=16)

    @settings(max_examples=4)
    @given(texts=st.tuples(*[TEXT] * 4))
    def check(texts: tuple[str, ...]) -> None:
        small, large, embed, name = texts
        folder = re.sub("[/\0]", "_", f"<{MARKER}>{small}")
        named = replace(data, name=f"<{MARKER}>{name}")
        with TemporaryDirectory(suffix=folder, dir=runs) as run:
            settings = {"tiers": (small, large), "embed": embed, "embed_text": embed}
            asyncio.run(store_streams(Path(run), named, **settings))
            wanted = f"run={quote(Path(run).name, safe='')}"
            text = asyncio.run(pages(served, "evaluations", f"evaluations/run?{wanted}"))
            text += asyncio.run(pages(served, f"evaluations/items?{wanted}", status=404))
            text += asyncio.run(pages(served, f"evaluations/report?{wanted}", policy="default-src"))
            assert MARKER in text and markup_of(text) == []

    check()


def test_forms_show_fields_as_texts(served: Console) -> None:
    for text in (f"<{MARKER}>", f'"><{MARKER} onerror=alert(1)>', f"</textarea><{MARKER}>"):
        form = aiohttp.FormData(
            {"action": "ask", "question": text, "namespace": text, "shots_a": text}
        )
        found = asyncio.run(submit(served, "playground", form, 400))
        assert MARKER in found and markup_of(found) == []
