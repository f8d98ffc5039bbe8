"""Checks of settings against each other."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bottega._util.settings import SettingPath
from bottega.gateway.accounting.access import has_port
from bottega.gateway.config.gateway_settings import (
    CacheSettings,
    Config,
    StateSettings,
    is_server_url,
    sample_url,
)
from bottega.gateway.config.routing_settings import TierSettings
from bottega.openai_api.request import SERVICE_TIER
from bottega.recipes.cache_retrieval import WITHOUT_METRIC
from bottega.reranking.selection import MAX_SHOWN

# Settings that each router reads, and those of which it needs exactly one.
PARAMETERS = {
    "fixed": ("tier",),
    "random": ("master_rate", "seed"),
    "budget": ("usd_per_1k", "seed"),
    "coverage": ("min_similarity", "master_rate", "seed"),
    "confidence": ("min_confidence", "samples"),
}
NEEDED = {
    "budget": ("usd_per_1k",),
    "coverage": ("min_similarity", "master_rate"),
    "confidence": ("min_confidence",),
}
SAMPLES = {"usd_per_1k": 1.0, "min_similarity": 0.8, "min_confidence": 0.7}
UNDROPPABLE = {"model", "messages", "stream"}  # the gateway needs these fields
# A browser leaves out the default port. Browser extensions and desktop apps have other schemes.
ORIGIN = re.compile(
    r"(?!https://.*:443\Z|http://.*:80\Z)[a-z][a-z0-9+.-]*://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:\d+)?"
)
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")


def check_route(config: Config, given: Iterable[str], path: SettingPath) -> None:
    by, names = str(config.route.router), [tier.name for tier in config.tiers]
    for other, parameters in PARAMETERS.items():
        for name in parameters:
            if name in given and name not in PARAMETERS[by]:
                raise (path / name).error(
                    f"is not a setting of the router {by!r}",
                    hint=f'write router = "{other}", or remove {name}',
                )
    if config.route.tier is not None and config.route.tier not in names:
        problem = f"is not one of the tiers, got {config.route.tier!r}"
        raise (path / "tier").error(problem, hint=f"use {', '.join(names)}")
    needed = NEEDED.get(by, ())
    if needed and (count := len(set(given) & set(needed))) != 1:
        raise path.error(
            f"router {by!r} needs {'either ' * (len(needed) > 1)}{' or '.join(needed)}"
            f"{', not both' * (count > 1)}",
            hint="remove one of them" if count else f"write {needed[0]} = {SAMPLES[needed[0]]}",
        )
    searching = [tier.name for tier in config.tiers if tier.search != "none"]
    if searching and config.route.samples is not None:
        raise (path / "samples").error(
            f"must not be set together with tiers.{searching[0]}.search: each completion would be"
            f" sampled {config.route.samples} times",
            hint="remove samples; the confidence is then the reply's probability",
        )
    if by != "fixed" and len(names) == 1:
        raise (path / "router").error("needs several tiers, got 1", hint='write router = "fixed"')


def check_hosts(config: Config, path: SettingPath) -> None:
    if config.limits.fetch_hosts and not config.limits.fetch_images:
        raise (path / "limits" / "fetch_hosts").error(
            "has no effect while images are not fetched", hint="write fetch_images = true"
        )
    for host in config.gateway.allowed_hosts:
        if has_port(host):
            raise (path / "gateway" / "allowed_hosts").error(
                f"contains a port, got {host!r}", hint="write the name only, without the port"
            )
    for origin in config.gateway.allowed_origins:
        if not ORIGIN.fullmatch(origin):
            raise (path / "gateway" / "allowed_origins").error(
                f"must be origins as browsers send them, got {origin[:100]!r}",
                hint='write "https://app.example" or "http://localhost:3000": lower case, without'
                " path and default port, and each origin instead of *",
            )
    if config.gateway.metrics_port and config.gateway.metrics_port == config.gateway.port:
        raise (path / "gateway" / "metrics_port").error(
            f"must differ from gateway.port, got {config.gateway.metrics_port}",
            hint="use another port, such as 9100",
        )


def check_tiers(config: Config, path: SettingPath) -> None:
    names = {"*", *(tier.name for tier in config.tiers)}
    if not names.issuperset(config.keys.tiers):
        raise (path / "keys" / "tiers").error(
            f"must be tiers of this file, got {', '.join(config.keys.tiers)}",
            hint=f"use {', '.join(sorted(names))}",
        )
    if SERVICE_TIER in config.limits.fields:
        raise (path / "limits" / "fields").error(
            f"must not contain {SERVICE_TIER}: its prices are not published",
            hint='give a tier extra_body = { service_tier = "flex" } and its price',
        )
    for tier in config.tiers:
        if SERVICE_TIER in tier.extra_body and tier.price is None:
            raise (path / "tiers" / tier.name / "price").error(
                f"is missing: published prices do not depend on {SERVICE_TIER}",
                hint="set price = [1.0, 4.0], in US dollars per million tokens",
            )
        if needed := UNDROPPABLE.intersection(tier.drop_fields):
            raise (path / "tiers" / tier.name / "drop_fields").error(
                f"must not contain {', '.join(sorted(needed))}",
                hint='write drop_fields = ["temperature"], with optional fields only',
            )
        _check_search(config, tier, path / "tiers" / tier.name)
        _check_passages(config, tier, path / "tiers" / tier.name)


def _check_search(config: Config, tier: TierSettings, path: SettingPath) -> None:
    if tier.search == "none":
        defaults = TierSettings(tier.name, tier.model)
        for name in ("search_calls", "search_tokens", "search_seconds"):
            if getattr(tier, name) != getattr(defaults, name):
                raise (path / name).error(
                    "has no effect without a search", hint='write search = "rcts"'
                )
        return
    if not config.shots(tier):
        raise (path / "search").error(
            "needs demonstrations, and the tier has 0 shots", hint="write shots = 3"
        )
    if config.shots(tier) > MAX_SHOWN:
        raise (path / "shots").error(
            f"must be at most {MAX_SHOWN} with a search, got {config.shots(tier)}",
            hint="write shots = 3",
        )


def _check_passages(config: Config, tier: TierSettings, path: SettingPath) -> None:
    if tier.passages is None:
        if tier.compressor is not None:
            raise (path / "compressor").error(
                "has no effect without passages",
                hint='write passages = "FOLDER", a store of bottega compress build',
            )
        return
    if tier.is_remote:
        raise (path / "passages").error(
            "needs a model in this process: a KV prefix cannot be sent over HTTP",
            hint='write model = "bundled", or a Hugging Face id or folder',
        )
    if tier.search != "none":
        raise (path / "passages").error(
            "must not be set together with a search", hint="remove passages or search"
        )
    if not config.shots(tier):
        raise (path / "passages").error(
            "are not read, since the tier has 0 shots", hint="write shots = 5"
        )


def check_similarities(config: Config, path: SettingPath) -> None:
    scale = config.cache.retrieve not in WITHOUT_METRIC
    for section, number in (
        ("cache", config.cache.min_similarity),
        ("route", config.route.min_similarity),
    ):
        if not scale and number is not None:
            raise (path / section / "min_similarity").error(
                f"needs similarities, and {config.cache.retrieve} has none",
                hint='write retrieve = "nearest"',
            )


def check_parts_read(config: Config, path: SettingPath) -> None:
    """Raise `SettingError` if similarities choose the tier of images that no search compares."""
    cache = config.cache
    has_images = config.limits.images and any(tier.images != 0 for tier in config.tiers[:-1])
    if config.route.router != "coverage" or "image" in cache.reads or not has_images:
        return
    name = "embed" if cache.retrieve == "nearest" else "retrieve"
    value, better = (cache.embed, "by-kind") if name == "embed" else (cache.retrieve, "nearest")
    raise (path / "cache" / name).error(
        f"must read images for the router 'coverage', got {value!r}: any two images with the same"
        " question would count as similar",
        hint=f'write {name} = "{better}", or [limits] images = 0 if requests have no images',
    )


def check_shadow(config: Config, path: SettingPath) -> None:
    for name in ("gate", "judge"):
        if getattr(config.shadow, name) and not config.shadow.rate:
            raise (path / "shadow" / name).error(
                "needs shadow samples, and shadow.rate is 0",
                hint="write rate = 0.02 to compare one answer in fifty",
            )
    names = [tier.name for tier in config.tiers]
    if config.shadow.judge is not None and config.shadow.judge not in names:
        problem = f"must be the name of a tier, got {config.shadow.judge!r}"
        hint = f'write judge = "{names[-1]}" (tiers: {", ".join(names)})'
        raise (path / "shadow" / "judge").error(problem, hint=hint)


def check_state(config: Config, path: SettingPath) -> None:
    state = config.state
    for name in ("database", "redis"):
        _check_server(state, name, path)
    has_redis = state.redis is not None or state.redis_env is not None
    if has_redis and not state.is_shared:
        raise (path / "redis").error(
            "needs a database, which stores accounts and spending",
            hint=f'write database = "{sample_url("database")}"',
        )


def check_cache_settings(config: Config, path: SettingPath) -> None:
    cache = config.cache
    _check_server(cache, "database", path)
    if cache.file is not None and (cache.database or cache.database_env):
        raise (path / "file").error(
            "must not be set together with a database",
            hint="remove file, or database and database_env",
        )
    _check_server(cache, "vectors", path)
    if (cache.vectors or cache.vectors_env) and not (cache.database or cache.database_env):
        raise (path / "vectors").error(
            "needs a database, which stores the examples",
            hint=f'write database = "{sample_url("database")}", or remove vectors',
        )


def _check_server(settings: StateSettings | CacheSettings, name: str, path: SettingPath) -> None:
    """Raise `SettingError` if the setting `name` is not a URL or is also set as a variable."""
    url, variable = getattr(settings, name), getattr(settings, f"{name}_env")
    if url is not None and variable is not None:
        raise (path / name).error(
            f"must not be set together with {name}_env", hint=f"remove {name} or {name}_env"
        )
    if url is not None and not is_server_url(name, url):
        raise (path / name).error(
            "is not the URL of a supported server", hint=f'write {name} = "{sample_url(name)}"'
        )
    hint = f'write {name}_env = "BOTTEGA_{name.upper()}"'
    check_variable(variable, path / f"{name}_env", hint)


def check_variable(name: str | None, path: SettingPath, hint: str) -> None:
    if name is not None and not VARIABLE.fullmatch(name):
        raise path.error("must be the name of an environment variable", hint=hint)
