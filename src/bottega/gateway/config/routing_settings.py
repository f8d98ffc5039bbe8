"""Settings of tiers, of the router between them, and of experiments, whose variants may have their
own router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from bottega._util.settings import FilePath, TextList
from bottega.naming import REMOTE
from bottega.recipes.cache_retrieval import RetrievalName
from bottega.recipes.rcts import SECONDS

Prices = Annotated[tuple[NonNegativeFloat, ...], Field(strict=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Cosine = Annotated[float, Field(ge=-1, le=1)]
Retrieve = Literal["nearest", RetrievalName]


@dataclass(frozen=True)
class TierSettings:
    """[tiers.NAME]: one model. None means a default that depends on the model or on its position
    among the tiers. With `image_urls` its server fetches images by URL. `max_tokens` is the limit
    of a request that has none. If neither sets a limit, `output_tokens` are reserved from a key's
    budget. `usd_per_hour` is the cost of its servers, used or idle. With `search = "rcts"`, a tree
    search selects the demonstrations; its limits per request are `search_calls` completions,
    `search_tokens` and `search_seconds`. `passages` is a store of passages that `compressor` has
    compressed for a local model. `drop_fields` are fields of clients that the model does not
    support. The key is sent as `Authorization: Bearer KEY`, or alone in `api_key_header`. Every
    request has the `headers`, and those of `headers_env`, which names the environment variables
    with their values."""

    name: str
    model: str
    base_url: str | None = None
    api_key_env: str | None = None
    api_key_header: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    headers_env: Mapping[str, str] = field(default_factory=dict)
    store_answers: bool | None = None
    shots: NonNegativeInt | None = None
    images: NonNegativeInt | None = None
    tools: bool | None = None
    audio: bool = False
    image_urls: bool = False
    context: PositiveInt | None = None
    price: Prices | None = None
    usd_per_hour: NonNegativeFloat = 0.0
    output_tokens: PositiveInt = 4096
    max_tokens: PositiveInt | None = None
    timeout: PositiveFloat = 120.0
    retries: NonNegativeInt = 2
    concurrency: PositiveInt = 16
    search: Literal["none", "rcts"] = "none"
    search_calls: PositiveInt | None = None
    search_tokens: PositiveInt | None = None
    search_seconds: PositiveFloat = SECONDS
    passages: FilePath | None = None
    compressor: FilePath | None = None
    extra_body: Mapping[str, object] = field(default_factory=dict)
    drop_fields: TextList = ()

    @property
    def is_remote(self) -> bool:
        return self.model.startswith(REMOTE)

    @property
    def own_fields(self) -> Mapping[str, object]:
        """Return the operator's fields, which override the client's; None leaves one out."""
        return {**dict.fromkeys(self.drop_fields), **self.extra_body}

    @property
    def header_names(self) -> list[tuple[str, str]]:
        """Return the setting and the name of each header that the operator adds."""
        given = {"headers": self.headers, "headers_env": self.headers_env}
        names = [(setting, name) for setting, one in given.items() for name in one]
        own = self.api_key_header
        return names if own is None else [*names, ("api_key_header", own)]

    @property
    def takes_tools(self) -> bool:
        return self.is_remote if self.tools is None else self.tools

    @property
    def upstream_name(self) -> str:
        """Return the model's name at the endpoint."""
        return self.model.removeprefix(REMOTE)


@dataclass(frozen=True)
class RouterSettings:
    """[experiment.a.route], [experiment.b.route]: the router of a variant, as in [route]."""

    router: Literal["fixed", "random", "budget", "coverage", "confidence"] | None = None
    tier: str | None = None
    master_rate: Fraction | None = None
    seed: NonNegativeInt = 0
    usd_per_1k: PositiveFloat | None = None
    min_similarity: Cosine | None = None
    min_confidence: Fraction | None = None
    samples: Annotated[int, Field(ge=2, le=16)] | None = None


@dataclass(frozen=True)
class VariantCacheSettings:
    """[experiment.a.cache], [experiment.b.cache]: the retrieval of a variant, as in [cache]."""

    retrieve: Retrieve | None = None
    min_similarity: Cosine | None = None


@dataclass(frozen=True)
class VariantSettings:
    """[experiment.a], [experiment.b]: options of requests, and settings that replace those of
    [cache] and [route]. A text instead of a table is its `options`."""

    options: str = ""
    cache: VariantCacheSettings | None = None
    route: RouterSettings | None = None

    @property
    def has_own_settings(self) -> bool:
        """Whether the variant differs from others in more than the options of its requests."""
        return self.cache is not None or self.route is not None


@dataclass(frozen=True)
class ExperimentSettings:
    """[experiment]: split of requests between the variants `a` and `b`, off without a `name`."""

    name: str | None = None
    unit: Literal["question", "user", "account", "namespace"] = "question"
    share: Fraction = 0.5
    a: VariantSettings = VariantSettings()
    b: VariantSettings = VariantSettings()

    @property
    def variants(self) -> dict[str, VariantSettings]:
        """Return the variants by id, such as "more-shots:b"; none without an experiment."""
        if self.name is None:
            return {}
        return {f"{self.name}:a": self.a, f"{self.name}:b": self.b}
