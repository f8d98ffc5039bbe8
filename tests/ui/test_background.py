from __future__ import annotations

from concurrent.futures import Future

import pytest

from bottega.errors import StoreError
from bottega.ui.background import BackgroundComputations


def test_a_slow_result_is_returned_once_to_a_later_call() -> None:
    background = BackgroundComputations(wait_seconds=0.01)
    first: Future[str] = Future()
    assert background.result("key", first.result) is None
    assert background.result("key", lambda: "second") is None  # the first one still runs
    first.set_result("first")
    background.wait_seconds = 10
    assert background.result("key", lambda: "second") == "first"
    assert background.result("key", lambda: "second") == "second"


def test_errors_are_raised_and_not_kept() -> None:
    background = BackgroundComputations(wait_seconds=10)

    def fail() -> None:
        raise StoreError("damaged", hint="restore it")

    with pytest.raises(StoreError, match="damaged"):
        background.result("key", fail)
    assert background.result("key", lambda: 1) == 1


def test_a_result_that_nobody_fetches_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundComputations(wait_seconds=0.01)
    slow: Future[str] = Future()
    assert background.result("key", slow.result) is None
    slow.set_result("old")
    background.wait_seconds = 10
    assert background.result("other", lambda: 1) == 1  # after the first one, in the same thread
    monkeypatch.setattr("bottega.ui.background.KEPT_SECONDS", -1.0)
    assert background.result("key", lambda: "new") == "new"
