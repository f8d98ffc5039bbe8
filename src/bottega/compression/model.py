"""Trainable part of RACC: prompts that read texts, their aggregator and the modulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from bottega._util.settings import check_settings
from bottega.compression.hyper_model import (
    HiddenStates,
    HyperModel,
    InputBuilder,
    ProcessorInputs,
    map_by_images,
)
from bottega.compression.layers import Aggregator, Initialization, Modulation
from bottega.errors import SettingError
from bottega.kv_prefix import Geometry, KeyValues
from bottega.types import Example

POSITION_BIAS = 10.0  # nats by which an untrained prompt prefers its own positions
LARGEST_SEED = 2**63 - 1  # torch, numpy and random all accept it
PromptMode = Literal["appended", "reading", "both"]


class AttentionPooling(nn.Module):
    """Learned rows that attend to hidden states by position and content. This pooling is ours. In
    the paper, prompts appended to a text read it through frozen attention heads, which may ignore
    what must be stored. Positions count from the end of the text; those from `reach` on share one
    weight. Untrained, row i attends to `stride` positions from `starts[i]` on."""

    def __init__(self, starts: list[int], width: int, *, stride: int = 1, reach: int = 64) -> None:
        super().__init__()
        self.slot = nn.Parameter(torch.zeros(len(starts), width))
        self.query = nn.Parameter(torch.zeros(len(starts), width))
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        bias = torch.zeros(len(starts), reach)
        for row, start in enumerate(starts):
            bias[row, start : start + stride] = POSITION_BIAS
        self.position_bias = nn.Parameter(bias)
        nn.init.eye_(self.key.weight)
        nn.init.eye_(self.value.weight)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return one row per prompt (batch, prompts, width). `states` have shape (batch, length,
        width); `mask` (batch, length) is left padded."""
        length, width = states.shape[1:]
        # From the end, because padding on the left shifts positions from the start.
        from_end = torch.arange(length - 1, -1, -1, device=states.device)
        bias = self.position_bias[:, from_end.clamp(max=self.position_bias.shape[1] - 1)]
        scores = self.query @ self.key(states).transpose(1, 2) / width**0.5 + bias
        # Each text has a token, so no row of weights is the softmax of -inf alone, which is nan.
        weights = scores.masked_fill(mask[:, None] == 0, -torch.inf).softmax(-1)
        read: Tensor = self.slot + self.value(weights @ states)
        return read


class TextCompressor(nn.Module):
    """Learned prompts (theta of eq. 1 and 2) that summarize a text. With `hard`, the embeddings of
    a sentence (prompts, width), prompts are appended to the text in the frozen model and start as
    that sentence (PIPE); the result is their last hidden states. With `starts`, prompts read the
    hidden states of the text (`AttentionPooling`). With both, the results are added."""

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
            raise ValueError("hard or starts must be given")
        self.prompts = None if hard is None else nn.Parameter(hard.clone())
        self.reader = None if starts is None else AttentionPooling(starts, width, stride=stride)
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    @torch.no_grad()
    def calibrate(
        self, hyper: HyperModel, texts: Sequence[ProcessorInputs], least: float = 0.02
    ) -> None:
        """Set centre and spread from typical texts. Dimensions of hidden states differ by orders of
        magnitude."""
        rows = []
        for inputs in texts:
            states = hyper.read(inputs, self.prompts)
            if states.prompted is not None:
                rows.append(states.prompted.flatten(0, 1))
            if self.reader is not None:
                rows.append(states.hidden[states.mask.bool()])  # without padding
        seen = torch.cat(rows).float()
        self.centre.copy_(seen.mean(0))
        self.spread.copy_(seen.std(0).clamp(min=least))

    def forward(self, hyper: HyperModel, inputs: ProcessorInputs) -> Tensor:
        """Return the compressed prompts (batch, prompts, width)."""
        return self._compressed(hyper.read(inputs, self.prompts))

    def compress_packed(self, hyper: HyperModel, texts: Sequence[ProcessorInputs]) -> list[Tensor]:
        """Return the compressed prompts (1, prompts, width) of each text, from one pass over all:
        see `HyperModel.read_packed`."""
        return [self._compressed(one) for one in hyper.read_packed(texts, self.prompts)]

    def _compressed(self, states: HiddenStates) -> Tensor:
        parts = []
        if states.prompted is not None:
            parts.append((states.prompted - self.centre) / self.spread)
        if self.reader is not None:
            hidden = (states.hidden - self.centre) / self.spread
            parts.append(self.reader(hidden, states.mask))
        return torch.stack(parts).sum(0)


