"""Loading of the gateway's TOML file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bottega._util.settings import (
    SettingPath,
    as_table,
    check_names,
    parse_toml,
    read_settings,
    read_toml,
)
from bottega.gateway.config.settings import (
    VIRTUAL,
    BatchSettings,
    CacheSettings,
    Config,
    ConsoleSettings,
    ExperimentSettings,
    FeedbackSettings,
    KeySettings,
    LimitSettings,
    ReplaySettings,
    ResponseSettings,
    RouteSettings,
    ServerSettings,
    ShadowSettings,
    StateSettings,
    TelemetrySettings,
    TraceSettings,
    is_server_url,
    reject_secrets,
    sample_url,
)
from bottega.gateway.config.tiers import TierSettings
from bottega.gateway.experiments import has_only_variant_options, read_variant
from bottega.gateway.requests import has_port
from bottega.naming import COMPLETIONS, REMOTE
from bottega.openai_api.errors import ApiError
from bottega.openai_api.fields import SERVICE_TIER
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
SECTIONS: dict[str, type] = {
    "gateway": ServerSettings,
    "route": RouteSettings,
    "cache": CacheSettings,
    "replay": ReplaySettings,
    "limits": LimitSettings,
    "shadow": ShadowSettings,
    "keys": KeySettings,
    "state": StateSettings,
    "traces": TraceSettings,
    "batches": BatchSettings,
    "telemetry": TelemetrySettings,
    "console": ConsoleSettings,
    "feedback": FeedbackSettings,
    "responses": ResponseSettings,
    "experiment": ExperimentSettings,
}
# New names of the settings of files for commit fd291dc.
RENAMED = {
    "route": {"by": "router", "at_least": "min_similarity", "below": "min_confidence"},
    "cache": {"at_least": "min_similarity", "longest": "max_characters"},
    "replay": {"sampled": "include_sampled"},
    "tiers": {"teaches": "store_answers"},
}
MASTER_RATE = 0.2
# A cosine: three of four unrelated texts are below it, but hardly any two images.
MIN_SIMILARITY = 0.3
WITHOUT_SIMILARITY = ("bm25", "hybrid")
TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
EXAMPLE = "examples/bottega.toml describes every setting"


def load_config(file: Path) -> Config:
    """Load the configuration of a gateway. Raises `SettingError`."""
    return _build(read_toml(file, hint=EXAMPLE), str(file))


def parse_config(text: str, file: str = "bottega.toml") -> Config:
    """Parse the configuration of a gateway. Raises `SettingError`."""
    return _build(parse_toml(text, file, hint=EXAMPLE), file)


def _build(document: dict[str, object], file: str) -> Config:
    path = SettingPath(file)
    reject_secrets(document, path)
    check_names(document, [*SECTIONS, "tiers"], path)
    sections: dict[str, Any] = {
        name: read_settings(
            kind, document.get(name, {}), path / name, renamed=RENAMED.get(name, {})
        )
        for name, kind in SECTIONS.items()
    }
    config = Config(file, _tiers(document.get("tiers"), path / "tiers"), **sections)
    config = replace(config, route=_default_route(config))
    if config.cache.min_similarity is None and config.cache.retrieve not in WITHOUT_SIMILARITY:
        # Unrelated examples reduce accuracy. Scores without a fixed scale get no threshold.
        config = replace(config, cache=replace(config.cache, min_similarity=MIN_SIMILARITY))
    _check_route(config, as_table(document.get("route", {}), path / "route"), path / "route")
    _check_hosts(config, path)
    _check_tiers(config, path)
    _check_retrieval(config, path)
    _check_cache(config, path / "cache")
    _check_state(config, path / "state")
    _check_experiment(config, path / "experiment")
    config.check_public()
    return config


def _default_route(config: Config) -> RouteSettings:
    """Return the route with defaults: one tier answers every query, several are chosen at
    random."""
    route = config.route
    if route.router is None:
        route = replace(route, router="random" if len(config.tiers) > 1 else "fixed")
    if route.router == "random" and route.master_rate is None:
        route = replace(route, master_rate=MASTER_RATE)
    return route


def _tiers(table: object, path: SettingPath) -> tuple[TierSettings, ...]:
    if not table:
        raise path.error(
            "are missing: the gateway has no model",
            hint='add [tiers.apprentice] with model = "bundled", then [tiers.master]; ' + EXAMPLE,
        )
    return tuple(_tier(name, one, path / name) for name, one in as_table(table, path).items())


def _tier(name: str, table: object, path: SettingPath) -> TierSettings:
    if not TIER_NAME.fullmatch(name):
        raise path.error(
            "is not a valid tier name",
            hint="use up to 32 lower-case letters, digits, - and _, as in [tiers.master]",
        )
    example = 'set model = "openai:NAME", "bundled", or a Hugging Face id or folder'
    entries = as_table(table, path)
    if entries.get("model", "") in ("", REMOTE):
        raise (path / "model").error("is missing", hint=example)
    _check_price(entries.get("price", [0, 0]), path / "price")
    if str(entries["model"]).startswith(COMPLETIONS):
        raise (path / "model").error(
            f"must support chat, got {entries['model']!r}",
            hint='write model = "openai:NAME" for an endpoint with a chat template',
        )
    tier = read_settings(TierSettings, table, path, renamed=RENAMED["tiers"], name=name)
    remote = tier.base_url or tier.api_key_env or tier.extra_body or tier.image_urls
    if not tier.is_remote and remote:
        raise path.error(
            "runs in this process, so it has no base_url, api_key_env, extra_body or image_urls",
            hint=f'write model = "openai:{tier.model}" for an endpoint',
        )
    if tier.api_key_env is not None and not VARIABLE.fullmatch(tier.api_key_env):
        raise (path / "api_key_env").error(
            "must be the name of an environment variable", hint='write api_key_env = "MASTER_KEY"'
        )
    return tier


def _check_price(price: object, path: SettingPath) -> None:
    got = len(price) if isinstance(price, list) else price
    if isinstance(price, list | float) and got not in (2, 3):
        raise path.error(
            f"must be a list of 2 or 3 numbers, got {got}",
            hint="write price = [input, output] or [input, output, cached], such as [0.15, 0.60],"
            " in US dollars per million tokens",
        )


def _check_route(config: Config, given: Iterable[str], path: SettingPath) -> None:
    by, names = str(config.route.router), [tier.name for tier in config.tiers]
    for other, parameters in PARAMETERS.items():
        for name in parameters:
            if name in given and name not in PARAMETERS[by]:
                raise (path / name).error(
                    f"is not a setting of the route {by!r}",
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
    if by != "fixed" and len(names) == 1:
        raise (path / "router").error("needs several tiers, got 1", hint='write router = "fixed"')


def _check_hosts(config: Config, path: SettingPath) -> None:
    if config.limits.fetch_hosts and not config.limits.fetch_images:
        raise (path / "limits" / "fetch_hosts").error(
            "has no effect while images are not fetched", hint="write fetch_images = true"
        )
    for host in config.gateway.allowed_hosts:
        if has_port(host):
            raise (path / "gateway" / "allowed_hosts").error(
                f"contains a port, got {host!r}", hint="write the name only, without the port"
            )
    if config.gateway.metrics_port and config.gateway.metrics_port == config.gateway.port:
        raise (path / "gateway" / "metrics_port").error(
            f"must differ from gateway.port, got {config.gateway.metrics_port}",
            hint="use another port, such as 9100",
        )


def _check_tiers(config: Config, path: SettingPath) -> None:
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
    if config.route.samples is not None:
        raise (path / "search").error(
            "must not be set together with route.samples: each completion would be sampled"
            f" {config.route.samples} times",
            hint="remove route.samples; the confidence is then the reply's probability",
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


def _check_retrieval(config: Config, path: SettingPath) -> None:
    scale = config.cache.retrieve not in WITHOUT_SIMILARITY
    for section, number in (
        ("cache", config.cache.min_similarity),
        ("route", config.route.min_similarity),
    ):
        if not scale and number is not None:
            raise (path / section / "min_similarity").error(
                f"needs similarities, and {config.cache.retrieve} has none",
                hint='write retrieve = "nearest"',
            )
    if config.shadow.gate and not config.shadow.rate:
        raise (path / "shadow" / "gate").error(
            "needs shadow samples, and shadow.rate is 0",
            hint="write rate = 0.02 to compare one answer in fifty",
        )


def _check_state(config: Config, path: SettingPath) -> None:
    state = config.state
    for name in ("database", "redis"):
        _check_server(state, name, path)
    has_redis = state.redis is not None or state.redis_env is not None
    if has_redis and not state.is_shared:
        raise (path / "redis").error(
            "needs a database, which stores accounts and spending",
            hint=f'write database = "{sample_url("database")}"',
        )


def tier_of_model(tiers: Sequence[TierSettings], aliases: Collection[str] = ()) -> dict[str, str]:
    """Return the tier of each model name; "" means that the router chooses."""
    names = [VIRTUAL, *sorted(aliases)]
    return dict.fromkeys(names, "") | {f"{VIRTUAL}/{t.name}": t.name for t in tiers}


def _check_experiment(config: Config, path: SettingPath) -> None:
    given = config.experiment
    if given.name is None:
        if given != ExperimentSettings():
            raise (path / "name").error("is missing", hint='write name = "more-shots"')
        return
    if not TIER_NAME.fullmatch(given.name):
        raise (path / "name").error(
            f"is not a valid name, got {given.name[:64]!r}",
            hint="use up to 32 lower-case letters, digits, - and _",
        )
    variants = []
    for name, text in (("a", given.a), ("b", given.b)):
        try:
            variants.append(read_variant(text, tier_of_model(config.tiers)))
        except ApiError as error:
            raise (path / name).error(str(error), hint=error.hint) from error
        if not has_only_variant_options(variants[-1]):
            raise (path / name).error(
                f"must not set namespace, no-store or no-replay, got {text!r}",
                hint="use route, shots, master-rate and no-retrieve",
            )
    if variants[0] == variants[1]:
        raise (path / "b").error("must differ from a", hint='write b = "shots=4"')


def _check_cache(config: Config, path: SettingPath) -> None:
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
    if variable is not None and not VARIABLE.fullmatch(variable):
        raise (path / f"{name}_env").error(
            "must be the name of an environment variable",
            hint=f'write {name}_env = "BOTTEGA_{name.upper()}"',
        )
