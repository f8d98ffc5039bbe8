"""Log of outages."""

from __future__ import annotations

import logging

import pytest

from bottega._util.batch_writer import OutageLog


def test_an_outage_is_logged_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
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
