from __future__ import annotations

import logging
from collections import Counter

import pytest

from bottega.errors import EmptyKnowledgeBaseError, SettingError
from bottega.gateway.telemetry.logs import WarningLogger

PRIVATE = "the query 'my diagnosis' has no image"


def test_problem_is_logged_once_and_counted_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counts = Counter[str]()
    warn = WarningLogger(lambda reason: counts.update([reason]))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            warn("no demonstrations", SettingError(PRIVATE, hint=PRIVATE))
        warn("no demonstrations", EmptyKnowledgeBaseError(PRIVATE, hint=""))
        warn("not remembered")
    assert counts == {"no demonstrations": 4, "not remembered": 1}
    assert len(caplog.records) == 3
    assert "SettingError" in caplog.text
    assert "diagnosis" not in caplog.text
