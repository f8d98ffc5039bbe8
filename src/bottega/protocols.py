"""Protocols of the parts. A part implements one of them and receives others as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from bottega.types import (
    Answer,
    Candidate,
    Completion,
    Prefix,
    Prompt,
    Query,
    Reply,
    Sampling,
    SearchResult,
    Trace,
    Usage,
)

Vectors = NDArray[np.float32]
Candidates = Sequence[Candidate]


class Generator(Protocol):
    """Model that answers prompts. One call returns `sampling.n` completions. The generator
    controls its own concurrency and batching.

    Raises `GenerationError`. `name` is what traces, prices and reports call it.
    """

    @property
    def name(self) -> str: ...

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class PrefixGenerator(Generator, Protocol):
    """Model in this process that accepts a KV prefix.

    `with_prefix` returns a view of the same model that puts `prefix` before every prompt. Closing
    the view has no effect. A prefix of another shape raises `GenerationError` when it is used.
    """

    def with_prefix(self, prefix: Prefix, /) -> Generator: ...


def turns_only(generator: Generator) -> bool:
    """Whether the generator only supports brief turns without reasoning, as the bundled models."""
    return bool(getattr(generator, "turns_only", False))


@dataclass(frozen=True)
class Tier:
    """Model that a router can choose, with its number of demonstrations (`shots`).

    `prompt` and `sampling` default to those of the pipeline. A router or an escalation may return a
    copy whose `reason` states why it chose this tier.
    """

    name: str
    generator: Generator
    shots: int = 0
    prompt: Prompter | None = None
    sampling: Sampling | None = None
    reason: str = field(default="", compare=False)


class Router(Protocol):
    """Choice of the tier that answers a query."""

    async def __call__(self, query: Query, /) -> Tier: ...


class Escalation(Protocol):
    """Choice of the next tier after an insufficient answer, None to keep the answer."""

    async def __call__(self, query: Query, tier: Tier, answer: Answer, /) -> Tier | None: ...


class Retriever(Protocol):
    """Search for the `k` nearest examples, best first, without the query's own id or image.

    Returns fewer than `k` only if there are fewer.
    """

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]: ...


class Reranker(Protocol):
    """Choice of at most `k` candidates, in the order in which they are shown."""

    async def __call__(
        self, query: Query, candidates: Candidates, k: int, /
    ) -> list[Candidate]: ...


class Searcher(Protocol):
    """Choice of demonstrations by querying the model with several sets of them. The answer with the
    chosen set is the pipeline's answer."""

    async def search(self, query: Query, candidates: Candidates, k: int, /) -> SearchResult: ...


class Prompter(Protocol):
    """Conversion of a query and its demonstrations to a prompt."""

    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt: ...


class Parser(Protocol):
    """Conversion of a completion to an answer. An unparsable text gives `Answer(valid=False)`."""

    def __call__(self, query: Query, completion: Completion, /) -> Answer: ...


class Recorder(Protocol):
    """Consumer of the trace of each answered query."""

    async def __call__(self, trace: Trace, /) -> None: ...


class Pricer(Protocol):
    """Cost of one call in US dollars, None if the price of the model is unknown."""

    def __call__(self, model: str, usage: Usage, /) -> float | None: ...


class Embedder(Protocol):
    """Encoder of queries (image, text or both) to (n, dimension) float32 unit rows.

    `fingerprint` names the encoder, its weights and its settings: vectors of two embedders are
    comparable only if their fingerprints are equal. `embed` blocks: call it in a thread.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed(self, queries: Sequence[Query]) -> Vectors: ...


def embed_concurrency(embedder: Embedder) -> int:
    """Return how many calls of `embed` the embedder computes at a time: more than 1 if it has
    workers in other processes."""
    return int(getattr(embedder, "concurrency", 1))


class MultiVectorEmbedder(Protocol):
    """Encoder of each query to a (tokens, dimension) float32 matrix of unit rows, for late
    interaction.

    Queries and documents may be encoded differently. A query without readable content raises
    `EmbeddingError`. `fingerprint` is as in `Embedder`; both `embed` methods block.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]: ...

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]: ...
