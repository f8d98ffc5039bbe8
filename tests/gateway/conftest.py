from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from tests.gateway.harness import Harness, harness
from tests.gateway.world import World, opened


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Harness]:
    with harness(tmp_path) as found:
        yield found


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with opened() as here:
        yield here
