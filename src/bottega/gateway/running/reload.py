"""Reload of settings on SIGHUP, without a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from bottega.errors import SettingError
from bottega.gateway.config.settings import Config
from bottega.gateway.running.build import build_fetch, key_defaults, request_limits
from bottega.gateway.running.server import GatewayServer
from bottega.gateway.running.tiers import price_overrides
from bottega.recording import PriceTable

log = logging.getLogger(__name__)

SECTIONS = ("gateway", "route", "cache", "replay", "limits", "shadow", "keys")
RELOADED = {
    *(f"gateway.{name}" for name in ("max_concurrent", "allowed_hosts", "finish_seconds")),
    *(f"keys.{name}" for name in ("max_concurrent", "tiers", "max_namespaces")),
    *(f"limits.{name}" for name in ("messages", "text_characters", "images", "image_mb")),
    *(f"limits.{name}" for name in ("image_pixels", "request_pixels", "fields")),
    *(f"limits.{name}" for name in ("fetch_images", "fetch_hosts", "fetch_mb", "fetch_seconds")),
}


def reload(gateway_server: GatewayServer, read: Callable[[], Config]) -> None:
    """Apply the settings that `read` returns and that need no restart, and log the others. An
    invalid configuration changes nothing."""
    try:
        new = read()
        applied = _merged(gateway_server.config, new)
        prices = price_overrides(applied, gateway_server.tier_set.served)
    except SettingError as error:
        log.error("configuration not reloaded: %s (%s)", error, error.hint)
        return
    changed = list(_changed(gateway_server.config, applied))
    gateway_server.config = applied
    if isinstance(
        gateway_server.tier_set.prices, PriceTable
    ):  # else the user's pipeline has its own
        gateway_server.tier_set.prices.override(prices)
    gateway = gateway_server.gateway
    gateway.limits, gateway.fetch = request_limits(applied.limits), build_fetch(applied.limits)
    gateway.allowed_hosts = applied.gateway.allowed_hosts
    gateway.more_fields = frozenset(applied.limits.fields)
    gateway.completer.finish_seconds = applied.gateway.finish_seconds
    if gateway.access is not None:
        gateway.access.defaults = key_defaults(applied)
    gateway_server.app.most = applied.gateway.max_concurrent
    log.info("configuration reloaded; changed: %s", ", ".join(changed) or "nothing")
    if waiting := list(_changed(applied, new)):
        log.warning("changed settings that need a restart: %s", ", ".join(waiting))


def _merged(old: Config, new: Config) -> Config:
    """Return the old configuration with the settings of the new one that need no restart."""
    values: dict[str, dict[str, Any]] = {}
    for name in RELOADED.intersection(_changed(old, new)):
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = getattr(getattr(new, section), key)
    sections: dict[str, Any] = {
        name: replace(getattr(old, name), **changed) for name, changed in values.items()
    }
    prices = {tier.name: tier.price for tier in new.tiers}
    tiers = tuple(replace(one, price=prices.get(one.name, one.price)) for one in old.tiers)
    return replace(old, tiers=tiers, **sections)


def _changed(old: Config, new: Config) -> Iterator[str]:
    """Yield the names of the settings that differ, such as `limits.images`."""
    if [tier.name for tier in old.tiers] != [tier.name for tier in new.tiers]:
        yield "tiers"
    else:
        for one, other in zip(old.tiers, new.tiers, strict=True):
            yield from _differences(f"tiers.{one.name}", one, other)
    for name in SECTIONS:
        yield from _differences(name, getattr(old, name), getattr(new, name))


def _differences(name: str, old: Any, new: Any) -> Iterator[str]:
    for one in fields(old):
        if getattr(old, one.name) != getattr(new, one.name):
            yield f"{name}.{one.name}"
