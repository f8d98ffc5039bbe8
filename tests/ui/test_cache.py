from __future__ import annotations

import base64
from pathlib import Path

import aiohttp
import orjson
import pytest
from playwright.sync_api import Page, expect

from bottega.gateway.accounting.ledger_schema import Account
from bottega.knowledge import KnowledgeBase
from bottega.types import Example, Query
from tests.builders import solid_image
from tests.gateway.gateways import ask
from tests.knowledge.doubles import text_example
from tests.server import Server
from tests.ui.base_console import TOKEN, BaseConsole, base_console
from tests.ui.conftest import console, log_in

QUESTION = "What is 3 + 4?"
ANN = Account("", "ann", namespace="team-a")
EVE = Account("", "eve", namespace="team-a", can_store=False)


def test_an_entry_is_corrected_and_deleted(page: Page, endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint) as served:
        ask(served.api, QUESTION)
        ask(served.api, QUESTION)
        calls = len(endpoint.bodies)
        log_in(page, served.url)
        page.get_by_role("link", name="Cache").click()
        page.get_by_label("Text of the question or answer").fill("3 +")
        page.get_by_role("button", name="Search", exact=True).click()
        page.locator("tbody a").click()
        first = page.url
        expect(page.locator(".answer")).to_have_text("seven")
        page.get_by_role("button", name="Pin").click()
        expect(page.get_by_role("button", name="Unpin")).to_be_visible()  # pinning reloads the page
        page.locator("summary", has_text="Edit").click()
        page.get_by_label("Correct answer").fill("<b>7</b>")
        page.get_by_role("button", name="Save").click()
        expect(page.locator(".answer")).to_have_text("<b>7</b>")
        expect(page.get_by_role("button", name="Unpin")).to_be_visible()
        expect(page.get_by_label("Origin")).to_contain_text("human")
        assert page.url != first and page.request.get(first).status == 404
        page.get_by_role("button", name="Delete").click()
        page.locator("dialog").get_by_role("button", name="Delete").click()
        expect(page.get_by_role("status").last).to_have_text("Deleted the entry")
        assert len(endpoint.bodies) == calls
        ask(served.api, QUESTION)
        assert len(endpoint.bodies) == calls + 1


def test_only_the_chosen_entry_is_deleted(served: BaseConsole) -> None:
    chosen, *others = fill(served.base())
    [(status, text)] = served.send(TOKEN, [("POST", f"/cache/{chosen}/delete", None)])
    assert status == 200 and "Deleted the entry" in text
    assert sorted(served.base().ids()) == sorted(others) and set(served.forgotten) == {""}


