from __future__ import annotations

from bottega.routing import always
from tests.routing.builders import QUERY, TIERS


async def test_everything_goes_to_one_tier() -> None:
    assert await always(TIERS[1])(QUERY) is TIERS[1]
