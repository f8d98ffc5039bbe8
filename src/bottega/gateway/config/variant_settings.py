"""Settings of routers, and of experiments, whose variants may have their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from bottega.recipes.cache_retrieval import RetrievalName

Fraction = Annotated[float, Field(ge=0, le=1)]
Cosine = Annotated[float, Field(ge=-1, le=1)]
Retrieve = Literal["nearest", RetrievalName]


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
