from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.gateway.gateways import ask
from tests.server import Server
from tests.ui.conftest import console, log_in, serious_findings
from tests.ui.test_pages import ADMIN, TEAM


def test_a_key_is_created_limited_rotated_and_revoked(
    page: Page, endpoint: Server, tmp_path: Path
) -> None:
    with console(tmp_path, endpoint, ADMIN) as served:
        accounts = served.server.accounts
        log_in(page, served.url, served.keys["boss"])
        page.get_by_role("link", name="Keys").click()
        page.get_by_text("Create a key").click()
        create = page.locator("form[action='/ui/keys']")
        create.get_by_label("Name", exact=True).fill("<i>team</i>")
        create.get_by_label("Namespace", exact=True).fill("team-a")
        create.get_by_label("US dollars per month").fill("0.5")
        create.get_by_role("button", name="Create").click()
        first = page.get_by_label("New key").input_value()
        account = accounts.authenticate(first)
        assert account is not None
        assert (account.name, account.namespace) == ("<i>team</i>", "team-a")
        assert account.usd_per_month == 0.5 and account.can_store
        assert ask(served.api, "What is 3 + 4?", key=first)[0]["choices"]
        assert serious_findings(page) == []

        row = page.locator(f"#key-{account.id}")
        row.locator("summary").click()
        row.get_by_label("Requests per minute").fill("7")
        row.get_by_label("Last valid day").fill("2099-12-31")
        row.get_by_role("button", name="Save").click()
        expect(page.locator(f"#key-{account.id}")).to_contain_text("2099-12-31")
        changed = accounts.find(account.id)
        assert changed is not None and changed.requests_per_minute == 7
        assert changed.expires is not None and changed.usd_per_month == 0.5

        row.locator("summary").click()
        row.get_by_role("button", name="Rotate").click()
        page.locator("dialog").get_by_role("button", name="Rotate").click()
        second = page.get_by_label("New key").input_value()
        assert accounts.authenticate(first) is None
        assert accounts.authenticate(second) == changed

        row.locator("summary").click()
        row.get_by_role("button", name="Revoke").click()
        page.get_by_role("button", name="Cancel").click()
        assert accounts.authenticate(second) is not None
        row.get_by_role("button", name="Revoke").click()
        page.locator("dialog").get_by_role("button", name="Revoke").click()
        expect(page.get_by_role("status").last).to_have_text("Revoked the key of <i>team</i>")
        assert accounts.authenticate(second) is None
        assert second not in page.content() and first not in page.content()


def test_saving_a_key_unchanged_keeps_what_its_form_cannot_show(
    page: Page, endpoint: Server, tmp_path: Path
) -> None:
    with console(tmp_path, endpoint, ADMIN, TEAM) as served:
        accounts = served.server.accounts
        ann = accounts.list()[1]
        for expires in (time.time() + 3600, 1e12):  # and after the year 9999
            strict = accounts.update(ann.id, tiers=(), expires=expires)
            log_in(page, served.url, served.keys["boss"])
            page.goto(f"{served.url}/keys")
            row = page.locator(f"#key-{ann.id}")
            row.locator("summary").click()
            row.get_by_label("Requests per minute").fill("9")
            row.get_by_role("button", name="Save").click()
            expect(page.get_by_role("status").last).to_have_text("Changed the key of ann")
            assert accounts.find(ann.id) == replace(strict, requests_per_minute=9)
