"""Sampling and stopping with settings per row of a batch (needs torch).

`generate` has one temperature, seed and token limit for a whole batch. Here a logits processor adds
Gumbel noise and `generate` decodes greedily: the arg max of logits / t + Gumbel noise is a sample
of softmax(logits / t). A row depends on its own seed only, so requests with different settings
share a batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bottega.types import Completion, Sampling

Decode = Callable[[list[int]], str]
# Greedy in effect. A smaller one could make logits / temperature infinite in float32.
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class SampleRow:
    """Row of a batch: sample number `index` of its request."""

    sampling: Sampling
    index: int = 0

    def noise(self, device: torch.device) -> torch.Generator | None:
        """Return the random generator of the row, None for greedy decoding."""
        if self.sampling.temperature <= 0:
            return None
        seed = self.sampling.seed
        entropy = secrets.randbits(64) if seed is None else seed % 2**64
        # `SeedSequence` mixes the bits: neighbouring seeds and samples give unrelated streams.
        state = np.random.SeedSequence([entropy, self.index]).generate_state(1, np.uint64)[0]
        return torch.Generator(device).manual_seed(int(state >> np.uint64(1)))


class GumbelSampler:
    """Logits processor that adds noise and records the log-probabilities of the chosen tokens.
    The log-probabilities are computed at temperature 1."""

    def __init__(self, rows: Sequence[SampleRow], device: torch.device) -> None:
        self._temperatures = [row.sampling.temperature for row in rows]
        self._noises = [row.noise(device) for row in rows]
        self._last: torch.Tensor | None = None
        self._chosen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._record(input_ids[:, -1])
        self._last = torch.log_softmax(scores.float(), dim=-1)
        if not any(self._noises):
            return scores
        rows = []
        for row, noise, temperature in zip(
            scores.float(), self._noises, self._temperatures, strict=True
        ):
            if noise is not None:  # -log of an exponential variable is Gumbel noise
                exponential = torch.empty_like(row).exponential_(generator=noise)
                row = row / max(temperature, MIN_TEMPERATURE) - exponential.log()
            rows.append(row)
        return torch.stack(rows)

    def logprobs(self, final_tokens: torch.Tensor) -> list[list[float]]:
        """Return one log-probability per token, for each row."""
        self._record(final_tokens)
        self._last = None
        return torch.stack(self._chosen, dim=1).tolist()

    def _record(self, tokens: torch.Tensor) -> None:
        if self._last is not None:
            self._chosen.append(self._last.gather(1, tokens[:, None])[:, 0])


class StopCriterion:
    """Stopping criterion with a token limit and stop strings per row. `counts` holds the number of
    new tokens of each row until it stopped: `generate` pads it while other rows continue."""

    def __init__(self, rows: Sequence[SampleRow], prompt_length: int, decode: Decode) -> None:
        self._samplings = [row.sampling for row in rows]
        self._start = prompt_length
        self._decode = decode
        self.counts = [row.sampling.max_tokens for row in rows]

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor | None, **_: object
    ) -> torch.Tensor:
        done = []
        for index, sampling in enumerate(self._samplings):
            row = input_ids[index, self._start :]
            full = len(row) >= sampling.max_tokens
            text = "" if full or not sampling.stop else self._decode(row.tolist())
            done.append(full or cut_at_stop(text, sampling.stop) is not None)
            if done[-1]:
                self.counts[index] = min(self.counts[index], len(row))
        return torch.tensor(done, device=input_ids.device)


def cut_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the text before the first stop string, or None without a stop string."""
    starts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(starts)] if starts else None


def to_completion(
    tokens: list[int], logprobs: list[float], ends: frozenset[int], row: SampleRow, decode: Decode
) -> tuple[Completion, int]:
    """Return the completion of a row and its number of tokens, including the end token."""
    limit = min(len(tokens), row.sampling.max_tokens)
    end = next((i for i in range(limit) if tokens[i] in ends), None)
    count = limit if end is None else end + 1
    text = decode(tokens[: limit if end is None else end])
    cut = cut_at_stop(text, row.sampling.stop)
    stopped = end is not None or cut is not None
    shown = (text if cut is None else cut).strip()
    completion = Completion(shown, "stop" if stopped else "length", sum(logprobs[:count]))
    return completion, count
