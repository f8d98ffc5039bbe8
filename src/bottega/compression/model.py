"""Trainable compressor: prompts that read texts, and the RACC model built from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bottega.compression.aggregator import Aggregator, Initialization
from bottega.compression.hyper_model import HiddenStates, HyperModel, Inputs, map_by_images
from bottega.compression.inputs import InputBuilder
from bottega.compression.modulation import Modulation
from bottega.errors import SettingError
from bottega.kv_prefix import Geometry, KeyValues
from bottega.types import Example

AT_START = 10.0  # nats by which a prompt prefers its own place before any training


class AttentionPooling(nn.Module):
    """Each of `prompts` learned rows attends to hidden states, by their place and what they hold.

    Not the paper's: there, prompts that are appended to a text (`HyperModel.prompted`) see of it
    what the frozen heads look for, which need not be what has to be kept. A place is counted from
    the end of the text; those beyond `reach` are one. Row i begins at the places from `starts[i]`
    on, `stride` of them.
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


class TextCompressor(nn.Module):
    """`count` learned prompts (theta of eq. 1 and 2) that say what a text holds.

    With `hard`, the embeddings of a sentence (count, width), prompts stand behind the text in the
    frozen model and begin as that sentence (PIPE); what the model makes of them is taken. With
    `starts` they read the hidden states of the text itself (`AttentionPooling`). With both the sum.
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
        self.reader = None if starts is None else AttentionPooling(starts, width, stride=stride)
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    @torch.no_grad()
    def calibrate(self, hyper: HyperModel, texts: Sequence[Inputs], least: float = 0.02) -> None:
        """By texts like those to come: dimensions of hidden states differ by orders of size."""
        seen = torch.cat([self._seen(hyper.read(inputs, self.prompts)) for inputs in texts])
        self.centre.copy_(seen.mean(0))
        self.spread.copy_(seen.std(0).clamp(min=least))

    def _seen(self, states: HiddenStates) -> Tensor:
        """(n, width): all that `forward` will bring to one scale."""
        parts = [] if states.prompted is None else [states.prompted.flatten(0, 1)]
        if self.reader is not None:
            parts.append(states.hidden[states.mask.bool()])
        return torch.cat(parts).float()

    def forward(self, hyper: HyperModel, inputs: Inputs) -> Tensor:
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


LARGEST_SEED = 2**63 - 1  # what torch, numpy and random all take


def check_range(
    settings: object, *names: str, low: float, high: float = math.inf, open: bool = False
) -> None:
    """From `low` to `high`, with `open` more than `low`. Raises `SettingError`, for nan and inf
    too."""
    for name in names:
        value = getattr(settings, name)
        # Nan is in no range.
        if not (low <= value <= high) or (open and value == low) or value == math.inf:
            least = f"more than {low:g}" if open else f"{low:g} or more"
            raise SettingError(
                f"{name} is {value}",
                hint=f"set {name} to {least}" + (f", at most {high}" if high < math.inf else ""),
            )


PromptMode = Literal["appended", "reading", "both"]


@dataclass(frozen=True)
class CompressorConfig:
    """What a compressor is built as. The defaults are the paper's; `start` is ours.

    `document_prompts` and `query_prompts` are L_d and L_vq. `prompting` is how prompts learn of a
    text, see `TextCompressor`; `stride` is how many tokens of its end each of those that read sees
    before any training. `dcvq`, `rgca`, `start`: see `Aggregator` and `CrossAttention`.
    """

    width: int
    geometry: Geometry
    document_prompts: int = 16
    query_prompts: int = 12
    prompting: PromptMode = "appended"
    stride: int = 1
    blocks: int = 3
    heads: int = 1
    dcvq: bool = True
    rgca: bool = True
    start: Initialization = "similar"

    def __post_init__(self) -> None:
        """Raises `SettingError`. A width of 0 is one that is still to be told."""
        counts = ("document_prompts", "query_prompts", "stride", "blocks", "heads")
        check_range(self, *counts, low=1)
        if self.width % self.heads:
            raise SettingError(
                f"heads is {self.heads}, which does not divide the width {self.width}",
                hint="set heads to 1, or to another divisor of the model's width",
            )
        for name, known in (
            ("prompting", get_args(PromptMode)),
            ("start", get_args(Initialization)),
        ):
            if getattr(self, name) not in known:
                raise SettingError(
                    f"{name} is {getattr(self, name)!r}", hint=f"use one of {', '.join(known)}"
                )


@dataclass(frozen=True)
class QueryPrompts:
    """The compressed image, question and both (eq. 2), each (batch, prompts, width)."""

    image: Tensor
    question: Tensor
    both: Tensor


class RaccModel(nn.Module):
    """All that is trained. `forward` is the paper's figure 1 from compressed documents on.

    `hard` holds the sentences that prompts start from: embeddings for documents (L_d, width) and
    for queries (L_vq, width), see `sentence_prompts`; without it they are drawn.
    """

    def __init__(self, config: CompressorConfig, hard: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        counts = config.document_prompts, config.query_prompts
        appended = hard or [torch.randn(count, config.width) * 0.02 for count in counts]
        # A document is kept place by place, its end first; a query is asked by its end.
        places = [config.stride * i for i in reversed(range(counts[0]))], [0] * counts[1]
        self.documents, self.queries = (
            TextCompressor(
                config.width,
                hard=None if config.prompting == "reading" else sentence,
                starts=None if config.prompting == "appended" else starts,
                stride=config.stride if starts is places[0] else 1,
            )
            for sentence, starts in zip(appended, places, strict=True)
        )
        if config.start == "similar":
            self._share_slots()
        self.aggregator = Aggregator(
            config.width,
            blocks=config.blocks,
            heads=config.heads,
            dcvq=config.dcvq,
            rgca=config.rgca,
            start=config.start,
        )
        self.modulation = Modulation(config.width, config.geometry, config.query_prompts)

    @torch.no_grad()
    def _share_slots(self) -> None:
        """The last prompts of a query begin alike to the last ones of a document, so that each
        attends to its own."""
        if self.documents.reader is None or self.queries.reader is None:
            return
        readers = self.documents.reader, self.queries.reader
        slots = torch.randn(max(len(reader.slot) for reader in readers), self.config.width)
        for reader in readers:
            reader.slot.copy_(slots[-len(reader.slot) :])

    def compress(
        self, hyper: HyperModel, texts: InputBuilder, passages: Sequence[Example]
    ) -> Tensor:
        """(passages, L_d, width). Some may have pictures."""
        return map_by_images(passages, lambda part: self.documents(hyper, texts.passages(part)))

    def compress_query(self, hyper: HyperModel, inputs: Sequence[Inputs]) -> QueryPrompts:
        """Of image, question and both, as `InputBuilder.query_inputs` gives them."""
        # Without an image they are one and the same.
        unlike = {id(one): one for one in inputs}
        told = {name: self.queries(hyper, one) for name, one in unlike.items()}
        return QueryPrompts(*(told[id(one)] for one in inputs))

    def aggregate(
        self, documents: Tensor, asked: QueryPrompts, scores: Tensor, present: Tensor | None = None
    ) -> Tensor:
        """`documents` (batch, documents, L_d, width), scores (batch, documents) of any scale,
        `present` where there is a document -> (batch, L_vq, width)."""
        if present is None:
            present = torch.ones_like(scores, dtype=torch.bool)
        told = (one.to(documents.device) for one in (scores, present))
        aggregated: Tensor = self.aggregator(
            documents, asked.image, asked.question, asked.both, *told
        )
        return aggregated

    def forward(
        self, documents: Tensor, asked: QueryPrompts, scores: Tensor, present: Tensor | None = None
    ) -> KeyValues:
        prefix: KeyValues = self.modulation(self.aggregate(documents, asked, scores, present))
        return prefix
