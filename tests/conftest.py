from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import server


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Server]:
    """A chat-completions endpoint on loopback that misbehaves on demand."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with server.running() as running:
        yield running
