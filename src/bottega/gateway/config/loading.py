"""What `bottega serve --config` reads: one TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from bottega.errors import SettingError
from bottega.gateway.config.settings import (
    CacheSettings,
    Config,
    KeySettings,
    LimitSettings,
    Place,
    Read,
    ReplaySettings,
    RouteSettings,
    ServerSettings,
    ShadowSettings,
    TierSettings,
    as_table,
    check_known,
    read,
    refuse_secrets,
)
from bottega.gateway.fields import SERVICE_TIER
from bottega.gateway.origins import has_port
from bottega.naming import REMOTE

__all__ = ["Config", "load_config", "parse_config"]

# Which router reads which parameter, and which of them it cannot do without.
PARAMETERS = {
    "always": ("tier",),
    "coin": ("master_rate", "seed"),
    "budget": ("usd_per_1k", "seed"),
    "coverage": ("at_least", "master_rate", "seed"),
    "confidence": ("below", "samples"),
}
NEEDED = {
    "budget": ("usd_per_1k",),
    "coverage": ("at_least", "master_rate"),
    "confidence": ("below",),
}
WRITTEN = {"usd_per_1k": "usd_per_1k = 1.0", "at_least": "at_least = 0.8", "below": "below = 0.7"}
SECTIONS = ("gateway", "tiers", "route", "cache", "replay", "limits", "shadow", "keys")
MASTER_RATE = 0.2
AT_LEAST = 0.3  # a cosine: three of four unrelated texts are below it, hardly any two pictures
TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
FLEX = 'give a tier extra_body = { service_tier = "flex" } and its price'
EXAMPLE = "examples/bottega.toml describes every setting"


def load_config(file: Path) -> Config:
    """Raises `SettingError` for whatever no gateway could be built from."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # editors on Windows write a mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingError(f"{file} cannot be read: {reason}", hint=EXAMPLE) from error
    return parse_config(text, str(file))


def parse_config(text: str, file: str = "bottega.toml") -> Config:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingError(f"{file} is not TOML: {error}", hint=EXAMPLE) from error
    at = Place(file)
    refuse_secrets(document, at)
    check_known(document, SECTIONS, at)

    def section(name: str, kind: type[Read]) -> Read:
        return read(kind, document.get(name, {}), at / name)

    config = Config(
        file,
        _tiers(document.get("tiers"), at / "tiers"),
        gateway=section("gateway", ServerSettings),
        route=section("route", RouteSettings),
        cache=section("cache", CacheSettings),
        replay=section("replay", ReplaySettings),
        limits=section("limits", LimitSettings),
        shadow=section("shadow", ShadowSettings),
        keys=section("keys", KeySettings),
    )
    config = replace(config, route=_usual(config), cache=_usual_cache(config.cache))
    _check_route(config, document.get("route", {}), at / "route")
    _check_pairs(config, at)
    config.check_public()
    return config


def _usual(config: Config) -> RouteSettings:
    """Without a word on it one tier answers everything, and of several a coin chooses."""
    route = config.route
    if route.by is None:
        route = replace(route, by="coin" if len(config.tiers) > 1 else "always")
    if route.by == "coin" and route.master_rate is None:
        route = replace(route, master_rate=MASTER_RATE)
    return route


def _usual_cache(cache: CacheSettings) -> CacheSettings:
    """An example that is about something else does harm; scores of bm25 have no such scale."""
    if cache.at_least is None and cache.retrieve == "nearest":
        return replace(cache, at_least=AT_LEAST)
    return cache


def _tiers(table: object, at: Place) -> tuple[TierSettings, ...]:
    if not table:
        raise at.error(
            "are missing: nobody would answer",
            hint='[tiers.apprentice] with model = "bundled", then [tiers.master]; ' + EXAMPLE,
        )
    return tuple(_tier(name, one, at / name) for name, one in as_table(table, at).items())


