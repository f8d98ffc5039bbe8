"""Prices of models, and the cost of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bottega.types import Usage


@dataclass(frozen=True)
class TokenPrice:
    """US dollars per million tokens. `cached` is the price of prompt tokens from the provider's
    cache, None if it is that of other prompt tokens."""

    input: float
    output: float
    cached: float | None = None

    def __call__(self, usage: Usage) -> float:
        cached = self.input if self.cached is None else self.cached
        fresh = usage.prompt_tokens - usage.cached_tokens
        dollars = (
            fresh * self.input
            + usage.cached_tokens * cached
            + usage.completion_tokens * self.output
        )
        return dollars / 1e6


# Names of the generators that run in this process.
FREE = {"local:*": TokenPrice(0, 0), "bundled:*": TokenPrice(0, 0)}


class PriceTable:
    """Published prices of models, from `genai-prices`, with `overrides`.

    An override applies to an exact name or to a prefix that ends in `*`; the longest one wins. The
    cost of an unknown model is None. Models in this process cost 0.
    """

    def __init__(self, overrides: Mapping[str, TokenPrice] | None = None) -> None:
        self.override(overrides or {})

    def override(self, overrides: Mapping[str, TokenPrice]) -> None:
        """Replace the overrides for all further requests."""
        given = FREE | dict(overrides)
        self._exact = {name: price for name, price in given.items() if not name.endswith("*")}
        prefixes = {name[:-1]: price for name, price in given.items() if name.endswith("*")}
        self._prefixes = sorted(prefixes.items(), key=lambda pair: -len(pair[0]))
        self._unpublished: set[str] = set()  # saves a search of all tables

    def __call__(self, model: str, usage: Usage) -> float | None:
        price = self._override(model)
        if price is not None:
            return price(usage)
        if model in self._unpublished:
            return None
        cost = _published(model, usage)
        if cost is None:
            self._unpublished.add(model)
        return cost

    def _override(self, model: str) -> TokenPrice | None:
        if model in self._exact:
            return self._exact[model]
        return next((price for start, price in self._prefixes if model.startswith(start)), None)


def _published(model: str, usage: Usage) -> float | None:
    from genai_prices import Usage as Tokens  # slow to import
    from genai_prices import calc_price

    tokens = Tokens(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_tokens=usage.cached_tokens,
    )
    try:
        return float(calc_price(tokens, model).total_price)
    except LookupError:
        return None
