from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from bottega.errors import SettingError
from bottega.generation import ScriptedGenerator
from bottega.protocols import Tier
from bottega.routing import RandomRouter
from bottega.types import Query

TIERS = [Tier(name, ScriptedGenerator([])) for name in ("small", "middle", "large")]


async def sampled_tiers(rate: float | Sequence[float], seed: int, n: int = 2000) -> list[str]:
    route = RandomRouter(TIERS, rate, seed)
    return [(await route(Query("q"))).name for _ in range(n)]


async def test_the_seed_determines_every_choice() -> None:
    first = await sampled_tiers(0.2, seed=3)
    assert first == await sampled_tiers(0.2, seed=3)
    assert first != await sampled_tiers(0.2, seed=4)


async def test_a_single_rate_is_the_masters() -> None:
    counts = Counter(await sampled_tiers(0.2, seed=0))
    # Four standard deviations of 2000 draws.
    assert counts["large"] == pytest.approx(400, abs=72)
    assert counts["middle"] == pytest.approx(800, abs=88)
    assert Counter(await sampled_tiers(1.0, seed=0)) == {"large": 2000}
    assert "large" not in await sampled_tiers(0.0, seed=0)


async def test_each_tier_can_have_a_rate() -> None:
    counts = Counter(await sampled_tiers((0.7, 0.0, 0.3), seed=0))
    assert counts["small"] == pytest.approx(1400, abs=82)
    assert counts["middle"] == 0


@pytest.mark.parametrize("rate", [1.5, -0.1, (0.5, 0.5), (0.5, 0.4, 0.2), (1.5, -0.5, 0.0)])
def test_invalid_rates_are_rejected(rate: float | Sequence[float]) -> None:
    with pytest.raises(SettingError, match="one for each of 3 tiers"):
        RandomRouter(TIERS, rate)


async def test_one_tier_is_the_master() -> None:
    assert (await RandomRouter(TIERS[:1], 1.0)(Query("q"))).name == "small"
    with pytest.raises(SettingError):
        RandomRouter(TIERS[:1], 0.5)