def test_an_image_finds_its_entry(page: Page, tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        fill(served.base())
        log_in(page, served.url)
        page.goto(f"{served.url}/cache")
        file = {"name": "<i>.png", "mimeType": "image/png", "buffer": solid_image(3).data}
        page.get_by_label("Search by image").set_input_files(file)  # type: ignore[arg-type]
        page.get_by_role("button", name="Find similar entries").click()
        expect(page.locator("h2").first).to_contain_text("<i>.png")
        expect(page.locator(".grid li")).to_have_count(5)
        image = page.locator(".grid img").first
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") == 8


def fill(base: KnowledgeBase) -> list[str]:
    """Add five entries of different provenance and return their ids."""
    sources: tuple[dict[str, str], ...] = (
        {"request": "0" * 32},
        {"request": "1" * 32, "provenance": "human"},
        {"request": "2" * 32, "provenance": "imported"},
        {"provenance": "imported"},
        {},
    )
    base.add(
        Example(Query(f"Which shade is {n}?", (solid_image(n),)), f"shade {n}", tags=tags)
        for n, tags in enumerate(sources)
    )
    return base.ids()


@pytest.fixture(params=["file", "postgres"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> BaseConsole:
    location = None
    if request.param == "postgres":
        location = request.getfixturevalue("database")
    opened = base_console(tmp_path, location)
    found = opened.__enter__()
    request.addfinalizer(lambda: opened.__exit__(None, None, None))
    return found


def test_entries_are_filtered_in_files_and_in_postgresql(served: BaseConsole) -> None:
    fill(served.base())
    expected = {
        "": {0, 1, 2, 3, 4},
        "provenance=master": {0},
        "provenance=human": {1},
        "provenance=imported": {2, 3},
        "text=is+3": {3},
        "text=SHADE&provenance=imported": {2, 3},
        "text=nothing": set(),
    }
    for params, numbers in expected.items():
        [(status, text)] = served.send(TOKEN, [("GET", f"/cache?{params}", None)])
        table = text.partition("<tbody>")[2].partition("</tbody>")[0]
        shown = {n for n in range(5) if f"<b>shade {n}</b>" in table}
        assert (status, shown) == (200, numbers), params
    change = served.base().last_change()
    served.base().annotate(served.base().ids()[0], rationale="because", labels=["a", "b"])
    assert served.base().last_change() > change
    assert served.base().ids(label="b") == [served.base().ids()[-1]]


def test_a_correction_keeps_pins_and_records_its_author(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        key, base = served.key(ANN), served.base("team-a")
        base.add([text_example("q", "old", labels=("old",), rationale="since", tags={"t": "1"})])
        [id] = base.ids()
        base.pin([id])
        form = {"answer": "new\r\nlines", "labels": "new\r\n\r\nmore", "rationale": "thus"}
        [(status, _)] = served.send(key, [("POST", f"/cache/{id}", form)])
        [changed] = base
        assert status == 200 and changed.id != id and base.metadata(str(changed.id)).pinned
        assert changed.answer == "new\nlines" and changed.rationale == "thus"
        assert changed.labels == ("new", "more") and changed.source == "corrected by ann"
        assert changed.tags["provenance"] == "human" and changed.tags["t"] == "1"
        # The id depends on the answer alone.
        form = {"answer": "new\nlines", "labels": "most", "rationale": "so"}
        served.send(key, [("POST", f"/cache/{changed.id}", form)])
        [again] = base
        assert (again.id, again.labels, again.rationale) == (changed.id, ("most",), "so")
        before = len(served.forgotten)
        [(status, text)] = served.send(key, [("POST", f"/cache/{again.id}", {"answer": " "})])
        assert status == 400 and "the answer is empty" in text
        assert len(served.forgotten) == before and set(served.forgotten) == {"team-a"}


def test_a_key_without_admin_rights_pins_a_limited_number(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        key, base = served.key(ANN), served.base("team-a")
        ids = fill(base)
        replies = served.send(key, [("POST", f"/cache/{id}/pin", None) for id in ids[:3]])
        assert [status for status, _ in replies] == [200, 200, 403]
        assert base.stats().pinned == 2
        [(status, _)] = served.send(
            TOKEN, [("POST", f"/cache/{ids[3]}/pin?namespace=team-a", None)]
        )
        assert status == 200 and base.stats().pinned == 3


def test_exported_lines_are_imported_and_bad_ones_named(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        fill(served.base())
        [(_, lines)] = served.send(TOKEN, [("GET", "/cache/export", None)])
        assert base64.b64encode(solid_image(0).data).decode() in lines
        upload = f'{lines}{{"answer": \nnot JSON <b>\n'.encode()
        form = aiohttp.FormData()
        form.add_field("file", upload, filename="c.jsonl")
        form.add_field("namespace", "other")
        [(status, text)] = served.send(TOKEN, [("POST", "/cache/import", form)])
        assert status == 200 and "Entries imported: 5." in text and "Lines skipped: 2." in text
        assert "line 6" in text and "<b>:" not in text
        assert {one.tags["provenance"] for one in served.base("other")} == {"imported"}
        assert orjson.loads(lines.splitlines()[0])["answer"] == "shade 0"


@pytest.mark.parametrize("path", ["/cache", "/knowledge"])
def test_users_who_see_all_begin_in_a_namespace_with_entries(tmp_path: Path, path: str) -> None:
    operator = Account("", "operator", namespace="operators", admin=True)
    with base_console(tmp_path) as served:
        keys = [served.key(one) for one in (operator, EVE)]
        reads = [("GET", path, None), ("GET", f"{path}?namespace=operators", None)]
        [(status, text), _] = served.send(keys[0], reads)  # nothing anywhere
        assert status == 200 and 'value="operators"' in text
        served.base("few").add([text_example("Whose?", "one")])
        fill(served.base("many"))
        fill(served.base(""))  # cannot be named
        [(_, chosen), (_, named)] = served.send(keys[0], reads)
        assert 'value="many"' in chosen and 'value="operators"' in named
        [(_, own)] = served.send(keys[1], reads[:1])
        assert "many" not in own
        served.base("operators").add([text_example("Whose?", "ours")])
        [(_, own), _] = served.send(keys[0], reads)
        assert 'value="operators"' in own


def test_other_namespaces_and_forbidden_changes_are_rejected(tmp_path: Path) -> None:
    with base_console(tmp_path) as served:
        ann, eve = served.key(ANN), served.key(EVE)
        [own] = [fill(served.base("team-a"))]
        [secret] = [fill(served.base("team-b"))]
        served.base("team-b").add([text_example("Whose?", "bob's")])
        foreign = served.base("team-b").ids()[-1]
        assert secret == own  # equal entries have equal ids
        reads = [f"/cache/{foreign}", f"/cache/{foreign}/images/0", "/cache/0000000000000000"]
        reads += [f"/cache/{own[0]}/images/9"]
        for status, text in served.send(ann, [("GET", path, None) for path in reads]):
            assert status == 404 and "bob" not in text
        pages = ["", f"/{own[0]}", "/export"]
        paths = [f"/cache{name}?namespace=team-b" for name in pages]
        paths += [f"/knowledge{name}?namespace=team-b" for name in ("", "/map", "/duplicates")]
        for status, _ in served.send(ann, [("GET", path, None) for path in paths]):
            assert status == 403
        for path in ("/cache", "/cache?text=Whose", "/knowledge"):
            [(status, text)] = served.send(ann, [("GET", path, None)])
            assert status == 200 and "bob" not in text and "team-b" not in text
        entry = f"/cache/{own[0]}"
        posts = [entry, f"{entry}/pin", f"{entry}/unpin", f"{entry}/delete", "/cache/import"]
        posts.append("/knowledge/add")
        requests = [("POST", path, {"answer": "x"}) for path in posts]
        elsewhere = [*posts, "/cache"]
        other = [("POST", f"{path}?namespace=team-b", {"answer": "x"}) for path in elsewhere]
        for key, read_only, sent in (
            (eve, False, requests),
            (TOKEN, True, [*requests, *other[:-1]]),
            (ann, False, other),
        ):
            for status, _ in served.send(key, sent, read_only=read_only):
                assert status == 403
        assert served.forgotten == [] and len(served.base("team-a")) == 5
