"""Log of outages."""

from __future__ import annotations

import logging

import pytest

from bottega._util.batch_writer import OutageLog


def test_an_outage_is_logged_once_a_minute_and_its_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = OutageLog(logging.getLogger("test"))
    outage.ended("it answers again")
    for _ in range(2):
        for number in range(3):
            outage.failed("it fails: %d", number)
            assert outage.lasts
        for _ in range(3):
            outage.ended("it answers again")
            assert not outage.lasts
    expected = [("ERROR", "it fails: 0"), ("WARNING", "it answers again")]
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == expected * 2
    monkeypatch.setattr("bottega._util.batch_writer.LOG_SECONDS", 0.0)
    caplog.clear()
    outage.failed("it fails: %d", 1)
    outage.failed("it fails: %d", 2)
    assert [one.getMessage() for one in caplog.records] == ["it fails: 1", "it fails: 2"]


def test_expected_failures_may_have_a_lower_level(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega._util.batch_writer.LOG_SECONDS", 0.0)
    outage, bug = OutageLog(logging.getLogger("test"), logging.WARNING), ValueError("a bug")
    outage.failed("it fails")
    outage.failed("it fails", exc_info=bug)
    assert [(one.levelname, one.exc_info and one.exc_info[1]) for one in caplog.records] == [
        ("WARNING", None),
        ("ERROR", bug),
    ]
