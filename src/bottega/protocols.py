"""The ports between rooms: each room implements one, and gets the others as arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class Generator(Protocol):
    """A model. One call returns `sampling.n` completions; it owns its concurrency and batching.

    Raises `GenerationError`. `name` is what traces, prices and reports call it.
    """

    @property
    def name(self) -> str: ...

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class PrefixGenerator(Generator, Protocol):
    """A model in this process: it can answer behind keys and values that it did not read itself.

    `behind` gives the same model with every prompt behind `prefix`; it shares everything else, and
    closing it closes nothing. A prefix of another shape raises `GenerationError` when it is used.
    """

    def with_prefix(self, prefix: Prefix, /) -> Generator: ...


def turns_only(generator: Generator) -> bool:
    """Whether it says so: it knows brief turns alone and gives no reasons, as the bundled ones."""
    return bool(getattr(generator, "turns_only", False))


@dataclass(frozen=True)
class Tier:
    """A model that a router can choose. A tier with `shots` 0 is asked without demonstrations.
    `prompt` and `sampling` are the pipeline's where the tier has none of its own."""

    name: str
    generator: Generator
    shots: int = 0
    prompt: Prompter | None = None
    sampling: Sampling | None = None


class Router(Protocol):
    async def __call__(self, query: Query, /) -> Tier: ...


class Escalation(Protocol):
    """The tier to ask next because this tier's answer is not good enough, None if it is."""

    async def __call__(self, query: Query, tier: Tier, answer: Answer, /) -> Tier | None: ...


class Retriever(Protocol):
    """The `k` nearest examples, best first. Never the query's own id or image.

    Returns fewer than `k` only if there are fewer.
    """

    async def __call__(self, query: Query, k: int, /) -> list[Candidate]: ...


class Reranker(Protocol):
    """At most `k` of the candidates as an ORDERED sequence: nobody sorts it again by score."""

    async def __call__(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> list[Candidate]: ...


class Searcher(Protocol):
    """Chooses demonstrations by asking the model with them. What it answered after those that are
    chosen is the pipeline's answer: it is not asked again."""

    async def search(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> SearchResult: ...


class Prompter(Protocol):
    def __call__(self, query: Query, demonstrations: Sequence[Candidate], /) -> Prompt: ...


class Parser(Protocol):
    """Never raises on odd text: an unparsable completion is `Answer(valid=False)`."""

    def __call__(self, query: Query, completion: Completion, /) -> Answer: ...


class Recorder(Protocol):
    async def __call__(self, trace: Trace, /) -> None: ...


class Pricer(Protocol):
    """US dollars of one call, None where the model's price is unknown."""

    def __call__(self, model: str, usage: Usage, /) -> float | None: ...


class Embedder(Protocol):
    """Queries (image, text or both) to an (n, dimension) float32 array of unit rows.

    `fingerprint` names the encoder, its weights and its settings: vectors of two embedders are
    comparable only if their fingerprints are equal. Blocking: callers keep it off the event loop.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed(self, queries: Sequence[Query]) -> Vectors: ...


class MultiVectorEmbedder(Protocol):
    """Queries to one (tokens, dimension) float32 matrix of unit rows each, for late interaction.

    A question and what is searched may be encoded differently. A query of which nothing can be
    read raises `EmbeddingError`. The fingerprint is that of `Embedder`, and so is the blocking.
    """

    @property
    def fingerprint(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed_queries(self, queries: Sequence[Query]) -> list[Vectors]: ...

    def embed_documents(self, queries: Sequence[Query]) -> list[Vectors]: ...
