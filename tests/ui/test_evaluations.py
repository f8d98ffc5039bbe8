from __future__ import annotations

import asyncio
import os
import re
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from http.cookiejar import CookieJar
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Page, expect
from starlette.applications import Starlette

from bottega.errors import NotFoundError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.config import RunConfig
from bottega.evaluation.outcomes import Method, Outcome
from bottega.evaluation.report.runs import StoredRun, read_run
from bottega.evaluation.runs.run_store import FILE, RunStore
from bottega.evaluation.runs.runner import RunState, evaluate
from bottega.types import Answer, Query
from bottega.ui.application import common_routes
from bottega.ui.evaluation_runs import RunLibrary
from bottega.ui.evaluations import EVALUATIONS, evaluation_routes
from bottega.ui.pages import Renderer
from bottega.ui.sessions import Sessions
from tests.builders import example
from tests.evaluation.report.builders import (
    HOSTILE,
    benchmark,
    store_run,
    store_streams,
    three_methods,
)
from tests.gateway.harness import running
from tests.server import Server
from tests.ui.conftest import TOKEN, console, log_in, serious_findings
from tests.ui.test_pages import ADMIN, TEAM

WAITING = "This page reloads"
DATA = benchmark(12, examples=6, side=16)
SETTINGS = {"benchmark": "animals", "model": "m", "seed": 0, "metrics": ["accuracy"]}


@contextmanager
def evaluations(*roots: Path) -> Iterator[str]:
    """Serve the pages of these folders; yield their address."""
    renderer = Renderer([EVALUATIONS], Sessions(None, token=TOKEN))
    routes = [*common_routes(renderer), *evaluation_routes(renderer, RunLibrary(roots))]
    with running(Starlette(routes=routes)) as url:
        yield url.removesuffix("/v1") + "/ui"


class Client:
    """Client with a session, without a browser."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._opener = build_opener(HTTPCookieProcessor(CookieJar()))
        self.get(f"/login?token={TOKEN}")

    def get(self, path: str, **params: object) -> tuple[int, str]:
        """Return status and text of a page when its run has been read."""
        while True:
            status, text = self.load(path, **params)
            if WAITING not in text:
                return status, text

    def load(self, path: str, **params: object) -> tuple[int, str]:
        query = f"?{urlencode(params)}" if params else ""
        try:
            with self._opener.open(f"{self._url}{path}{query}") as reply:
                return reply.status, reply.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with one finished run, whose first item has markup in every text."""
    root = tmp_path_factory.mktemp("runs")
    asyncio.run(store_run(root / "done", DATA, three_methods(DATA)))
    return root


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with evaluations(folder) as url:
        yield Client(url)