def _tier(name: str, table: object, at: Place) -> TierSettings:
    if not TIER_NAME.fullmatch(name):
        raise at.error(
            "cannot name a tier", hint="use up to 32 small letters, digits, - and _: [tiers.master]"
        )
    if as_table(table, at).get("model", "") in ("", REMOTE):
        raise (at / "model").error(
            "is missing", hint='model = "openai:NAME", "bundled", or a Hugging Face id or folder'
        )
    tier = read(TierSettings, table, at, name=name)
    if not tier.is_remote and (tier.base_url or tier.api_key_env or tier.extra_body):
        raise at.error(
            "runs in this process: it has no base_url, api_key_env or extra_body",
            hint=f'model = "openai:{tier.model}" asks an endpoint',
        )
    if tier.api_key_env is not None and not VARIABLE.fullmatch(tier.api_key_env):
        raise (at / "api_key_env").error(
            "is not the name of an environment variable", hint='api_key_env = "MASTER_KEY"'
        )
    if tier.price is not None and len(tier.price) not in (2, 3):
        raise (at / "price").error(
            "is not [in, out] or [in, out, cached]", hint="US dollars per million: [0.15, 0.60]"
        )
    return tier


def _check_route(config: Config, given: Iterable[str], at: Place) -> None:
    by, names = str(config.route.by), [tier.name for tier in config.tiers]
    for other, parameters in PARAMETERS.items():
        for name in parameters:
            if name in given and name not in PARAMETERS[by]:
                raise (at / name).error(
                    f"is not read by the route {by!r}", hint=f'by = "{other}", or leave it out'
                )
    if config.route.tier is not None and config.route.tier not in names:
        raise (at / "tier").error("is not one of the tiers", hint=f"use {', '.join(names)}")
    needed = NEEDED.get(by, ())
    if needed and (count := len(set(given) & set(needed))) != 1:
        raise at.error(
            f"by {by!r} needs {'either ' * (len(needed) > 1)}{' or '.join(needed)}"
            f"{', not both' * (count > 1)}",
            hint="leave one of them out" if count else WRITTEN[needed[0]],
        )
    if by != "always" and len(names) == 1:
        raise (at / "by").error("chooses among tiers, and there is one", hint='by = "always"')


def _check_pairs(config: Config, at: Place) -> None:
    """Settings that make no sense without another."""
    if config.limits.fetch_hosts and not config.limits.fetch_images:
        raise (at / "limits" / "fetch_hosts").error(
            "names hosts, and images are not fetched", hint="fetch_images = true"
        )
    for host in config.gateway.allowed_hosts:
        if has_port(host):
            raise (at / "gateway" / "allowed_hosts").error(
                f"contains a port, got {host!r}", hint="write the name only, without the port"
            )
    if config.gateway.metrics_port and config.gateway.metrics_port == config.gateway.port:
        raise (at / "gateway" / "metrics_port").error(
            f"must differ from gateway.port, got {config.gateway.metrics_port}",
            hint="use another port, such as 9100",
        )
    names = {"*", *(tier.name for tier in config.tiers)}
    if not names.issuperset(config.keys.tiers):
        raise (at / "keys" / "tiers").error(
            f"must be tiers of this file, got {', '.join(config.keys.tiers)}",
            hint=f"use {', '.join(sorted(names))}",
        )
    if SERVICE_TIER in config.limits.fields:
        raise (at / "limits" / "fields").error(
            f"must not contain {SERVICE_TIER}: its prices are not published", hint=FLEX
        )
    for tier in config.tiers:
        if SERVICE_TIER in tier.extra_body and tier.price is None:
            raise (at / "tiers" / tier.name / "price").error(
                f"is missing: published prices do not depend on {SERVICE_TIER}",
                hint="set price = [1.0, 4.0], in US dollars per million tokens",
            )
    bm25 = config.cache.retrieve == "bm25"
    for section, number in (("cache", config.cache.at_least), ("route", config.route.at_least)):
        if bm25 and number is not None:
            raise (at / section / "at_least").error(
                "goes by similarity, and bm25 knows none", hint='retrieve = "nearest"'
            )
    if config.shadow.gate and not config.shadow.rate:
        raise (at / "shadow" / "gate").error(
            "goes by comparisons, and none are made", hint="rate = 0.02 compares one in fifty"
        )
