from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import chromium


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start one Chromium for all page tests; yield its address."""
    with chromium(tmp_path_factory.mktemp("browser") / "profile") as address:
        yield address