def test_the_page_of_a_run_refreshes_until_it_is_finished(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.ui.evaluations.REFRESH_SECONDS", 0.3)
    page.set_viewport_size({"width": 400, "height": 900})
    method = three_methods(DATA)[2]
    with (
        evaluations(tmp_path) as url,
        closing(RunStore.open(tmp_path / "live", SETTINGS, DATA.items)) as store,
    ):
        store.plan([method.key])
        log_in(page, url)
        page.get_by_role("link", name="live").click()
        state = page.locator(".figures")
        expect(state).to_contain_text("running: 0 of 12 answered")
        assert serious_findings(page) == []
        with ThreadPoolExecutor(1) as pool:  # Playwright has the event loop of this thread
            work = evaluate(DATA, method, RunConfig(), RunState(store))
            pool.submit(asyncio.run, work).result()
        expect(state).to_contain_text("running: 12 of 12 answered", timeout=10_000)
        expect(page.locator("tbody").first).to_contain_text("top-k")
        store.close()
        expect(state).to_contain_text("finished", timeout=10_000)
        assert page.locator("[data-refresh]").count() == 0
        page.get_by_role("link", name="Items", exact=True).click()
        expect(page.locator(".items > li")).to_have_count(12)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("count", [2, 3])
def test_older_runs_are_on_the_next_page(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr("bottega.ui.evaluations.RUNS_SHOWN", 2)
    for number in range(count):
        shutil.copytree(folder / "done", tmp_path / f"run-{number}")
        for file in (tmp_path / f"run-{number}").iterdir():
            os.utime(file, (number, number))
    with evaluations(tmp_path) as url:
        client = Client(url)
        _, newest = client.get("/evaluations")
        assert ("Older runs" in newest) is (count > 2)
        assert [f"run-{number}" in newest for number in range(count)][-2:] == [True, True]
        _, older = client.get("/evaluations", first=2)
        assert "Older runs" not in older and ("run-0" in older) is (count > 2)


def test_disagreements_lead_to_an_item_and_its_report(page: Page, folder: Path) -> None:
    run = read_run(folder / "done")
    zero, _, top = (run.answers[key] for key in run.methods)
    differing = [
        index
        for index in zero
        if zero[index].scored.answer.labels != top[index].scored.answer.labels
        or not zero[index].scored.answer.valid
    ]
    assert 0 < len(differing) < len(zero)
    with evaluations(folder) as url:
        log_in(page, url)
        page.goto(f"{url}/evaluations/items?run=done")
        for field, value in (("method", "zero-shot"), ("other", "top-k 3"), ("show", "disagree")):
            page.locator(f"select[name={field}]").select_option(value)
        page.get_by_role("button", name="Search").click()
        expect(page.locator(".items > li")).to_have_count(len(differing))
        page.locator(".items a").first.click()
        expect(page.get_by_role("heading", level=1)).to_have_text(f"Item {differing[0]} of done")
        widths = page.evaluate(
            "Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))"
        )
        assert widths == [16] * 7  # the question, and three demonstrations of two methods
        page.get_by_role("link", name="Next").click()
        expect(page.get_by_role("heading", level=1)).to_have_text(f"Item {differing[1]} of done")
        page.goto(f"{url}/evaluations/item?run=done&index=0")
        expect(page.locator(".question").first).to_have_text(f"Which animal? {HOSTILE}")
        assert page.locator("main b b, [onerror]").count() == 0
        page.get_by_role("link", name="Full report").click()
        expect(page.locator("[data-count]")).to_contain_text("12 of 12 items")
        assert page.title() == "Report: done"
        assert page.evaluate("origin") == "null"  # isolated from the session of the console


def test_figures_are_those_of_the_report(client: Client, folder: Path) -> None:
    status, text = client.get("/evaluations/run", run="done")
    assert status == 200
    assert "34 of 36 answered" not in text and "35 of 36 answered" in text and "1 failed" in text
    top = [one.scored.correct for one in read_run(folder / "done").answers["top-k", 3].values()]
    assert f"<b>{sum(top) / len(top):.3f}</b>" in text
    assert "Paired differences" in text and "<polyline" in text


@pytest.mark.parametrize(
    ("params", "count"),
    [
        ({}, 12),
        ({"text": "NUMBER 3?"}, 1),
        ({"show": "invalid", "method": "zero-shot"}, 2),
        ({"show": "failed"}, 1),
        ({"show": "missing"}, 0),
        ({"text": "nowhere to be found"}, 0),
    ],
)
def test_items_are_filtered(client: Client, params: dict[str, str], count: int) -> None:
    _, text = client.get("/evaluations/items", run="done", **params)
    assert f"{count} of 12 items" in text


def test_each_item_of_a_method_is_right_or_wrong(client: Client) -> None:
    counts = []
    for show in ("right", "wrong"):
        _, text = client.get("/evaluations/items", run="done", method="top-k 3", show=show)
        found = re.search(r"(\d+) of 12 items", text)
        assert found is not None
        counts.append(int(found[1]))
    assert sum(counts) == 12 and min(counts) > 0


def test_two_chosen_methods_have_a_paired_difference(client: Client, folder: Path) -> None:
    run = read_run(folder / "done")
    top, random = (
        {index: one.scored.score for index, one in run.answers[key].items()}
        for key in (("top-k", 3), ("random", 3))
    )
    both = top.keys() & random.keys()
    gain = sum(top[index] - random[index] for index in both) / len(both)
    assert len(both) == 11 and gain > 0
    wanted = {"run": "done", "method": "top-k 3", "other": "random 3"}
    _, text = client.get("/evaluations/items", **wanted)
    found = dict(re.findall("<dt>([^<]*)</dt><dd>([^<]*)</dd>", text))
    assert found["accuracy of top-k 3 minus random 3"] == f"+{gain:.3f}"
    assert found["items that both answered"] == "11"
    low, high = (
        float(one.replace("\N{MINUS SIGN}", "-")) for one in found["95 % interval"].split(" to ")
    )
    assert low < gain < high and 0 < float(found["p"]) <= 1
    _, text = client.get(
        "/evaluations/items", **wanted | {"method": "random 3", "other": "top-k 3"}
    )
    assert f"<dd>\N{MINUS SIGN}{gain:.3f}</dd>" in text
    for other in ("", "top-k 3"):
        _, text = client.get("/evaluations/items", **wanted | {"other": other})
        assert "95 % interval" not in text and "No paired difference" not in text


def test_other_folders_and_damaged_runs_are_reported(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("text", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "text" / FILE).write_text("a text that is no database" * 10)
    data = (folder / "done" / FILE).read_bytes()
    (tmp_path / "cut" / FILE).write_bytes(data[: len(data) // 2])
    with evaluations(tmp_path) as url:
        client = Client(url)
        status, text = client.get("/evaluations")
        assert status == 200 and "empty" not in text
        assert "is not a run" in text
        for name in ("text", "cut"):
            status, text = client.get("/evaluations/run", run=name)
            assert status >= 400 and 'role="alert"' in text
        for name in ("empty", "../done", "deleted", "/", "\0"):
            status, text = client.get("/evaluations/run", run=name)
            assert status == 404 and "there is no run" in text
        status, text = client.get("/evaluations/run")
        assert status == 404


def test_a_run_with_a_damaged_item_is_reported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "done", tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run" / FILE)) as connection, connection:
        connection.execute("UPDATE items SET tags = 'null' WHERE place = 0")
    with evaluations(tmp_path) as url:
        client = Client(url)
        for page in ("run", "items", "report"):
            _, text = client.get(f"/evaluations/{page}", run="run")
            assert "is damaged" in text


def test_a_deleted_run_is_reported(tmp_path: Path) -> None:
    asyncio.run(store_run(tmp_path / "run", DATA, three_methods(DATA)[:1]))
    library = RunLibrary([tmp_path])
    library.load("run")
    (tmp_path / "run" / FILE).unlink()
    with pytest.raises(NotFoundError, match="no run 'run'"):
        library.load("run")


def test_a_loaded_run_is_kept_until_it_changes(tmp_path: Path) -> None:
    methods = three_methods(DATA)
    asyncio.run(store_run(tmp_path / "run", DATA, methods[:1]))
    library = RunLibrary([tmp_path])
    first, report = library.load("run"), library.report("run")
    assert library.load("run") is first and library.report("run") is report
    asyncio.run(store_run(tmp_path / "run", DATA, methods[:2]))
    assert library.load("run").run.methods == (("zero-shot", 0), ("random", 3))
    assert library.report("run") != report


def test_pages_answer_while_a_run_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proceed, method = threading.Event(), three_methods(DATA)[0]

    def slow(folder: Path, **parts: bool) -> StoredRun:
        assert proceed.wait(30)
        return read_run(folder, **parts)

    monkeypatch.setattr("bottega.ui.evaluation_runs.read_run", slow)
    monkeypatch.setattr("bottega.ui.evaluation_runs.RELOAD_FACTOR", 0.0)
    asyncio.run(store_run(tmp_path / "run", DATA, [method]))
    with evaluations(tmp_path) as url:
        client = Client(url)
        for path in ("run", "report"):
            assert WAITING in client.load(f"/evaluations/{path}", run="run")[1]
        proceed.set()
        assert "zero-shot" in client.get("/evaluations/run", run="run")[1]
        proceed.clear()
        with closing(RunStore.open(tmp_path / "run", SETTINGS, DATA.items)) as store:
            store.plan([method.key])
            _, text = client.load("/evaluations/run", run="run")
            assert "running" in text and "zero-shot" in text  # the figures so far
            proceed.set()


def test_only_admins_see_evaluations(endpoint: Server, folder: Path, tmp_path: Path) -> None:
    more = f'\n[console]\nruns = "{folder}"\n'
    with console(tmp_path, endpoint, ADMIN, TEAM, more=more) as served:
        for name, status in (("boss", 200), ("ann", 403)):
            opener = build_opener(HTTPCookieProcessor(CookieJar()))
            opener.addheaders = [("Sec-Fetch-Site", "same-origin")]
            form = urlencode({"key": served.keys[name]}).encode()
            opener.open(f"{served.url}/login", form).close()
            for path in ("", "/run", "/items", "/item", "/report", "/image"):
                try:
                    opener.open(f"{served.url}/evaluations{path}?run=done&sha256=x").close()
                    assert status == 200
                except HTTPError as error:
                    assert error.code == (404 if status == 200 else 403), path
                    error.close()


def test_the_page_says_how_to_set_a_folder(endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint) as served:
        status, text = Client(served.url).get("/evaluations")
        assert status == 200 and "[console] runs" in text
        status, text = Client(served.url).get("/evaluations/run", run="x")
        assert status == 404 and "[console] runs" in text


MARKUP = st.text(st.sampled_from("<>\"'&/=x {}%!-`\0\n"), max_size=12).map(
    lambda text: f'{text}<b id="own">{text}'
)


@settings(max_examples=15, deadline=None)
@given(texts=st.tuples(*[MARKUP] * 5))
def test_markup_in_runs_never_becomes_elements(
    client: Client, folder: Path, texts: tuple[str, ...]
) -> None:
    question, label, answer, tag, name = texts
    item = example(label, 1)
    query = replace(item.query, text=question, choices=(label, answer), id="q")
    item = replace(item, query=query, tags={tag: tag})

    async def reply(query: Query) -> Outcome:
        return Outcome(Answer(answer, True, (answer,), None, question))

    method = Method(f"<b id='own'>{tag}".replace("\0", ""), 2, reply)
    data = Benchmark(f"bench {label}", (example("z", 2),), (item,), (label,))
    name = re.sub("[/\0]", "_", name)
    with TemporaryDirectory(suffix=name, dir=folder) as run:
        asyncio.run(store_run(Path(run), data, [method], model=answer, note=tag))
        for path in ("", "/run", "/items", "/item"):
            status, text = client.get(f"/evaluations{path}", run=Path(run).name, text=label[:3])
            assert status == 200, path
            assert not re.search("<b[^>]*own", text), path


def test_a_run_of_streams_has_its_table_and_its_report(tmp_path: Path) -> None:
    config = asyncio.run(store_streams(tmp_path / "stream", DATA))
    planned = len(config.streams()) * len(DATA.items)
    with evaluations(tmp_path) as url:
        client = Client(url)
        status, text = client.get("/evaluations/run", run="stream")
        assert status == 200 and f"12 of {planned} answered" in text
        assert 'aria-labelledby="results"' in text and "no cache" in text
        status, text = client.get("/evaluations/items", run="stream")
        assert status >= 400 and "a run of streams" in text
        status, text = client.get("/evaluations/report", run="stream")
        assert status == 200 and "unfinished" in text
