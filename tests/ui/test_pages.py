from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, expect

from bottega.gateway.accounting.ledger_schema import Account
from bottega.gateway.accounting.reports import read_feedback
from tests.builders import solid_image
from tests.server import Server
from tests.ui.conftest import console, log_in

ADMIN = Account("", "boss", admin=True)
TEAM = Account("", "ann", namespace="team-a")


def test_an_image_is_asked_about_and_found_again(
    page: Page, endpoint: Server, tmp_path: Path
) -> None:
    with console(tmp_path, endpoint, ADMIN) as served:
        log_in(page, served.url, served.keys["boss"])
        page.get_by_role("link", name="Playground", exact=True).click()
        file = {"name": "<b>.png", "mimeType": "image/png", "buffer": solid_image(3).data}
        page.locator("input[name=images]").set_input_files(file)  # type: ignore[arg-type]
        expect(page.locator(".previews img")).to_have_count(1)
        page.get_by_label("Question").fill("Which <b>digit</b>?")
        page.get_by_label("Compare with this setting").check()
        page.get_by_role("button", name="Ask").click()
        expect(page.locator("#results .answer")).to_have_text(["seven", "seven"])
        page.get_by_text("Add to the knowledge base").click()
        page.get_by_label("Correct answer").fill("three")
        page.get_by_role("button", name="Add the question").click()
        expect(page.locator("#results .notice")).to_have_text("Added to the knowledge base")
        page.get_by_role("link", name="Requests").click()
        page.get_by_label("Text of the question or answer").fill("DIGIT")
        page.get_by_role("button", name="Search").click()
        expect(page.locator("tbody tr")).to_have_count(2)
        page.locator("tbody a").first.click()
        expect(page.locator(".card .question")).to_have_text("Which <b>digit</b>?")
        page.get_by_role("button", name="Good answer").click()
        expect(page.get_by_role("status").last).to_have_text("Saved the rating")
        page.get_by_label("Correct answer").fill("eight")
        page.get_by_role("button", name="Save the correction").click()
        expect(page.get_by_role("status").last).to_contain_text("pinned demonstration")
        assert [one.correction for one in read_feedback(served.server.ledger)] == ["eight"]
        page.locator("select[name=model]").select_option("bottega/large")
        page.get_by_role("button", name="Ask again").click()
        expect(page.get_by_role("status").last).to_contain_text("Asked again")
        expect(page.locator("p.answer")).to_have_text("seven")
        image = page.get_by_alt_text("image of the question")
        assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0


def test_keyboard_alone_reaches_the_answer(page: Page, endpoint: Server, tmp_path: Path) -> None:
    with console(tmp_path, endpoint) as served:
        log_in(page, served.url)
        page.goto(f"{served.url}/playground")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.name") == "question":
                break
        page.keyboard.type("What is 3 + 4?")
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.value") == "ask":
                break
        page.keyboard.press("Enter")
        expect(page.locator("#results .answer")).to_have_text(["seven"])


def test_an_ended_session_and_a_lost_connection_keep_the_input(
    page: Page, page_errors: list[str], endpoint: Server, tmp_path: Path
) -> None:
    with console(tmp_path, endpoint, ADMIN) as served:
        log_in(page, served.url, served.keys["boss"])
        page.goto(f"{served.url}/playground")
        page.get_by_label("Question").fill("a long question")
        [account] = served.server.accounts.list()
        served.server.accounts.revoke(account.id)
        with page.expect_response(lambda response: response.status == 401):
            page.get_by_role("button", name="Ask").click()
        expect(page.locator("#connection")).to_contain_text("Log in again")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#connection")).to_contain_text("server cannot be reached")
    assert page.get_by_label("Question").input_value() == "a long question"
    page_errors.clear()
