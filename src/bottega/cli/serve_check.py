"""Output of `bottega serve --check`: the settings, the defaults of unset ones, and what the
endpoints of the tiers answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from PIL import Image as Pillow

from bottega._util.postgres import display_url
from bottega._util.progress import plural
from bottega._util.valkey import display_valkey_url
from bottega.cli.output import print_table, say
from bottega.errors import BottegaError, store_errors
from bottega.gateway.accounting.accounts import Accounts
from bottega.gateway.accounting.ledger_schema import FILE, Account
from bottega.gateway.config.checks import PARAMETERS
from bottega.gateway.config.config_file import MASTER_RATE, MIN_SIMILARITY
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.config.routing_settings import TierSettings, VariantSettings
from bottega.gateway.errors import MisconfiguredError, tier_fix
from bottega.gateway.ports import MAX_NAME, ServedTier
from bottega.gateway.request.upstreams import HttpUpstream
from bottega.gateway.running.cache_views import cache_location
from bottega.gateway.running.process import base_url
from bottega.gateway.running.tiers import OPENAI, TierSet, key_variable
from bottega.gateway.state.shared import check_redis
from bottega.gateway.telemetry.logs import printable
from bottega.image import Image
from bottega.openai_api.endpoint import Endpoint
from bottega.openai_api.request import Body
from bottega.pipeline import Pipeline
from bottega.protocols import Pricer
from bottega.recording import PriceTable
from bottega.telemetry import DEFAULT_ENDPOINT, ENDPOINT, check_exporter
from bottega.types import Usage

CheckRows = Iterator[tuple[str, str]]
ROUTERS = {
    "fixed": "one tier for all",
    "random": "the master at random",
    "budget": "the master as often as the spend allows",
    "coverage": "the master if nothing cached is similar",
    "confidence": "the cheapest first, the next if its confidence is low",
}
UNSET = {
    "min_similarity": "adapted to recent questions to hold master_rate",
    "master_rate": "min_similarity decides",
    "samples": "one reply, and its probability",
}
OWN = "the pipeline's own"
PROBES = {"text": "Reply with the word OK.", "image": "Which colour is this image? One word."}
PROBE_TOKENS = 16
PROBE_SIDE = 64  # some models reject images of fewer than 28 pixels a side
MOST_NAMED = 5  # models that an error names


def print_config(
    config: Config,
    environment: Mapping[str, str],
    pipeline: Pipeline | None = None,
    *,
    offline: bool = False,
) -> None:
    """Print the settings, with the source of each key instead of the key, and addresses without
    credentials. Connects to the servers of the shared state unless `offline`."""
    rows = [*_answering(config, environment, pipeline), *_serving(config, environment, offline)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")


def _answering(
    config: Config, environment: Mapping[str, str], pipeline: Pipeline | None
) -> CheckRows:
    prices = PriceTable()
    if pipeline is not None:
        for pipeline_tier in pipeline.tiers:
            yield f"tiers.{pipeline_tier.name}", pipeline_tier.generator.name
            yield "  shots", _shots(pipeline_tier.shots)
            published = _published_price(pipeline_tier.generator.name, prices)
            yield "  price", published if pipeline.price is None else OWN
        yield "route", OWN
        yield "cache", OWN
        return
    for tier in config.tiers:
        yield from _tier(tier, config, environment, prices)
    yield from _route(config)
    yield from _cache(config)


def _tier(
    tier: TierSettings, config: Config, environment: Mapping[str, str], prices: PriceTable
) -> CheckRows:
    fills = " (its answers fill the cache)" * (tier.name in config.stored_tiers)
    yield f"tiers.{tier.name}", f"{tier.model}{fills}"
    if not tier.is_remote:
        yield "  runs in", "this process"
    else:
        yield "  base_url", Endpoint.locate(tier.base_url or OPENAI, "").shown
        variable = key_variable(tier)
        state = "set" if environment.get(variable or "") else "NOT set"
        yield "  key", f"{variable} {state}" if variable else "none"
        if names := [name for _, name in tier.header_names]:
            yield "  headers", ", ".join(names)
    yield "  shots", _shots(config.shots(tier))
    yield "  supports", _capabilities(tier)
    if tier.search != "none":
        calls = plural(tier.search_calls, "completion") if tier.search_calls else "10 rollouts"
        tokens = f", {plural(tier.search_tokens, 'token', ',')}" if tier.search_tokens else ""
        yield "  search", f"{tier.search}: {calls}{tokens}, {tier.search_seconds:g} s"
    if tier.passages is not None:
        yield "  passages", f"{tier.passages}, compressor: {tier.compressor or 'bundled'}"
    if tier.price:
        yield "  price", _per_million(tier.price)
    elif not tier.is_remote:
        yield "  price", "free: it runs in this process"
    else:
        yield "  price", _published_price(tier.upstream_name, prices)
    if tier.usd_per_hour:
        yield "  usd_per_hour", f"{tier.usd_per_hour:g} USD per hour for its servers"
    if tier.drop_fields:
        yield "  drop_fields", ", ".join(tier.drop_fields)
    if tier.is_remote:
        retries = _counted(tier.retries, "retry", "retries")
        yield "  timeout", f"{tier.timeout:g} s per attempt, streamed or not; {retries}"
        yield "  concurrency", plural(tier.concurrency, "request")


def _shots(shots: int) -> str:
    return str(shots) if shots else "0 (no demonstrations)"


def _capabilities(tier: TierSettings) -> str:
    images = "any number of images" if tier.images is None else _counted(tier.images, "image")
    tools = "tools" if tier.takes_tools else "no tools"
    audio = "audio" if tier.audio else "no audio"
    context = (
        "any context" if tier.context is None else f"{plural(tier.context, 'token')} of context"
    )
    return f"{images}, {tools}, {audio}, {context}"


def _published_price(model: str, prices: PriceTable) -> str:
    costs = [prices(model, usage) for usage in (Usage(1000, 0), Usage(0, 1000))]
    prices_per_million = [cost * 1000 for cost in costs if cost is not None]
    if len(prices_per_million) < len(costs):
        return "unknown"
    if not any(prices_per_million):
        return "nothing"
    return f"{_per_million(prices_per_million)} (published)"


def _per_million(price: Collection[float]) -> str:
    words = zip(price, ("in", "out", "cached"), strict=False)
    return ", ".join(f"{usd:.6g} {word}" for usd, word in words) + ": USD per million tokens"


def _counted(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _route(config: Config) -> CheckRows:
    route, by = config.route, str(config.route.router)
    defaults: dict[str, object] = {"seed": 0, "cold_start": 0, "fallback": "any"}
    if by == "random":
        defaults["master_rate"] = MASTER_RATE
    unset = {**UNSET, "tier": f"the first, {config.tiers[0].name}"}
    yield "route", f"{by}: {ROUTERS[by]}"
    for name in (*PARAMETERS[by], "cold_start", "fallback"):
        value = getattr(route, name)
        text = _with_default(name, value, defaults)
        yield f"  {name}", f"not set: {unset[name]}" if value is None else text


def _cache(config: Config) -> CheckRows:
    cache = config.cache
    defaults = {**vars(type(cache)()), "min_similarity": MIN_SIMILARITY}
    yield "cache", str(cache_location(config))
    shown = ("embed", "retrieve", "min_similarity", "capacity", "reasoning")
    texts = {name: _with_default(name, getattr(cache, name), defaults) for name in shown}
    if cache.min_similarity is None:
        texts["min_similarity"] = f"not set: {cache.retrieve} has no similarity"
    texts["capacity"] += f", evicts {cache.evict}"
    for name, text in texts.items():
        yield f"  {name}", text
    yield from _changed(cache, skip=("file", "database", "database_env", "evict", *shown))


def _serving(config: Config, environment: Mapping[str, str], offline: bool) -> CheckRows:
    replay, shadow, gateway = config.replay, config.shadow, config.gateway
    replay_text = f"exact repeats for {replay.seconds:g} s, from {replay.memory_mb:g} MB"
    yield "replay", replay_text if replay.seconds and replay.memory_mb else "off"
    yield from _changed(replay, skip=("seconds", "memory_mb"))
    shadow_text = f"{shadow.rate:g} of the apprentices' answers are compared; the gate is "
    judge = f"; judge: {shadow.judge}" if shadow.judge else ""
    shadow_text += ("on" if shadow.gate else "off") + judge
    yield "shadow", shadow_text if shadow.rate else "off"
    traces = config.traces
    kept = f"{traces.store} of requests, for {traces.keep_days:g} days"
    yield "traces", "off" if traces.store == "none" else kept
    batches, is_shared = config.batches, config.state.is_shared
    runs = (
        f"{_counted(batches.concurrency, 'request')} at a time, from files of {batches.file_mb} MB"
    )
    off = "off" if not batches.concurrency else "off: the state is shared"
    yield "batches", off if is_shared or not batches.concurrency else runs
    yield "responses", "stored" if config.responses.store else "not stored"
    tried = config.experiment
    yield "experiment", "off" if tried.name is None else f"{tried.name}: {tried.share:g} get b"
    yield from _changed(tried, skip=("name", "share", "a", "b"))
    for id, variant in tried.variants.items():
        yield f"  {id[-1]}", _variant(variant)
    limits = [*_changed(config.limits)]
    yield "limits", "the defaults, except" if limits else "the defaults"
    yield from limits
    yield "gateway", base_url(gateway, gateway.port).removesuffix("/v1")
    yield "  data", str(gateway.data)
    yield from _changed(gateway, skip=("host", "port", "data"))
    yield from _state(config, environment, offline)
    yield from _telemetry(config, environment)
    yield "keys", _keys(config, environment, offline)
    yield from _changed(config.keys, skip=("required",))


def _variant(variant: VariantSettings) -> str:
    """Return the options and settings of a variant, such as "shots=4, cache.retrieve=image"."""
    words = [variant.options] if variant.options else []
    for section, own in (("cache", variant.cache), ("route", variant.route)):
        defaults = {} if own is None else vars(type(own)())
        words += [
            f"{section}.{name}={_toml(getattr(own, name))}"
            for name, default in defaults.items()
            if getattr(own, name) != default
        ]
    return ", ".join(words) or "as configured"


def _state(config: Config, environment: Mapping[str, str], offline: bool) -> CheckRows:
    """Check the servers of the shared state. Raises `StoreError` as a start would."""
    database = config.state.database_url(environment)
    if database is None:
        yield "state", "in this process"
        return
    yield "state", f"shared in {display_url(database)}"
    redis = config.state.redis_url(environment)
    if redis is not None:
        if not offline:
            check_redis(redis)
        yield "  redis", display_valkey_url(redis)


def _telemetry(config: Config, environment: Mapping[str, str]) -> CheckRows:
    """Check the settings of OpenTelemetry. Raises `SettingError` and `MissingDependencyError`."""
    if not config.telemetry.enabled:
        yield "telemetry", "off"
        return
    check_exporter(environment)
    is_set = "set" if environment.get(ENDPOINT) else f"not set: {DEFAULT_ENDPOINT}"
    yield "telemetry", f"spans and metrics to the collector of {ENDPOINT} ({is_set})"
    yield from _changed(config.telemetry, skip=("enabled",))


def stored_accounts(
    config: Config, environment: Mapping[str, str], offline: bool
) -> Sequence[Account] | None:
    """Return the accounts, None for those of a database if `offline`."""
    location = config.state.database_url(environment) or config.gateway.data / FILE
    if offline and isinstance(location, str):
        return None
    if isinstance(location, Path) and not location.exists():
        return ()
    with (
        store_errors(config.state.database_setting),
        closing(Accounts(location, create=False)) as accounts,
    ):
        return accounts.list()


def order_warning(config: Config, prices: Pricer) -> str | None:
    """Return a warning if the last tier, the master, is cheaper than an earlier one. A server paid
    by the hour has no price per token to compare."""
    costs = {
        one.name: [prices(one.upstream_name, usage) for usage in (Usage(1000, 0), Usage(0, 1000))]
        for one in config.tiers
        if not one.usd_per_hour
    }
    master = config.tiers[-1].name
    for name, cost in costs.items():
        own = costs.get(master, cost)
        if None in (*cost, *own) or cost == own:
            continue
        if all((a or 0.0) <= (b or 0.0) for a, b in zip(own, cost, strict=True)):
            return (
                f"warning: {config.file}: the master tiers.{master} is cheaper than tiers.{name};"
                " the tiers are listed cheapest first, and the last one is the master"
            )
    return None


def _keys(config: Config, environment: Mapping[str, str], offline: bool) -> str:
    created, data = stored_accounts(config, environment, offline), config.gateway.data
    if created is None:
        return "required; those in the database were not read"
    location = config.state.database_url(environment) or data / FILE
    option = f" --data {data}" if isinstance(location, Path) else ""
    if not config.needs_keys(bool(created)):
        return "not required"
    if valid := sum(account.revoked is None for account in created):
        return f"required; {valid} in {data if option else 'the database'}"
    return f"required, but none exist: bottega keys add NAME{option}"


def _changed(section: object, skip: Collection[str] = ()) -> CheckRows:
    defaults = vars(type(section)())
    for name, value in vars(section).items():
        if name not in skip and value != defaults[name]:
            yield f"  {name}", _toml(value)


def _with_default(name: str, value: object, defaults: Mapping[str, object]) -> str:
    return _toml(value) + " (default)" * (defaults.get(name) == value)


def _toml(value: object) -> str:
    """Return a value as in the configuration, but texts without quotes."""
    return json.dumps(value) if isinstance(value, bool | tuple) else str(value)


@dataclass
class TierCheck:
    """Check of one tier, with the words of the table in `found`, and the `faults`."""

    config: Config
    tier: TierSettings
    served: ServedTier
    found: list[str] = field(default_factory=list)
    faults: list[BottegaError] = field(default_factory=list)

    @property
    def row(self) -> Sequence[str]:
        upstream, judges = self.served.upstream, self.tier.name == self.config.shadow.judge
        endpoint = upstream.base_url if isinstance(upstream, HttpUpstream) else "this process"
        found = "; ".join(self.found) or "loads at the start"
        return self.tier.name + " (judge)" * judges, endpoint, found

    async def run(self, probe: bool) -> None:
        upstream = self.served.upstream
        try:
            if isinstance(upstream, HttpUpstream):
                self._look_up(await upstream.models())
            if probe:
                await self._probe()
        except BottegaError as error:
            self._fail(error)

    def _look_up(self, models: Sequence[str] | None) -> None:
        """Look for the model in the server's list."""
        model = self.tier.upstream_name
        if models is None:
            self.found.append("up, without a list of models")
        elif any(_matches(listed, model) for listed in models):
            self.found.append(f"up, lists {model}")
        else:
            self.found.append(f"up, does not list {model}")
            close = get_close_matches(model, models, MOST_NAMED, 0.5)
            shown = ", ".join(printable(one[:MAX_NAME]) for one in close or models[:MOST_NAMED])
            named = f"similar: {shown}" if close else shown
            self._add_fault(
                "model",
                f"{model!r} is not among the {plural(len(models), 'model')} of the server"
                f" ({named})",
                f'write model = "openai:{close[0] if close else "NAME"}", or start the server with'
                " this model; --probe finds out whether it answers anyway",
            )

    async def _probe(self) -> None:
        for kind in PROBES:
            if kind == "image" and 0 in (self.tier.images, self.config.limits.images):
                self.found.append("takes no images")
                continue
            try:
                await self.served.upstream.complete(_probe_body(kind))
            except BottegaError as error:
                if kind == "text":
                    raise
                self._fail(error, "images")
            else:
                self.found.append(f"answers the {kind}")
                if kind == "text":
                    self.faults.clear()  # of a list without the model

    def _fail(self, error: BottegaError, setting: str = "") -> None:
        """Add an error, which is about `images`, or else about the connection or the model."""
        cause = error.__cause__ if isinstance(error, MisconfiguredError) else None
        source = cause if isinstance(cause, BottegaError) else error
        status = getattr(source, "status", None)
        reply = f"answers with status {status}" if status else "does not answer"
        named, hint = tier_fix(source, key_variable(self.tier), self.tier.upstream_name)
        if setting and not named:
            reply = "rejects the image"
            named, hint = setting, "write images = 0, or serve a model that reads images"
        self.found.append(reply)
        self._add_fault(named, str(error), hint)

    def _add_fault(self, setting: str, problem: str, hint: str) -> None:
        name = ".".join(filter(None, ("tiers", self.tier.name, setting)))
        self.faults.append(BottegaError(f"{self.config.file}: {name}: {problem}", hint=hint))


