"""Construction of tiers from the configuration, or from a pipeline that the user names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bottega.errors import LoadError, SettingError, StoreError
from bottega.gateway.config.gateway_settings import Config
from bottega.gateway.config.routing_settings import TierSettings
from bottega.gateway.ports import ServedTier, Tenant, TierCapabilities, Upstream
from bottega.gateway.request.reading import DecodeBudget
from bottega.gateway.request.upstreams import HttpUpstream, LocalUpstream, TimedUpstream
from bottega.gateway.telemetry.metrics import Metrics
from bottega.generation import OpenAIGenerator
from bottega.naming import check_embedder, check_text_embedder, check_torch, imported, open_model
from bottega.openai_api.client import Breaker
from bottega.openai_api.errors import ApiError
from bottega.openai_api.request import Body
from bottega.pipeline import Pipeline, run_sync
from bottega.prompting import CachePrompter, ReasoningPrompter
from bottega.protocols import Generator, Pricer, Tier, turns_only
from bottega.recipes.racc import CompressorLoader, bundled_compressor_for, compressor_loader
from bottega.recipes.rcts import SearchLimits
from bottega.recording import PriceTable, TokenPrice
from bottega.types import Candidate, Compression, Prefix, Query, Sampling, Usage

FETCH = 50  # retrieved candidates, of which some may not be in the store

OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
# Request fields that return an answer's confidence. A local model always returns it, for one
# sample.
REMOTE_CONFIDENCE_FIELDS: Body = {"logprobs": True}
LOCAL_CONFIDENCE_FIELDS: Body = {"n": 1}


@dataclass(frozen=True)
class TierSet:
    """The tiers in `served`, cheapest first, with their prices. `secrets` must not appear in
    logs."""

    served: tuple[ServedTier, ...]
    prices: Pricer
    secrets: tuple[str, ...] = ()
    endpoints: Mapping[str, HttpUpstream] = field(default_factory=dict)

    def prepared(self, metrics: Metrics, decoding: DecodeBudget) -> TierSet:
        """Return a copy that reports calls and breaker states to the metrics and decodes images
        of local models within the shared budget."""
        endpoints, served = dict[str, HttpUpstream](), list[ServedTier]()
        for one in self.served:
            if isinstance(one.upstream, LocalUpstream):
                one.upstream.decoding = decoding
            elif isinstance(one.upstream, HttpUpstream):
                endpoints[one.name] = one.upstream
                metrics.breaker(one.name, one.upstream.breaker)
            served.append(replace(one, upstream=TimedUpstream(one.upstream, metrics.upstream)))
        return replace(self, served=tuple(served), endpoints=endpoints)

    def tier_problems(self) -> dict[str, list[str]]:
        """Return the tiers that are paused after too many failures, and those whose last call
        failed because of a key, quota, model name or address."""
        ends = self.endpoints.items()
        return {
            "paused": [name for name, one in ends if one.breaker.state == "open"],
            "misconfigured": [name for name, one in ends if one.is_misconfigured],
        }

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return tuple(one.tier for one in self.served)

    async def aclose(self) -> None:
        for one in self.served:
            await one.upstream.aclose()
            await one.tier.generator.aclose()


def build_tiers(config: Config, environment: Mapping[str, str]) -> TierSet:
    """Build the tiers without calling a model. Only models with `passages` are loaded, to compare
    them with their compressors. Raises `SettingError`, and `MissingDependencyError` for a package
    that the tiers or the cache need."""
    with _prefixed_errors(f"{config.file}: cache.embed"):
        check_embedder(config.cache.embed)
    with _prefixed_errors(f"{config.file}: cache.embed_text"):
        check_text_embedder(config.cache.embed_text)
    keys = {one.name: key_of(one, environment, config.file) for one in config.tiers}
    hidden = {
        one.name: secret_headers(one, keys[one.name], environment, config.file)
        for one in config.tiers
    }
    served = tuple(_served(one, keys[one.name], hidden[one.name], config) for one in config.tiers)
    prices = PriceTable(price_overrides(config, served))
    configs = [config, *map(config.of_variant, config.experiment.variants.values())]
    has_budget = any(one.route.router == "budget" for one in configs)
    for one in served if has_budget else ():
        if prices(one.upstream.model, Usage(1, 1)) is None:
            raise SettingError(
                f"{config.file}: router 'budget' needs the price of tiers.{one.name}",
                hint=f"set [tiers.{one.name}] price = [0.15, 0.60], in US dollars per million"
                " tokens",
            )
    secrets = [*keys.values(), *(value for one in hidden.values() for value in one.values())]
    return TierSet(served, prices, tuple(filter(None, secrets)))


def confidence_fields(config: Config) -> dict[str, Body]:
    """Return the request fields by tier that report the confidence of an answer."""
    if config.route.router != "confidence":
        return {}
    fields: dict[str, Body] = {
        tier.name: REMOTE_CONFIDENCE_FIELDS if tier.is_remote else LOCAL_CONFIDENCE_FIELDS
        for tier in config.tiers[:-1]
    }
    samples = config.route.samples
    return fields if samples is None else {name: {"n": samples} for name in fields}


def pipeline_tiers(pipeline: Pipeline) -> TierSet:
    """Return the tiers of the user's pipeline with its prompts, sampling and prices."""
    served = tuple(
        ServedTier(
            tier,
            LocalUpstream(tier.generator, sampling=tier.sampling or pipeline.sampling),
            TierCapabilities(tools=False),
            prompt=tier.prompt or pipeline.prompt,
            reasons=isinstance(tier.prompt or pipeline.prompt, ReasoningPrompter | CachePrompter),
        )
        for tier in pipeline.tiers
    )
    return TierSet(served, pipeline.price or PriceTable())