@dataclass(frozen=True)
class CompressorConfig:
    """Architecture of a compressor. Defaults are the paper's, except `start`, which is ours.
    `document_prompts` and `query_prompts` are L_d and L_vq. `prompting` selects how prompts read a
    text: see `TextCompressor`. An untrained reading prompt attends to `stride` tokens. For `dcvq`,
    `rgca` and `start` see `Aggregator` and `CrossAttention`: they have `blocks` layers with `heads`
    heads each. `width` belongs to the model that compresses, `geometry` to the model that reads the
    prefix; a width of 0 is filled in later. Raises `SettingError` for values out of range."""

    width: int
    geometry: Geometry
    document_prompts: PositiveInt = 16
    query_prompts: PositiveInt = 12
    prompting: PromptMode = "appended"
    stride: PositiveInt = 1
    blocks: PositiveInt = 3
    heads: PositiveInt = 1
    dcvq: bool = True
    rgca: bool = True
    start: Initialization = "similar"

    def __post_init__(self) -> None:
        check_settings(self)
        if self.width % self.heads:
            raise SettingError(
                f"heads must divide the width {self.width}, got {self.heads}",
                hint="set heads to 1, or to another divisor of the model's width",
            )


@dataclass(frozen=True)
class QueryPrompts:
    """Compressed image, question and both (eq. 2), each of shape (batch, prompts, width)."""

    image: Tensor
    question: Tensor
    both: Tensor


class RaccModel(nn.Module):
    """All trained weights of RACC. `forward` is the paper's figure 1, from compressed documents on.
    `hard` holds initial prompts for documents (L_d, width) and queries (L_vq, width), see
    `sentence_prompts`; without it they are random."""

    def __init__(self, config: CompressorConfig, hard: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        counts = config.document_prompts, config.query_prompts
        appended = hard or [torch.randn(count, config.width) * 0.02 for count in counts]
        # A document's prompts cover its end position by position; a query's all read its last one.
        positions = [config.stride * i for i in reversed(range(counts[0]))], [0] * counts[1]
        self.documents, self.queries = (
            TextCompressor(
                config.width,
                hard=None if config.prompting == "reading" else sentence,
                starts=None if config.prompting == "appended" else starts,
                stride=config.stride if starts is positions[0] else 1,
            )
            for sentence, starts in zip(appended, positions, strict=True)
        )
        if config.start == "similar" and config.prompting != "appended":
            # The last prompts of queries and documents start equal: each query prompt attends to
            # the corresponding document prompt.
            slots = torch.randn(max(counts), config.width)
            for compressor in (self.documents, self.queries):
                if compressor.reader is not None:
                    compressor.reader.slot.data.copy_(slots[-len(compressor.reader.slot) :])
        self.aggregator = Aggregator(
            config.width,
            blocks=config.blocks,
            heads=config.heads,
            dcvq=config.dcvq,
            rgca=config.rgca,
            start=config.start,
        )
        self.modulation = Modulation(config.width, config.geometry, config.query_prompts)

    def compress(
        self, hyper: HyperModel, inputs: InputBuilder, passages: Sequence[Example]
    ) -> Tensor:
        """Return compressed passages (passages, L_d, width). Passages may have images."""
        return map_by_images(passages, lambda part: self.documents(hyper, inputs.passages(part)))

    def compress_query(self, hyper: HyperModel, inputs: Sequence[ProcessorInputs]) -> QueryPrompts:
        """Return the prompts of image, question and both, given `InputBuilder.query_inputs`."""
        # Without an image the three inputs are one object.
        unique = {id(one): one for one in inputs}
        prompts = {key: self.queries(hyper, one) for key, one in unique.items()}
        return QueryPrompts(*(prompts[id(one)] for one in inputs))

    def aggregate(
        self, documents: Tensor, query: QueryPrompts, scores: Tensor, present: Tensor | None = None
    ) -> Tensor:
        """Return the aggregated prompts (batch, L_vq, width). `documents` have shape (batch,
        documents, L_d, width), `scores` (batch, documents) any scale; `present` (batch, documents)
        masks absent documents."""
        if present is None:
            present = torch.ones_like(scores, dtype=torch.bool)
        device = documents.device
        aggregated: Tensor = self.aggregator(
            documents,
            query.image,
            query.question,
            query.both,
            scores.to(device),
            present.to(device),
        )
        return aggregated

    def forward(
        self, documents: Tensor, query: QueryPrompts, scores: Tensor, present: Tensor | None = None
    ) -> KeyValues:
        """Return the KV prefix, see `aggregate`."""
        prefix: KeyValues = self.modulation(self.aggregate(documents, query, scores, present))
        return prefix
