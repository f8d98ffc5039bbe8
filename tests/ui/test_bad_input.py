"""Large, broken and many images in the browser, and a gateway that restarts under an open page."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image as Pillow
from playwright.sync_api import Locator, Page, Route, expect

from bottega.errors import StoreUnavailableError
from tests.builders import solid_image
from tests.gateway.gateways import ask
from tests.knowledge.doubles import damaged_image
from tests.server import Server
from tests.ui.base_console import base_console
from tests.ui.conftest import console, drop, log_in
from tests.ui.test_pages import ADMIN

LARGE = (8000, 5000)  # pixels
DECODED = "image => image.decode().then(() => image.naturalWidth)"
REQUEST = 50  # files


def files(count: int) -> dict[str, bytes]:
    return {f"{n}.png": solid_image(n).data for n in range(count)}


def counts_of(page: Page) -> list[int]:
    """Return how many files the report on the page counts as added, present and failed."""
    return [int(one) for one in page.locator("#added [data-count]").all_inner_texts()]


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_dropped_files_are_added_or_named_despite_failures(
    page: Page,
    page_errors: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
) -> None:
    dropped, requests = files(count), list[str]()
    dropped["250.png"] = b"no image"
    dropped["251.png"] = dropped["3.png"]

    def full(*examples: object, **settings: object) -> None:
        raise StoreUnavailableError("the disk is full", hint="free some space")

    def fail_some(route: Route) -> None:
        requests.append(route.request.url)
        if len(requests) == 3:
            monkeypatch.setattr(served.base(), "add", full)
        if len(requests) == 8:
            route.abort("connectionrefused")
        else:
            route.continue_()

    with base_console(tmp_path) as served:
        log_in(page, served.url)
        page.goto(f"{served.url}/knowledge/add")
        page.route("**/knowledge/add", fail_some)
        drop(page, ".drop", dropped)
        page.get_by_label("Label", exact=True).fill("shade")
        add = page.get_by_role("button", name="Add the images")
        add.click()
        expect(page.get_by_text("the disk is full")).to_be_visible()
        assert counts_of(page) == [2 * REQUEST, 0, 0]
        monkeypatch.undo()
        add.click()
        expect(page.get_by_text(f"{4 * REQUEST} of {count} files were sent")).to_be_visible()
        assert counts_of(page) == [2 * REQUEST, 2 * REQUEST, 0]
        add.click()
        expect(page.get_by_text("250.png is not a readable image")).to_be_visible()
        expect(page.locator("#connection")).to_be_hidden(timeout=30_000)
        assert counts_of(page) == [count - 2 - 4 * REQUEST, 4 * REQUEST + 1, 1]
        assert len(served.base()) == count - 2
    page_errors.clear()  # status 503


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for servers of the block, one after the other."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def test_open_pages_survive_a_restart_of_the_gateway(
    page: Page, endpoint: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.ui.overview.REFRESH_SECONDS", 0.2)
    entry, overview = page.context.new_page(), page.context.new_page()
    counts = overview.get_by_role("listitem")
    with reserved_port() as port:
        with console(tmp_path, endpoint, ADMIN, port=port) as served:
            key = served.keys["boss"]
            ask(served.api, "What is 3 + 4?", key=key, model="bottega/large")
            log_in(page, served.url, key)
            page.goto(f"{served.url}/playground")
            page.locator("select[name=model_a]").select_option("bottega/large")
            page.get_by_label("Question").fill("Which shade?")
            drop(page, ".drop", files(1))
            overview.goto(f"{served.url}/overview")
            expect(counts.filter(has_text="large: 1").first).to_be_visible()
            entry.goto(f"{served.url}/cache/{served.open_base('').ids()[0]}")
            entry.locator("summary", has_text="Edit").click()
            entry.get_by_label("Correct answer").fill("a long answer")
        page.get_by_role("button", name="Ask").click()
        entry.get_by_role("button", name="Save").click()
        opened = (page, overview, entry)
        for one in opened:
            expect(one.get_by_text("The server cannot be reached")).to_be_visible()
        with console(tmp_path, endpoint, port=port) as served:
            page.get_by_role("button", name="Ask").click()
            expect(page.locator("#results .answer")).to_have_text(["seven"])
            [parts] = [one["messages"][-1]["content"] for one in endpoint.bodies[-1:]]
            assert {part["type"] for part in parts} == {"text", "image_url"}
            expect(counts.filter(has_text="large: 2").first).to_be_visible()
            entry.get_by_role("button", name="Save").click()
            expect(entry.get_by_role("status").last).to_have_text("Saved")
            expect(entry.locator(".answer")).to_have_text("a long answer")
            for one in opened:
                expect(one.get_by_text("The server cannot be reached")).to_be_hidden()
            overview.close()


@pytest.mark.parametrize("size", [(80, 50), pytest.param(LARGE, marks=pytest.mark.slow)])
def test_dropped_images_are_answered_and_broken_ones_lose_nothing(
    page: Page, page_errors: list[str], endpoint: Server, tmp_path: Path, size: tuple[int, int]
) -> None:
    Pillow.new("1", size).save(tmp_path / "large.png")
    broken = {"text": b"no image", "empty": b"", "damaged": damaged_image().data}
    for name, data in broken.items():
        (tmp_path / f"{name}.png").write_bytes(data)
    with console(tmp_path, endpoint, embed="pixels") as served:
        log_in(page, served.url)
        page.goto(f"{served.url}/playground")
        page.get_by_label("Question").fill("Which shade?")
        assert drop(page, "button[value=ask]", files(1))
        expect(page.locator(".previews img")).to_have_count(0)
        zone = page.locator(".drop")
        really_drop(page, zone, tmp_path / "large.png")
        assert page.get_by_alt_text("large.png").evaluate(DECODED) == size[0]
        page.locator("select[name=model_a]").select_option("bottega/large")
        page.get_by_label("Store the master's answer").check()
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#results .answer")).to_have_text(["seven"])
        assert page_errors == []
        for name in broken:
            really_drop(page, zone, tmp_path / f"{name}.png")
            page.get_by_role("button", name="Ask").click()
            expect(page.get_by_text(f"{name}.png is")).to_be_visible()
            expect(page.get_by_label("Question")).to_have_value("Which shade?")
        page.goto(f"{served.url}/cache")
        page.get_by_label("Text of the question").fill("a long text")
        for name in broken:
            really_drop(page, zone, tmp_path / f"{name}.png")
            page.get_by_role("button", name="Find similar entries").click()
            expect(page.get_by_text(f"{name}.png is")).to_be_visible()
            expect(page.get_by_label("Text of the question")).to_have_value("a long text")
        really_drop(page, zone, tmp_path / "large.png")
        page.get_by_role("button", name="Find similar entries").click()
        expect(page.get_by_role("heading", level=2).first).to_contain_text("large.png")
        expect(page.locator(".grid li")).to_contain_text("1.000")
    page_errors.clear()  # status 400


def really_drop(page: Page, target: Locator, path: Path) -> None:
    """Drop a file as the window system does."""
    target.scroll_into_view_if_needed()
    box = target.bounding_box()
    assert box is not None
    devtools = page.context.new_cdp_session(page)
    for type in ("dragEnter", "dragOver", "drop"):
        devtools.send(
            "Input.dispatchDragEvent",
            {
                "type": type,
                "x": box["x"] + box["width"] / 2,
                "y": box["y"] + box["height"] / 2,
                "data": {"items": [], "files": [str(path)], "dragOperationsMask": 1},
            },
        )
    devtools.detach()
