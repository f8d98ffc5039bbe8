"""Which numbers make sense in settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from bottega.compression.aggregator import Aggregator, Start
from bottega.compression.compressor import Compressor
from bottega.compression.hyper import Hyper, Inputs, read_apart
from bottega.compression.modulation import Modulation
from bottega.compression.texts import Texts
from bottega.errors import SettingError
from bottega.kv_prefix import Geometry, KeyValues
from bottega.types import Example

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


Prompting = Literal["appended", "reading", "both"]


@dataclass(frozen=True)
class Shape:
    """What a compressor is built as. The defaults are the paper's; `start` is ours.

    `document_prompts` and `query_prompts` are L_d and L_vq. `prompting` is how prompts learn of a
    text, see `Compressor`; `stride` is how many tokens of its end each of those that read sees
    before any training. `dcvq`, `rgca`, `start`: see `Aggregator` and `CrossAttention`.
    """

    width: int
    geometry: Geometry
    document_prompts: int = 16
    query_prompts: int = 12
    prompting: Prompting = "appended"
    stride: int = 1
    blocks: int = 3
    heads: int = 1
    dcvq: bool = True
    rgca: bool = True
    start: Start = "similar"

    def __post_init__(self) -> None:
        """Raises `SettingError`. A width of 0 is one that is still to be told."""
        counts = ("document_prompts", "query_prompts", "stride", "blocks", "heads")
        check_range(self, *counts, low=1)
        if self.width % self.heads:
            raise SettingError(
                f"heads is {self.heads}, which does not divide the width {self.width}",
                hint="set heads to 1, or to another divisor of the model's width",
            )
        for name, known in (("prompting", get_args(Prompting)), ("start", get_args(Start))):
            if getattr(self, name) not in known:
                raise SettingError(
                    f"{name} is {getattr(self, name)!r}", hint=f"use one of {', '.join(known)}"
                )


@dataclass(frozen=True)
class Asked:
    """The compressed image, question and both (eq. 2), each (batch, prompts, width)."""

    image: Tensor
    question: Tensor
    both: Tensor


class Racc(nn.Module):
    """All that is trained. `forward` is the paper's figure 1 from compressed documents on.

    `hard` holds the sentences that prompts start from: embeddings for documents (L_d, width) and
    for queries (L_vq, width), see `pipe`; without it they are drawn.
    """

    def __init__(self, shape: Shape, hard: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.shape = shape
        counts = shape.document_prompts, shape.query_prompts
        appended = hard or [torch.randn(count, shape.width) * 0.02 for count in counts]
        # A document is kept place by place, its end first; a query is asked by its end.
        places = [shape.stride * i for i in reversed(range(counts[0]))], [0] * counts[1]
        self.documents, self.queries = (
            Compressor(
                shape.width,
                hard=None if shape.prompting == "reading" else sentence,
                starts=None if shape.prompting == "appended" else starts,
                stride=shape.stride if starts is places[0] else 1,
            )
            for sentence, starts in zip(appended, places, strict=True)
        )
        if shape.start == "similar":
            self._share_slots()
        self.aggregator = Aggregator(
            shape.width,
            blocks=shape.blocks,
            heads=shape.heads,
            dcvq=shape.dcvq,
            rgca=shape.rgca,
            start=shape.start,
        )
        self.modulation = Modulation(shape.width, shape.geometry, shape.query_prompts)

    @torch.no_grad()
    def _share_slots(self) -> None:
        """The last prompts of a query begin alike to the last ones of a document, so that each
        attends to its own."""
        if self.documents.reader is None or self.queries.reader is None:
            return
        readers = self.documents.reader, self.queries.reader
        slots = torch.randn(max(len(reader.slot) for reader in readers), self.shape.width)
        for reader in readers:
            reader.slot.copy_(slots[-len(reader.slot) :])

    def compressed(self, hyper: Hyper, texts: Texts, passages: Sequence[Example]) -> Tensor:
        """(passages, L_d, width). Some may have pictures."""
        return read_apart(passages, lambda part: self.documents(hyper, texts.passages(part)))

    def asked(self, hyper: Hyper, inputs: Sequence[Inputs]) -> Asked:
        """Of image, question and both, as `Texts.asked` gives them."""
        # Without an image they are one and the same.
        unlike = {id(one): one for one in inputs}
        told = {name: self.queries(hyper, one) for name, one in unlike.items()}
        return Asked(*(told[id(one)] for one in inputs))

    def aggregated(
        self, documents: Tensor, asked: Asked, scores: Tensor, present: Tensor | None = None
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
        self, documents: Tensor, asked: Asked, scores: Tensor, present: Tensor | None = None
    ) -> KeyValues:
        prefix: KeyValues = self.modulation(self.aggregated(documents, asked, scores, present))
        return prefix
