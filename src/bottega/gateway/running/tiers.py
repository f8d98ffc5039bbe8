"""The tiers of a configuration as models that answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bottega.errors import SettingError
from bottega.gateway.config.settings import Config, TierSettings
from bottega.gateway.decode_budget import DecodeBudget
from bottega.gateway.ports import Served, TierCapabilities, Upstream
from bottega.gateway.telemetry.metrics import Metrics
from bottega.gateway.upstreams.http import HttpUpstream
from bottega.gateway.upstreams.local import LocalUpstream
from bottega.gateway.upstreams.timing import TimedUpstream
from bottega.generation import OpenAIGenerator
from bottega.naming import check_embedder, check_torch, open_model
from bottega.openai_api.request import Body
from bottega.pipeline import Pipeline
from bottega.protocols import Generator, Pricer, Tier
from bottega.recording import PriceTable, TokenPrice
from bottega.types import Usage

OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
# What tells how sure an answer is. A local model says it unasked, and one sample is what it gives.
REMOTE_CONFIDENCE_FIELDS: Body = {"logprobs": True}
LOCAL_CONFIDENCE_FIELDS: Body = {"n": 1}


@dataclass(frozen=True)
class TierSet:
    """`served` stand cheapest first. `secrets` are what no log may show."""

    served: tuple[Served, ...]
    prices: Pricer
    secrets: tuple[str, ...] = ()
    endpoints: Mapping[str, HttpUpstream] = field(default_factory=dict)

    def with_decode_budget(self, budget: DecodeBudget) -> TierSet:
        """Return self after setting the shared decode budget on local models."""
        for one in self.served:
            if isinstance(one.upstream, LocalUpstream):
                one.upstream.decoding = budget
        return self

    def timed(self, metrics: Metrics) -> TierSet:
        """The same, with its calls and its breakers in the metrics."""
        endpoints = {
            one.name: one.upstream for one in self.served if isinstance(one.upstream, HttpUpstream)
        }
        for name, endpoint in endpoints.items():
            metrics.breaker(name, endpoint.breaker)
        served = (
            replace(one, upstream=TimedUpstream(one.upstream, metrics.upstream))
            for one in self.served
        )
        return replace(self, served=tuple(served), endpoints=endpoints)

    def tier_problems(self) -> dict[str, list[str]]:
        """The tiers that are left alone for now, as they failed too often, and those whose last
        call was refused for a key, quota, model name or address."""
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
    """No model is loaded and nobody is asked yet. Raises `SettingError`, and for what the tiers or
    the cache would load with a package that is not here `MissingDependencyError`."""
    with _prefixed_errors(f"{config.file}: cache.embed"):
        check_embedder(config.cache.embed)
    keys = {one.name: key_of(one, environment, config.file) for one in config.tiers}
    served = tuple(_served(one, keys[one.name], config) for one in config.tiers)
    prices = PriceTable(price_overrides(config, served))
    if config.route.by == "budget":
        _check_priced(config, served, prices)
    return TierSet(served, prices, tuple(filter(None, keys.values())))


def pipeline_tiers(pipeline: Pipeline) -> TierSet:
    """Return the tiers of the user's pipeline with its prompts, sampling and prices."""
    served = tuple(
        Served(
            tier,
            LocalUpstream(tier.generator, sampling=tier.sampling or pipeline.sampling),
            TierCapabilities(tools=False),
            prompt=tier.prompt or pipeline.prompt,
        )
        for tier in pipeline.tiers
    )
    return TierSet(served, pipeline.price or PriceTable())


def key_variable(tier: TierSettings) -> str | None:
    """Without a base URL it is OpenAI that is asked, and OpenAI's own variable that is read; to
    no other endpoint goes a key that the file does not name."""
    if tier.api_key_env is None and tier.is_remote and tier.base_url is None:
        return OPENAI_KEY
    return tier.api_key_env


def key_of(tier: TierSettings, environment: Mapping[str, str], file: str) -> str:
    variable = key_variable(tier)
    if variable is None:
        return ""
    if not environment.get(variable):
        raise SettingError(
            f"{file}: the key of tiers.{tier.name} is missing: {variable} is not set",
            hint=f"export {variable}=... where bottega serve runs, or name another api_key_env",
        )
    return environment[variable]


def _served(tier: TierSettings, key: str, config: Config) -> Served:
    generator, upstream = _remote(tier, key) if tier.is_remote else _local(tier, config)
    unsure = config.route.by == "confidence" and tier is not config.master
    asks = REMOTE_CONFIDENCE_FIELDS if tier.is_remote else LOCAL_CONFIDENCE_FIELDS
    if config.route.samples is not None:
        asks = {"n": config.route.samples}
    return Served(
        Tier(tier.name, generator, config.shots(tier)),
        upstream,
        TierCapabilities(tier.images, tier.takes_tools, tier.audio, tier.context),
        asks if unsure else {},
        tier.extra_body,
        tier.output_tokens,
    )


def _remote(tier: TierSettings, key: str) -> tuple[Generator, Upstream]:
    name, url = tier.upstream_name, tier.base_url or OPENAI
    how: dict[str, Any] = {
        "base_url": url,
        "api_key": key,
        "timeout": tier.timeout,
        "retries": tier.retries,
        "concurrency": tier.concurrency,
        "extra_body": tier.extra_body,
    }
    return OpenAIGenerator(name, **how), HttpUpstream(name, **how)


def _local(tier: TierSettings, config: Config) -> tuple[Generator, Upstream]:
    check_torch()
    with _prefixed_errors(f"{config.file}: tiers.{tier.name}.model"):
        generator = open_model(tier.model)
    return generator, LocalUpstream(generator)


@contextmanager
def _prefixed_errors(setting: str) -> Iterator[None]:
    try:
        yield
    except SettingError as error:
        raise SettingError(f"{setting}: {error}", hint=error.hint) from error


def _check_priced(config: Config, served: Sequence[Served], prices: PriceTable) -> None:
    for one in served:
        if prices(one.upstream.model, Usage(1, 1)) is None:
            raise SettingError(
                f"{config.file}: by 'budget' needs the price of tiers.{one.name}",
                hint=f"[tiers.{one.name}] price = [0.15, 0.60]: US dollars per million tokens",
            )


def price_overrides(config: Config, served: Sequence[Served]) -> dict[str, TokenPrice]:
    """Return the configured prices by model name. Raises `SettingError` for two prices of one
    model."""
    given: dict[str, tuple[float, ...] | None] = {}
    for tier, one in zip(config.tiers, served, strict=True):
        name = one.upstream.model
        if given.setdefault(name, tier.price) != tier.price:
            raise SettingError(
                f"{config.file}: two tiers ask {name!r}, at different prices",
                hint="a price goes by the model's name: serve one of them under another",
            )
    return {name: TokenPrice(*price) for name, price in given.items() if price}
