from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest

from bottega.gateway.accounting.ledger import Ledger
from tests.gateway.harness import Harness, harness
from tests.gateway.image_servers import World, running_world
from tests.postgres import PostgresServer


@pytest.fixture(scope="session")
def gateway_tables(postgres: PostgresServer) -> str:
    url = postgres.create_database()
    Ledger(url).close()
    return url


@pytest.fixture
def gateway_database(postgres: PostgresServer, gateway_tables: str) -> str:
    """Return the URL of a database with the gateway's tables, which are empty."""
    postgres.empty(gateway_tables)
    return gateway_tables


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Harness]:
    with harness(tmp_path) as server:
        yield server


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with running_world() as here:
        yield here
