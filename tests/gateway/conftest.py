from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from tests.gateway.harness import Harness, harness
from tests.gateway.image_servers import World, running_world


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Harness]:
    with harness(tmp_path) as server:
        yield server


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with running_world() as here:
        yield here
