"""Each passage as the embedding of a single token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bottega.compression.hyper import Hyper, Inputs
from bottega.prefixing.kv import KeyValues


class OneToken(nn.Module):
    """The shape of xRAG (Cheng et al. 2024): a passage is one stored vector, and a bridge of two
    layers, all that is trained, makes it the embedding of one token in front of the question.

    The vector is the mean hidden state of the passage's tokens in the frozen `Hyper`; xRAG takes a
    retriever's, and first trains the bridge to have passages said again. A `PassageStore` of one
    prompt a passage holds them. For models of a decoder alone.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bridge = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    def vectors(self, hyper: Hyper, inputs: Inputs) -> Tensor:
        """(passages, 1, width)"""
        with torch.no_grad():
            states = hyper.read(inputs)
        weights = states.mask[..., None].to(states.hidden)
        return (states.hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)

    @torch.no_grad()
    def calibrate(self, vectors: Tensor, least: float = 0.02) -> None:
        """By (passages, 1, width) of those to come: dimensions differ by orders of size."""
        self.centre.copy_(vectors.mean((0, 1)))
        self.spread.copy_(vectors.flatten(0, 1).std(0).clamp(min=least))

    def embedded(self, vectors: Tensor) -> Tensor:
        """(batch, passages, width) of both."""
        made: Tensor = self.bridge((vectors - self.centre) / self.spread)
        return made

    def forward(self, model: Any, vectors: Tensor) -> KeyValues:
        """What the frozen model has of these tokens: gradients pass through it to the bridge."""
        decoder = model.get_decoder().get_decoder()
        embedded = self.embedded(vectors).to(model.dtype)
        cache = decoder(inputs_embeds=embedded, use_cache=True).past_key_values
        return KeyValues(tuple((layer.keys, layer.values) for layer in cache.layers))
