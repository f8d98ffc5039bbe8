"""Loading of the gateway's TOML file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bottega._util.settings import (
    SettingPath,
    as_table,
    check_names,
    parse_toml,
    read_settings,
    read_toml,
)
from bottega.errors import SettingError
from bottega.gateway.config.checks import (
    check_cache_settings,
    check_hosts,
    check_parts_read,
    check_route,
    check_shadow,
    check_similarities,
    check_state,
    check_tiers,
    check_variable,
)
from bottega.gateway.config.gateway_settings import (
    VIRTUAL,
    BatchSettings,
    CacheSettings,
    Config,
    ConsoleSettings,
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
    reject_secrets,
)
from bottega.gateway.config.overrides import has_only_variant_options, read_variant
from bottega.gateway.config.routing_settings import (
    ExperimentSettings,
    RouterSettings,
    TierSettings,
    VariantCacheSettings,
    VariantSettings,
)
from bottega.naming import COMPLETIONS, REMOTE
from bottega.openai_api.endpoint import check_header
from bottega.openai_api.errors import ApiError
from bottega.recipes.cache_retrieval import WITHOUT_METRIC

VARIANT_SECTIONS: dict[str, type[VariantCacheSettings | RouterSettings]] = {
    "cache": VariantCacheSettings,
    "route": RouterSettings,
}
T = TypeVar("T", bound=RouterSettings)
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
MASTER_RATE = 0.2
# A cosine: three of four unrelated texts are below it, but hardly any two images.
MIN_SIMILARITY = 0.3
# Names of headers whose values are secrets.
CREDENTIAL = re.compile(r"auth|cookie|credential|key|password|secret|token", re.IGNORECASE)
TIER_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
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
        name: read_settings(kind, document.get(name, {}), path / name)
        for name, kind in SECTIONS.items()
        if kind is not ExperimentSettings
    }
    sections["experiment"] = _experiment(document.get("experiment", {}), path / "experiment")
    config = Config(file, _tiers(document.get("tiers"), path / "tiers"), **sections)
    config = _with_defaults(config)
    check_route(config, as_table(document.get("route", {}), path / "route"), path / "route")
    check_hosts(config, path)
    check_tiers(config, path)
    check_similarities(config, path)
    check_parts_read(config, path)
    check_shadow(config, path)
    check_cache_settings(config, path / "cache")
    check_state(config, path / "state")
    _check_experiment(config, path / "experiment")
    config.check_public()
    return config


def _with_defaults(config: Config) -> Config:
    """Set the defaults that depend on other settings, also of variants."""
    route, cache, given = config.route, config.cache, config.experiment
    least = _default_similarity(cache.retrieve, cache.min_similarity)
    cache = replace(cache, min_similarity=least)

    def resolved(variant: VariantSettings) -> VariantSettings:
        own = variant.cache
        if own is not None:
            retrieve, least = own.retrieve or cache.retrieve, own.min_similarity
            if least is None and retrieve == cache.retrieve:
                least = cache.min_similarity
            own = VariantCacheSettings(retrieve, _default_similarity(retrieve, least))
        routed = variant.route and _default_route(variant.route, config)
        return replace(variant, cache=own, route=routed)

    experiment = replace(given, a=resolved(given.a), b=resolved(given.b))
    route = _default_route(route, config)
    return replace(config, route=route, cache=cache, experiment=experiment)


def _default_route(route: T, config: Config) -> T:
    """Return the route with defaults: one tier answers every query, several are chosen at
    random."""
    if route.router is None:
        route = replace(route, router="random" if len(config.tiers) > 1 else "fixed")
    if route.router == "random" and route.master_rate is None:
        route = replace(route, master_rate=MASTER_RATE)
    return route


def _default_similarity(retrieve: str, least: float | None) -> float | None:
    """Return the similarity threshold of demonstrations, since unrelated ones reduce accuracy.
    Scores without a fixed scale have none."""
    return MIN_SIMILARITY if least is None and retrieve not in WITHOUT_METRIC else least


def _experiment(table: object, path: SettingPath) -> ExperimentSettings:
    entries = dict(as_table(table, path))
    a, b = (_variant(entries.pop(name, ""), path / name) for name in ("a", "b"))
    return read_settings(ExperimentSettings, entries, path, a=a, b=b)


def _variant(value: object, path: SettingPath) -> VariantSettings:
    if isinstance(value, str):
        return VariantSettings(value)
    entries = dict(as_table(value, path))
    own: dict[str, Any] = {
        name: read_settings(kind, entries.pop(name), path / name)
        for name, kind in VARIANT_SECTIONS.items()
        if name in entries
    }
    return read_settings(VariantSettings, entries, path, **own)


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
    tier = read_settings(TierSettings, table, path, name=name)
    remote = tier.base_url or tier.api_key_env or tier.own_fields or tier.image_urls
    if not tier.is_remote and (remote or tier.header_names):
        raise path.error(
            "runs in this process, so it has no base_url, api_key_env, api_key_header, headers,"
            " headers_env, extra_body, drop_fields or image_urls",
            hint=f'write model = "openai:{tier.model}" for an endpoint',
        )
    check_variable(tier.api_key_env, path / "api_key_env", 'write api_key_env = "MASTER_KEY"')
    _check_headers(tier, path)
    return tier


def _check_headers(tier: TierSettings, path: SettingPath) -> None:
    for setting, name in tier.header_names:
        try:
            check_header(name)
        except SettingError as error:
            raise (path / setting).error(f"is invalid: {error}", hint=error.hint) from error
    names = Counter(name.lower() for _, name in tier.header_names)
    if twice := [name for name, count in names.items() if count > 1]:
        raise (path / "headers").error(
            f"must name each header once, got {twice[0]!r} several times",
            hint="remove one of them from headers, headers_env or api_key_header",
        )
    for name in filter(CREDENTIAL.search, tier.headers):
        raise (path / "headers" / name).error(
            "must not be in a file: its name is that of a credential",
            hint=f'write headers_env = {{ "{name}" = "TEAM_TOKEN" }}, the name of a variable',
        )
    for name, variable in tier.headers_env.items():
        hint = f'write headers_env = {{ "{name}" = "TEAM_TOKEN" }}'
        check_variable(variable, path / "headers_env" / name, hint)
    if tier.api_key_header is not None and tier.base_url is not None and tier.api_key_env is None:
        raise (path / "api_key_header").error(
            "has no effect without a key", hint='write api_key_env = "MASTER_KEY"'
        )


def _check_price(price: object, path: SettingPath) -> None:
    got = len(price) if isinstance(price, list) else price
    if isinstance(price, list | float) and got not in (2, 3):
        raise path.error(
            f"must be a list of 2 or 3 numbers, got {got}",
            hint="write price = [input, output] or [input, output, cached], such as [0.15, 0.60],"
            " in US dollars per million tokens",
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
    a = _checked_variant(config, given.a, path / "a")
    if a == _checked_variant(config, given.b, path / "b"):
        raise (path / "b").error("must differ from a", hint='write b = "shots=4"')


def _checked_variant(
    config: Config, variant: VariantSettings, path: SettingPath
) -> tuple[object, ...]:
    """Return all settings of a variant. Raises `SettingError`."""
    own = config.of_variant(variant)
    options_path = path / "options" if variant.has_own_settings else path
    try:
        options = read_variant(variant.options, tier_of_model(config.tiers))
    except ApiError as error:
        raise options_path.error(str(error), hint=error.hint) from error
    if not has_only_variant_options(options):
        raise options_path.error(
            f"must not set namespace, no-store or no-replay, got {variant.options!r}",
            hint="use route, shots, master-rate and no-retrieve",
        )
    if variant.route is not None:
        if options.tier is not None or options.master_rate is not None:
            raise options_path.error(
                f"must not contain route or master-rate: {path.key}.route chooses the tier",
                hint=f"remove [{path.key}.route], or route and master-rate",
            )
        defaults = vars(RouterSettings())
        given = [name for name, value in vars(variant.route).items() if value != defaults[name]]
        check_route(own, given, path / "route")
    if variant.cache is not None and not options.retrieve:
        raise options_path.error(
            f"must not contain no-retrieve: {path.key}.cache sets the retrieval",
            hint=f"remove [{path.key}.cache], or no-retrieve",
        )
    check_similarities(own, path)
    check_parts_read(own, path)
    return options, own.cache, own.route
