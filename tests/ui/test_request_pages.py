"""Requests in the console: their route, the origin of their demonstrations, and the search."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from playwright.sync_api import Page, expect

from bottega.gateway.accounting.ledger_schema import Entry
from bottega.types import Query
from tests.builders import solid_image
from tests.gateway.gateways import ask
from tests.recording.test_traces import trace
from tests.server import Server
from tests.ui.conftest import TOKEN, Console, console, log_in
from tests.ui.test_markup import MARKER, markup_of
from tests.ui.test_pages import ADMIN, TEAM

CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PERIOD = 3600.0


class Reader:
    """Logged-in reader of pages, without a browser."""

    def __init__(self, served: Console, name: str | None = None) -> None:
        self._url = served.url
        self._opener = build_opener(HTTPCookieProcessor(CookieJar()))
        self._opener.addheaders = [("Sec-Fetch-Site", "same-origin")]
        form = {"key": TOKEN if name is None else served.keys[name]}
        self._opener.open(f"{self._url}/login", urlencode(form).encode()).close()

    def text(self, path: str, **params: object) -> str:
        """Return a page in one line."""
        with self._opener.open(f"{self._url}/{path}?{urlencode(params)}") as reply:
            return " ".join(reply.read().decode().split())

    def rows(self, **params: object) -> list[str]:
        """Return the questions and the other cells of the requests that a search finds."""
        body = self.text("requests", **params).partition("<tbody>")[2].partition("</tbody>")[0]
        return [re.sub(r"<[^>]*>|\s+", " ", row).strip() for row in body.split("<tr>")[1:]]


def test_a_request_states_why_and_where_its_demonstrations_are_from(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = '\n[experiment]\nname = "fewer"\nshare = 1.0\nb = "shots=1"\n'
    with console(tmp_path, endpoint, ADMIN, more=more) as served:
        key, reader = served.keys["boss"], Reader(served, "boss")

        def page(text: str, **more: Any) -> str:
            _, headers = ask(served.api, text, key=key, **more)
            served.server.ledger.flush()
            return reader.text(f"requests/{headers['x-request-id']}")

        first = page("What is 3 + 4?")
        assert "<li>cold start</li>" in first and "<dd>fewer:b</dd>" in first
        assert "answer of" not in first  # no demonstrations
        second = page("What is 3 + 4, please?")
        assert "<li>fixed tier</li>" in second
        [moment] = re.findall(
            r"answer of large \(huge\) · <a href=\S+>request of ([^<]*)</a>", second
        )
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", moment)
        named = page("What is 3 + 4, again?", model="bottega/large")
        assert "<li>tier requested by the client</li>" in named and "fewer:b" not in named
        monkeypatch.setattr("bottega.ui.request_pages.WRITE_SECONDS", 0.0)  # no traces follow
        passed = page("What is 3 + 4?", tools=[CALL])
        assert "<li>passed through: tools</li>" in passed
        assert "are never stored" in passed and "Set <code>[traces]" not in passed
        repeated = page("What is 3 + 4?")
        assert "identical earlier request was returned again" in repeated


def test_the_origin_of_a_correction_is_human(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint) as served:
        assert served.server.traces is not None
        shown = trace().candidates[0]
        origins = {
            "human: corrected by ann": {"provenance": "human", "request": "req_old"},
            "imported by ann": {"provenance": "imported"},
            "source: pets/cat/1.jpg": {},
        }
        for number, (text, tags) in enumerate(origins.items()):
            source = text.partition(": ")[2] or text
            example = replace(shown.example, source=source, tags=tags)
            one = trace(f"req_{number}", time.time())
            candidates = (replace(shown, example=example),)
            served.server.traces.store.write([replace(one, candidates=candidates)])
            page = Reader(served).text(f"requests/req_{number}")
            assert f">{text}" in page
            assert ("/requests/req_old" in page) == ("request" in tags)


def test_reasons_and_origins_are_texts(endpoint: Server, tmp_path: Path) -> None:
    name = f"'\"><{MARKER} onerror=alert(1)>; <{MARKER}>"
    tags = {"provenance": name, "request": name}
    with console(tmp_path, endpoint) as served:
        assert served.server.traces is not None
        shown = trace().candidates[0]
        shown = replace(shown, example=replace(shown.example, source=name, tags=tags))
        one = replace(trace("req_1", 5.0), candidates=(shown,), reason=name)
        served.server.traces.store.write([one])
        entry = Entry(5.0, "req_2", "", "", "small", "m", "answered", variant=name, reason=name)
        served.server.ledger.record(entry)
        served.server.ledger.flush()
        for id in ("req_1", "req_2"):
            page = Reader(served).text(f"requests/{id}", time=5.0)
            assert page.count(MARKER) >= 3 and markup_of(page) == []


def fill(served: Console, *states: str, age: float = 0.0) -> None:
    """Record requests of the key with these states, the newest last."""
    assert served.server.traces is not None
    [account, *_] = served.server.accounts.list() or [ADMIN]
    now = time.time() - age
    for number, state in enumerate(states):
        moment = now + number / 100
        id = f"req_{age:g}_{number}"
        entry = Entry(
            moment, id, account.id, "", "small", "m", state,  # type: ignore[arg-type]
            cost_usd=0.25, status=499 if state == "failed" else 200,
        )  # fmt: skip
        served.server.ledger.record(entry)
        query = Query(f"question {number} of {age:g}")
        served.server.traces.store.write([replace(trace(id, moment), query=query)])
    served.server.ledger.flush()


def test_a_text_search_keeps_key_state_and_cost(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint, replace(ADMIN, name="boss-of-all")) as served:
        fill(served, "answered", "failed", "answered")
        reader = Reader(served, "boss-of-all")
        for state, numbers in (("", "210"), ("answered", "20"), ("failed", "1"), ("replayed", "")):
            found = reader.rows(text="QUESTION", state=state)
            assert [row.partition("question ")[2][0] for row in found] == list(numbers)
            for row in found:
                assert row.endswith("boss-of-all") and "$0.25" in row
        assert "failed 499" in reader.rows(text="question 1", state="failed")[0]
        assert "Only answered requests" in reader.text("requests", text="x", state="replayed")


def test_requests_without_stored_texts_have_no_column_for_them(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.ui.request_pages.WRITE_SECONDS", 0.0)  # there are no traces
    with console(tmp_path, endpoint) as served:
        served.server.ledger.record(Entry(time.time(), "req_9", "", "", "large", "m", "answered"))
        served.server.ledger.flush()
        reader = Reader(served)
        page = reader.text("requests")
        assert "<td>large</td>" in page
        assert "Question and answer" not in page and "not stored" not in page
        assert "traces were off at that time" in reader.text("requests/req_9", time=time.time())
        fill(served, "answered")
        page = reader.text("requests")
        assert "Question and answer" in page and page.count("not stored") == 1


@pytest.mark.parametrize("text", ["", "question"])
def test_a_period_ends_now(endpoint: Server, tmp_path: Path, text: str) -> None:
    with console(tmp_path, endpoint) as served:
        fill(served, "answered")
        fill(served, "answered", age=2 * PERIOD)
        reader = Reader(served)
        assert len(reader.rows(text=text)) == 2
        assert len(reader.rows(text=text, period="6h")) == 2
        assert len(reader.rows(text=text, period="1h", state="answered")) == 1
        page = reader.text("requests", text=text, period="1h")
        assert '<option value="1h" selected>' in page


def test_a_search_continues_until_a_page_is_full(
    endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.ui.request_pages.PAGE_SIZE", 2)
    with console(tmp_path, endpoint) as served:
        fill(served, "failed", "failed", "failed", *["answered"] * 5)
        reader = Reader(served)
        assert len(reader.rows(text="question", state="failed")) == 2
        wanted = {"text": "question", "state": "failed", "period": "24h"}
        page = reader.text("requests", **wanted)
        [link] = re.findall(r'href="\?([^"]*)">Older requests', page)
        older = dict(pair.split("=") for pair in link.replace("&amp;", "&").split("&"))
        assert {name: older[name] for name in wanted} == wanted
        [row] = reader.rows(**older)
        assert "question 0 of" in row
        # A search of many requests stops early, and its link continues it.
        monkeypatch.setattr("bottega.ui.request_pages.SEARCH_ROUNDS", 1)
        found = reader.text("requests", text="question", state="failed")
        assert "No requests found" in found and "Older requests" in found


def test_a_key_searches_its_own_namespace(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint, TEAM) as served:
        fill(served, "answered")
        reader = Reader(served, "ann")
        assert reader.rows(text="question") == []  # of the unnamed namespace


def test_the_playground_shows_images_of_demonstrations(
    page: Page, endpoint: Server, tmp_path: Path
) -> None:
    with console(tmp_path, endpoint, embed="pixels") as served:
        log_in(page, served.url)
        page.goto(f"{served.url}/playground")
        file = {"name": "a.png", "mimeType": "image/png", "buffer": solid_image(3).data}
        page.locator("input[name=images]").set_input_files(file)  # type: ignore[arg-type]
        page.get_by_label("Question").fill("Which digit?")
        page.get_by_text("Add to the knowledge base").click()
        page.get_by_label("Correct answer").fill("three")
        page.get_by_role("button", name="Add the question").click()
        expect(page.locator("#results .notice")).to_have_text("Added to the knowledge base")
        file["buffer"] = solid_image(4).data
        page.locator("input[name=images]").set_input_files(file)  # type: ignore[arg-type]
        page.locator("select[name=model_a]").select_option("bottega/small")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator("#results .shots li")).to_contain_text("three")
        expect(page.locator("#results")).to_contain_text("tier requested by the client")
        image = page.locator("#results .shots img")
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
        page.get_by_role("link", name="Details of the request").click()
        expect(page.locator(".demonstrations")).to_contain_text("human: console:")
        image = page.locator(".demonstrations img")
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
