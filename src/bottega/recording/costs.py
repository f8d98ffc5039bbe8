"""What a call cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bottega.types import Usage


@dataclass(frozen=True)
class TokenPrice:
    """US dollars per million tokens. `cached` is for prompt tokens read from the provider's cache;
    None means that they cost as much as others."""

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


# How the generators that run in this process name themselves.
FREE = {"local:*": TokenPrice(0, 0), "bundled:*": TokenPrice(0, 0)}


class PriceTable:
    """The published price of a model, from `genai-prices`, unless `overrides` says another.

    Overrides go by the exact name, or by a prefix that ends in `*`; the longest one wins. A model
    nobody knows costs None, not nothing; models in this process cost 0.
    """

    def __init__(self, overrides: Mapping[str, TokenPrice] | None = None) -> None:
        self.override(overrides or {})

    def override(self, overrides: Mapping[str, TokenPrice]) -> None:
        """Replace the overrides for all further requests."""
        given = FREE | dict(overrides)
        self._exact = {name: price for name, price in given.items() if not name.endswith("*")}
        prefixes = {name[:-1]: price for name, price in given.items() if name.endswith("*")}
        self._prefixes = sorted(prefixes.items(), key=lambda pair: -len(pair[0]))
        self._unpublished: set[str] = set()  # the tables are searched whole for what is not there

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
    from genai_prices import Usage as Tokens  # its tables take long to load
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
