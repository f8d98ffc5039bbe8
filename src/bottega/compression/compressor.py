"""Prompts that read a text from the hidden states of a frozen model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bottega.compression.hyper import Hyper, Inputs, States

AT_START = 10.0  # nats by which a prompt prefers its own place before any training


class Reader(nn.Module):
    """Each of `prompts` learned rows attends to hidden states, by their place and what they hold.

    Not the paper's: there, prompts that are appended to a text (`Hyper.prompted`) see of it what
    the frozen heads look for, which need not be what has to be kept. A place is counted from the
    end of the text; those beyond `reach` are one. Row i begins at the places from `starts[i]` on,
    `stride` of them.
    """

    def __init__(self, starts: list[int], width: int, *, stride: int = 1, reach: int = 64) -> None:
        super().__init__()
        self.slot = nn.Parameter(torch.zeros(len(starts), width))
        self.query = nn.Parameter(torch.zeros(len(starts), width))
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        place = torch.zeros(len(starts), reach)
        for row, start in enumerate(starts):
            place[row, start : start + stride] = AT_START
        self.place = nn.Parameter(place)
        nn.init.eye_(self.key.weight)
        nn.init.eye_(self.value.weight)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """(batch, length, width), (batch, length) with ones at the end of each row -> (batch,
        prompts, width)."""
        length, width = states.shape[1:]
        from_end = torch.arange(length - 1, -1, -1, device=states.device)
        places = self.place[:, from_end.clamp(max=self.place.shape[1] - 1)]
        scores = self.query @ self.key(states).transpose(1, 2) / width**0.5 + places
        weights = scores.masked_fill(mask[:, None] == 0, -torch.inf).softmax(-1)
        read: Tensor = self.slot + self.value(weights @ states)
        return read


class Compressor(nn.Module):
    """`count` learned prompts (theta of eq. 1 and 2) that say what a text holds.

    With `hard`, the embeddings of a sentence (count, width), prompts stand behind the text in the
    frozen model and begin as that sentence (PIPE); what the model makes of them is taken.
    With `starts` they read the hidden states of the text itself (`Reader`). With both the sum.
    """

    centre: Tensor
    spread: Tensor

    def __init__(
        self,
        width: int,
        *,
        hard: Tensor | None = None,
        starts: list[int] | None = None,
        stride: int = 1,
    ) -> None:
        super().__init__()
        if hard is None and starts is None:
            raise ValueError("prompts must stand behind the text or read it")
        self.prompts = None if hard is None else nn.Parameter(hard.clone())
        self.reader = None if starts is None else Reader(starts, width, stride=stride)
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    @torch.no_grad()
    def calibrate(self, hyper: Hyper, texts: Sequence[Inputs], least: float = 0.02) -> None:
        """By texts like those to come: dimensions of hidden states differ by orders of size."""
        seen = torch.cat([self._seen(hyper.read(inputs, self.prompts)) for inputs in texts])
        self.centre.copy_(seen.mean(0))
        self.spread.copy_(seen.std(0).clamp(min=least))

    def _seen(self, states: States) -> Tensor:
        """(n, width): all that `forward` will bring to one scale."""
        parts = [] if states.prompted is None else [states.prompted.flatten(0, 1)]
        if self.reader is not None:
            parts.append(states.hidden[states.mask.bool()])
        return torch.cat(parts).float()

    def forward(self, hyper: Hyper, inputs: Inputs) -> Tensor:
        """(batch, prompts, width)"""
        states = hyper.read(inputs, self.prompts)
        parts = []
        if states.prompted is not None:
            parts.append(self._standard(states.prompted))
        if self.reader is not None:
            parts.append(self.reader(self._standard(states.hidden), states.mask))
        return torch.stack(parts).sum(0)

    def _standard(self, hidden: Tensor) -> Tensor:
        return (hidden - self.centre) / self.spread
