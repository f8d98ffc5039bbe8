"""Prompts that read a text from the hidden states of a frozen model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
