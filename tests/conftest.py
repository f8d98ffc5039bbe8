from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import server

# How long an example takes is the machine's affair, and it may be busy.
# Each run draws other examples; pytest --hypothesis-profile thorough draws many at once.
settings.register_profile("unhurried", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("unhurried")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[server.Server]:
    """A chat-completions endpoint on loopback that misbehaves on demand."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    with server.running() as running:
        yield running