def check_connections(
    config: Config, tier_set: TierSet, environment: Mapping[str, str], *, probe: bool
) -> list[BottegaError]:
    """Print the state of each tier, and return the faults. Blocks."""
    pairs = zip(config.tiers, tier_set.served, strict=True)
    checks = [TierCheck(config, tier, served) for tier, served in pairs]

    async def run() -> None:
        try:
            await asyncio.gather(*(one.run(probe) for one in checks))
        finally:
            await tier_set.aclose()

    asyncio.run(run())
    rows = [*(one.row for one in checks), *_servers(config, environment)]
    print_table(("tier", "endpoint", "found"), rows)
    return [fault for one in checks for fault in one.faults]


def _servers(config: Config, environment: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Yield the servers of the shared state, to which `print_config` has connected."""
    if (database := config.state.database_url(environment)) is not None:
        yield "(database)", display_url(database), "up"
    if (redis := config.state.redis_url(environment)) is not None:
        yield "(redis)", display_valkey_url(redis), "up"


def _matches(listed: str, model: str) -> bool:
    """Return whether an id of a server's list names the model: Ollama adds the tag of the newest,
    Gemini a folder, and LiteLLM lists patterns."""
    if listed in (model, f"{model}:latest", f"models/{model}"):
        return True
    return "*" in listed and fnmatchcase(model, listed)


def _probe_body(kind: str) -> Body:
    parts: list[object] = [{"type": "text", "text": PROBES[kind]}]
    if kind == "image":
        pixels = Pillow.new("RGB", (PROBE_SIDE, PROBE_SIDE), "red")
        url = Image.from_pillow(pixels).data_url
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": PROBE_TOKENS}
