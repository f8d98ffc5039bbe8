"""Gateway defaults that `bottega tune` stored in the cache file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from bottega._util.locations import StoreLocation
from bottega.errors import StoreBusyError
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.running.cache_views import cache_location
from bottega.knowledge import KnowledgeBase
from bottega.knowledge.tuned_settings import TunedSettings, tuned_settings


def with_tuned_settings(config: Config) -> Config:
    """Return the configuration with the stored shots and order where it sets none.

    They are read from the namespace without a name. Tiers whose answers are stored keep their
    default of no demonstrations. Raises `StoreError` for a file that is not a cache.
    """
    stored = _stored(cache_location(config))
    if stored is None:
        return config
    tiers = tuple(
        replace(tier, shots=stored.shots)
        if tier.shots is None and tier.name not in config.stored_tiers
        else tier
        for tier in config.tiers
    )
    cache = replace(config.cache, order=config.cache.order or stored.order)
    return replace(config, tiers=tiers, cache=cache)


def _stored(file: StoreLocation) -> TunedSettings | None:
    if not file.may_hold_examples():
        return None
    with suppress(StoreBusyError), KnowledgeBase.open(file.target, None) as knowledge:
        return tuned_settings(knowledge)
    return None
