"""What the parts of the gateway need of each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bottega.protocols import Prompter, Tier
from bottega.types import Candidate, Completion, Prompt, Usage

# A chat-completions body: whatever JSON a client may send, fields that nobody knows included.
Body = Mapping[str, object]


@dataclass(frozen=True)
class Takes:
    """What a tier can be sent: so many images (None: any number), tools, audio, so many tokens of
    context (None: any number)."""

    images: int | None = None
    tools: bool = True
    audio: bool = False
    context: int | None = None


@dataclass(slots=True)
class Completed:
    """A whole reply: `payload` is its JSON as the client shall get it. `usage` is None where the
    upstream told nothing."""

    payload: bytes
    model: str
    completions: tuple[Completion, ...]
    usage: Usage | None = None


class Upstream(Protocol):
    """Whoever answers chat-completion bodies. It owns its retries, time-outs and concurrency, and
    replaces the body's `model` by its own. Raises `GenerationError`. A call that is cancelled
    cancels the request behind it."""

    @property
    def model(self) -> str: ...

    async def complete(self, body: Body, /) -> Completed: ...

    def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        """The JSON of each event (what stands behind `data: `), without the final `[DONE]`.

        The last one but for the usage has a `finish_reason`. What fails before the first event may
        be tried again elsewhere; a stream that is cut raises `ServerFailedError`.
        """
        ...

    async def check(self) -> None:
        """Raises the error that a request would meet now, without asking the model."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Served:
    """A tier as the gateway calls it. Where an answer may send its question on to another tier,
    `asks` are fields that tell how sure this one is, such as `logprobs` or `n`. `extra` are the
    operator's fields, which override the client's. A request without a token limit is expected to
    generate at most `output_tokens`. `prompt` is set for the tiers of a user's pipeline; without it
    the demonstrations become turns before the client's own."""

    tier: Tier
    upstream: Upstream
    takes: Takes = Takes()
    asks: Body = field(default_factory=dict)
    extra: Body = field(default_factory=dict)
    output_tokens: int = 4096
    prompt: Prompter | None = None

    @property
    def name(self) -> str:
        return self.tier.name


@dataclass(slots=True)
class Call:
    """One upstream call: the tier, the body sent to it, and the demonstrations and the pipeline's
    prompt in that body. `cost_usd` is set after the call, None if unknown. `abandoned` means that
    the client left before the reply."""

    served: Served
    body: Body
    shown: tuple[Candidate, ...] = ()
    prompt: Prompt | None = None
    cost_usd: float | None = 0.0
    abandoned: bool = False

    @property
    def model(self) -> str:
        return self.served.upstream.model

    @property
    def similarity(self) -> float | None:
        return max((one.score for one in self.shown), default=None)
