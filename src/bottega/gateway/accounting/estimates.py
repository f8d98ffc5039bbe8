"""Token counts of calls whose upstream reports none, and of calls that are still to be made."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from bottega.types import Usage

# Before an upstream has reported a usage, its tokenizer, its chat template and its images' tokens
# are unknown: a short prompt may count a thousand tokens.
UNSEEN_PROMPT = 8192
UNSEEN_FACTOR = 4
TOKENS_A_SECOND = 50.0
MEMORY = 0.95  # weight of all earlier calls against the latest one


@dataclass
class _Observed:
    """Decaying sums over the calls to one model."""

    expected: float = 0.0
    prompt: float = 0.0
    shortfall: float = 0.0
    completion: float = 0.0
    seconds: float = 0.0
    longest: int = 0


class TokenEstimates:
    """Estimates by model, corrected by the usage that its upstream reported before. `expected` is
    the prompt's estimate from its characters and images."""

    def __init__(self) -> None:
        self._models: defaultdict[str, _Observed] = defaultdict(_Observed)

    def learn(self, model: str, expected: int, usage: Usage, seconds: float | None = None) -> None:
        """`seconds` is the time of a whole reply, None for a stream."""
        one = self._models[model]
        one.expected = one.expected * MEMORY + expected
        one.prompt = one.prompt * MEMORY + usage.prompt_tokens
        one.shortfall = max(one.shortfall * MEMORY, usage.prompt_tokens - expected)
        one.longest = max(one.longest, usage.completion_tokens)
        if seconds is not None:
            one.completion = one.completion * MEMORY + usage.completion_tokens
            one.seconds = one.seconds * MEMORY + seconds

    def prompt(self, model: str, expected: int) -> int:
        """The likely count."""
        one = self._models[model]
        return round(expected * one.prompt / one.expected) if one.expected else expected

    def most_prompt(self, model: str, expected: int) -> int:
        """A cautious count, for a reservation."""
        one = self._models[model]
        if not one.expected:
            return max(UNSEEN_PROMPT, UNSEEN_FACTOR * expected)
        return max(expected, self.prompt(model, expected), round(expected + one.shortfall))

    def longest(self, model: str) -> int:
        """Completion tokens of the longest reply so far."""
        return self._models[model].longest

    def generated(self, model: str, seconds: float) -> int:
        """Completion tokens after so many seconds of a reply that was not seen."""
        one = self._models[model]
        rate = one.completion / one.seconds if one.seconds else TOKENS_A_SECOND
        return math.ceil(rate * seconds)