def key_variable(tier: TierSettings) -> str | None:
    """Return the environment variable of a tier's key. OPENAI_API_KEY is the default without a
    base URL only: no other endpoint gets a key that the file does not name."""
    if tier.api_key_env is None and tier.is_remote and tier.base_url is None:
        return OPENAI_KEY
    return tier.api_key_env


def key_of(tier: TierSettings, environment: Mapping[str, str], file: str) -> str:
    variable = key_variable(tier)
    if variable is None:
        return ""
    return _secret(environment, variable, f"{file}: the key of tiers.{tier.name} is missing")


def secret_headers(
    tier: TierSettings, key: str, environment: Mapping[str, str], file: str
) -> dict[str, str]:
    """Return the headers whose values are secrets. Raises `SettingError`."""
    headers = {} if tier.api_key_header is None else {tier.api_key_header: key}
    for name, variable in tier.headers_env.items():
        problem = f"{file}: tiers.{tier.name}.headers_env.{name} has no value"
        headers[name] = _secret(environment, variable, problem)
    return headers


def _secret(environment: Mapping[str, str], variable: str, problem: str) -> str:
    if not environment.get(variable):
        raise SettingError(
            f"{problem}: {variable} is not set",
            hint=f"export {variable}=... before bottega serve, or name another variable",
        )
    return environment[variable].strip()  # the log hides the value as it is sent


def _served(tier: TierSettings, key: str, hidden: Mapping[str, str], config: Config) -> ServedTier:
    generator: Generator
    upstream: Upstream
    if tier.is_remote:
        name = tier.upstream_name
        how: dict[str, Any] = {
            "base_url": tier.base_url or OPENAI,
            "api_key": "" if tier.api_key_header else key,
            "headers": {**tier.headers, **hidden},
            "timeout": tier.timeout,
            "retries": tier.retries,
            "concurrency": tier.concurrency,
            "extra_body": tier.own_fields,
        }
        with _prefixed_errors(f"{config.file}: tiers.{tier.name}.base_url"):
            generator = OpenAIGenerator(name, **how)
            upstream = HttpUpstream(
                name,
                **how,
                max_tokens=tier.max_tokens,
                breaker=Breaker(name=f"tiers.{tier.name}"),
                key_variable=key_variable(tier),
            )
    else:
        check_torch()
        with _prefixed_errors(f"{config.file}: tiers.{tier.name}.model"):
            generator = open_model(tier.model)
        sampling = Sampling(max_tokens=tier.max_tokens) if tier.max_tokens else None
        upstream = LocalUpstream(generator, sampling=sampling)
    search = _search_limits(tier, generator, config.file)
    passages = None
    if tier.passages is not None:
        with _prefixed_errors(f"{config.file}: tiers.{tier.name}.passages"):
            passages = open_passages(tier.passages, tier.compressor, generator)
    return ServedTier(
        Tier(tier.name, generator, config.shots(tier)),
        upstream,
        TierCapabilities(tier.images, tier.takes_tools, tier.audio, tier.context, tier.image_urls),
        tier.own_fields,
        tier.output_tokens,
        tier.max_tokens,
        reasons=config.cache.reasoning and not turns_only(generator),
        search=search,
        passages=passages,
    )


