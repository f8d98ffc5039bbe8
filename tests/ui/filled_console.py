"""Gateway whose console has content with markup on every page, and the addresses of its pages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Page, expect

from bottega.gateway.accounting.ledger_schema import Account, Entry
from bottega.types import Answer, Completion, Compression, Example, Query, Reply, Trace
from tests.builders import candidates, search_tree, solid_image
from tests.evaluation.report.builders import benchmark, store_run, store_streams, three_methods
from tests.recording.test_traces import trace
from tests.server import Server, ok
from tests.ui.conftest import Console, console, drop, log_in

ADMIN = Account("", "boss", admin=True)
WAITING = "This page reloads automatically"
QUESTION = "Which animal is this?"
RAN = "zzran"  # in the addresses and messages of the markup
MARKUP = (
    f"<script>console.log('{RAN}')</script>",
    f"\"><svg onload=console.log('{RAN}')>",
    f"'><img src=/ui/{RAN} onerror=alert(1)>",
    f"</textarea></title></script><iframe src=/ui/{RAN}></iframe>",
    f"<meta http-equiv=refresh content='0;url=/ui/{RAN}'>",
    f"<link rel=stylesheet href=/ui/{RAN}><base href=/ui/x/>",
    f"javascript:console.log('{RAN}')",
    f"' autofocus onfocus=alert(1) x='\" autofocus onfocus=console.log('{RAN}') x=\"",
)


def markup(first: int, length: int = 1000) -> str:
    """Return all markup, beginning with another part for each number: pages truncate texts."""
    return "".join(MARKUP[(first + n) % len(MARKUP)] for n in range(len(MARKUP)))[:length]


@dataclass(frozen=True)
class FilledConsole:
    """Console with content. `paths` are those of its pages below /ui, by name."""

    console: Console
    endpoint: Server
    paths: Mapping[str, str]

    def open_pages(self, page: Page) -> Iterator[str]:
        """Log in, open all pages in turn, and yield their names."""
        url = self.console.url
        log_in(page, url, self.console.keys["boss"])
        for name, path in self.paths.items():
            page.goto(f"{url}/{path}")
            expect(page.get_by_text(WAITING)).to_have_count(0, timeout=30_000)
            yield name
        page.goto(f"{url}/cache")
        drop(page, ".drop", {markup(3): solid_image(7).data})
        page.get_by_role("button", name="Find similar entries").click()
        expect(page.get_by_role("heading", level=2).first).to_contain_text("<iframe src=")
        yield "cache, searched by image"
        page.goto(f"{url}/knowledge/add")
        drop(page, ".drop", {markup(4): b"no image", "a.png": solid_image(999).data})
        page.get_by_label("Label", exact=True).fill(markup(5))
        page.get_by_role("button", name="Add the images").click()
        expect(page.locator("#added")).to_contain_text("<meta http-equiv=refresh")
        yield "images added"
        page.goto(f"{url}/playground")
        drop(page, ".drop", {markup(6): solid_image(7).data})
        page.get_by_label("Question").fill(markup(7))
        page.locator("select[name=model_a]").select_option("bottega/small")
        page.get_by_label("Compare with this setting").check()
        self.endpoint.answers = [ok(markup(0))]
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#results .answer")).to_have_text([markup(0)] * 2)
        expect(page.locator("#results li").first).to_contain_text(QUESTION)
        yield "playground, answered"


@contextmanager
def filled_console(folder: Path, endpoint: Server) -> Iterator[FilledConsole]:
    runs = folder / "runs"
    store_runs(runs)
    more = f'\n[console]\nruns = "{runs}"\n'
    with console(folder, endpoint, ADMIN, more=more, embed="pixels") as served:
        accounts = served.server.accounts
        accounts.add(markup(0, 200), namespace=markup(1, 200), usd_per_month=2.0)
        revoked, _ = accounts.add(markup(2, 200))
        accounts.revoke(revoked.id)
        add_examples(served)
        stored = store_requests(served)
        label, namespace = (quote(text, safe="") for text in (f"cat{markup(1)}", markup(2, 200)))
        paths = {
            "overview": "overview?period=1h",
            "overview of a namespace": f"overview?period=1h&namespace={namespace}",
            "requests": "requests",
            "request": f"requests/{stored.id}",
            "explanation": f"requests/{stored.id}/explanation",
            "cache": "cache",
            "cache entry": f"cache/{served.open_base('').ids()[0]}",
            "cache of a namespace": f"cache?text={namespace}&namespace={namespace}",
            "knowledge base": "knowledge",
            "label": f"knowledge?label={label}",
            "map": "knowledge/map",
            "near-duplicates": "knowledge/duplicates",
            "wrong labels": "knowledge/wrong-labels",
            "images to add": "knowledge/add",
            "playground": "playground",
            "keys": "keys",
            "evaluations": "evaluations",
            "run": "evaluations/run?run=done",
            "items": "evaluations/items?run=done",
            "item": "evaluations/item?run=done&index=0",
            "stream": "evaluations/run?run=streams",
            "report": "evaluations/report?run=done",
            "login": "login",
            "error": f"nothing/{namespace}?message={namespace}",
        }
        yield FilledConsole(served, endpoint, paths)


def store_runs(folder: Path) -> None:
    data = benchmark(6, examples=4, side=16)
    data = replace(data, name=markup(0), labels=(*data.labels, markup(1)))
    asyncio.run(store_run(folder / "done", data, three_methods(data), model=markup(2)))
    asyncio.run(store_streams(folder / "streams", data, tiers=(markup(3), markup(4))))


def add_examples(served: Console) -> None:
    """Add examples with near-duplicates and a wrong label, and one in another namespace."""
    kinds = [(n, "cat") for n in range(4)] + [(200 + n, "dog") for n in range(4)] + [(9, "dog")]
    examples = []
    for n, (shade, kind) in enumerate(kinds):
        image, label = replace(solid_image(shade), source=markup(n)), f"{kind}{markup(1)}"
        query = Query(f"{QUESTION} {markup(n + 1)}", (image,), (label, markup(n)))
        tags = {markup(n + 2): markup(n + 3)}
        source, rationale = markup(n + 4), markup(n + 5)
        examples.append(Example(query, label, (label,), rationale, tags=tags, source=source))
    served.open_base("").add(examples)
    served.open_base(markup(2, 200)).add(examples[:1])


def store_requests(served: Console) -> Trace:
    """Store requests. Return the trace of one, with a search tree, compressed passages and an
    image."""
    now, text, shown = time.time(), markup(0), tuple(candidates(markup(1), markup(2)))
    one = replace(
        trace("req_" + "1" * 32, now - 60),
        query=Query(text, (solid_image(1),), (markup(3),)),
        candidates=shown,
        reply=Reply(text, (Completion(text),)),
        answer=Answer(text, rationale=markup(4)),
        tier=text,
        tree=search_tree(shown),
        compression=Compression(text, markup(5), 8),
    )
    assert served.server.traces is not None
    served.server.traces.store.write([one], images=True)
    ledger = served.server.ledger
    ledger.record(
        Entry(now - 60, one.id, "", "", "large", "m", "answered", 2, 0.9, cost_usd=0.5, reason=text)
    )
    for n in range(len(MARKUP)):
        name, id = markup(n, 200), f"req_{markup(n, 99)}"
        ledger.record(Entry(now - 90, id, "", name, name, name, "answered", cost_usd=0.1))
    ledger.record(Entry(now - 99, "req_" + "2" * 32, "", "", "", "", "failed", status=429))
    ledger.flush()
    return one
