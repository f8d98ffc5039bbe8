"""Estimated token counts of calls that report no usage, and of calls not yet made."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from bottega.types import Usage

# Until an upstream has reported a usage, its tokenizer, chat template and image token counts are
# unknown: a short prompt may count a thousand tokens. Later, this limits how much one prompt
# adds to the reservations of all others.
UNSEEN_PROMPT = 8192
UNSEEN_FACTOR = 4
TOKENS_PER_SECOND = 50.0
DECAY = 0.95  # factor on the sums of earlier calls at each new call


@dataclass
class _Observed:
    """Decaying sums over the calls to one model."""

    expected: float = 0.0
    bound: float = 0.0
    prompt: float = 0.0
    shortfall: float = 0.0
    completion: float = 0.0
    seconds: float = 0.0
    longest: float = 0.0


class TokenEstimates:
    """Estimates per model, corrected by the usage that its upstream has reported. `expected` is the
    estimate of the prompt's tokens from its characters and images, which fits English.
    `non_ascii_bytes` are the UTF-8 bytes of its text outside ASCII. Byte-level tokenizers need at
    most one token per byte."""

    def __init__(self) -> None:
        self._models: defaultdict[str, _Observed] = defaultdict(_Observed)

    def learn(
        self,
        model: str,
        expected: int,
        usage: Usage,
        seconds: float | None = None,
        *,
        choices: int = 1,
        non_ascii_bytes: int = 0,
    ) -> None:
        """Update the estimates. `seconds` is the time of a complete reply, None for a stream;
        `choices` share the completion tokens."""
        one = self._models[model]
        bound = expected + non_ascii_bytes
        one.expected = one.expected * DECAY + expected
        one.bound = one.bound * DECAY + bound
        one.prompt = one.prompt * DECAY + usage.prompt_tokens
        shortfall = min(usage.prompt_tokens - bound, UNSEEN_PROMPT)
        one.shortfall = max(one.shortfall * DECAY, shortfall)
        one.longest = max(one.longest * DECAY, usage.completion_tokens / choices)
        if seconds is not None:
            one.completion = one.completion * DECAY + usage.completion_tokens
            one.seconds = one.seconds * DECAY + seconds

    def prompt(self, model: str, expected: int) -> int:
        """Return the most likely prompt token count."""
        one = self._models[model]
        return round(expected * one.prompt / one.expected) if one.expected else expected

    def max_prompt(self, model: str, expected: int, non_ascii_bytes: int) -> int:
        """Return a cautious upper estimate of the prompt tokens, for a reservation."""
        one = self._models[model]
        if not one.expected:
            return max(UNSEEN_PROMPT, UNSEEN_FACTOR * expected) + non_ascii_bytes
        ratio = max(1.0, one.prompt / one.bound)
        return round(max(expected * ratio, expected + one.shortfall)) + non_ascii_bytes

    def longest(self, model: str) -> int:
        """Return the completion tokens of the longest choice, which decays with each later call."""
        return math.ceil(self._models[model].longest)

    def generated(self, model: str, seconds: float) -> int:
        """Estimate the completion tokens of an unseen reply from its seconds of generation."""
        one = self._models[model]
        rate = one.completion / one.seconds if one.seconds else TOKENS_PER_SECOND
        return math.ceil(rate * seconds)