def _search_limits(tier: TierSettings, generator: Generator, file: str) -> SearchLimits | None:
    """Return the limits of the tier's search, None without one. Raises `SettingError` for a budget
    smaller than one rollout."""
    if tier.search == "none":
        return None
    limits = SearchLimits(
        tier.search_calls, tier.search_tokens, tier.search_seconds, brief=turns_only(generator)
    )
    limits.check(
        lambda name: f"{file}: tiers.{tier.name}.search_{name}",
        tier.max_tokens or tier.output_tokens,
    )
    return limits


@contextmanager
def _prefixed_errors(setting: str) -> Iterator[None]:
    try:
        yield
    except (SettingError, LoadError, StoreError) as error:
        raise SettingError(f"{setting}: {error}", hint=error.hint) from error


def price_overrides(config: Config, served: Sequence[ServedTier]) -> dict[str, TokenPrice]:
    """Return the configured prices by model name. Raises `SettingError` for two prices of one
    model."""
    given: dict[str, tuple[float, ...] | None] = {}
    for tier, one in zip(config.tiers, served, strict=True):
        name = one.upstream.model
        if given.setdefault(name, tier.price) != tier.price:
            raise SettingError(
                f"{config.file}: two tiers with the model {name!r} have different prices",
                hint="prices belong to model names: use one price, or serve one model under"
                " another name",
            )
    return {name: TokenPrice(*price) for name, price in given.items() if price}


def load_pipeline(target: str) -> Pipeline:
    """Import a `Pipeline`, or a function without arguments that returns one. Raises `SettingError`,
    also for an exception of the module itself."""
    found = imported(target)
    pipeline = found if isinstance(found, Pipeline) or not callable(found) else found()
    if not isinstance(pipeline, Pipeline):
        raise SettingError(
            f"{target} must be a Pipeline, got {type(pipeline).__name__}",
            hint="name a Pipeline, such as a recipe returns, or a function that returns one",
        )
    if not pipeline.tiers:
        raise SettingError(
            f"{target} has no tiers",
            hint="pass Pipeline(tiers=(...)), cheapest first, as cache_of_thought does",
        )
    if pipeline.search is not None:
        raise SettingError(
            f"{target} has a search, which the gateway does not support",
            hint="serve a Pipeline with a reranker instead: Pipeline(rerank=...)",
        )
    return pipeline


def config_of(pipeline: Pipeline, target: str) -> Config:
    tiers = (TierSettings(tier.name, tier.generator.name) for tier in pipeline.tiers)
    return Config(target, tuple(tiers))


class PipelineTenantPool:
    """Tenant pool of a user's pipeline. The gateway stores no examples, since the pipeline has its
    own recorder. There is only the default namespace, since a pipeline does not separate tenants'
    examples."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._tenant = Tenant(pipeline)

    async def open(self, namespace: str, /) -> Tenant:
        if namespace:
            raise ApiError(
                "this gateway serves one pipeline, which has no namespaces",
                status=403,
                code="no_namespaces",
                hint="use a key without a namespace",
            )
        return self._tenant

    def counts(self) -> dict[str, int]:
        return {}

    async def aclose(self) -> None:
        pass


def open_passages(store: Path, compressor: Path | None, base: Generator) -> StoredPassages:
    """Open a store of compressed passages and load the model. Raises `LoadError` for a compressor
    of another model, and `StoreError` for a store of another compressor."""
    folder = compressor or bundled_compressor_for(base)
    loader = compressor_loader(folder, base, store=store)
    run_sync(loader.open())
    return StoredPassages(loader)


@dataclass(frozen=True)
class StoredPassages:
    """Passages in a store, for the tier of their model."""

    loader: CompressorLoader
    fetch: int = FETCH

    async def read(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> tuple[list[Candidate], Prefix, Compression] | None:
        found = await self.loader.stored_prefix(query, candidates, k)
        return found and (*found, self.loader.compression(found[1]))
