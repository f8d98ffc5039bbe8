"""Interfaces and values shared by the parts of the gateway."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from bottega.gateway.accounting.access import ANONYMOUS, Reservation
from bottega.gateway.accounting.ledger_schema import Account, Entry, State
from bottega.openai_api.request import Body, ChatRequest
from bottega.openai_api.response import ChatCompletion
from bottega.openai_api.streams import DONE_EVENT, to_chunks, to_event
from bottega.pipeline import Pipeline
from bottega.protocols import Prompter, Tier, Vectors, turns_only
from bottega.recipes.rcts import FETCH, SearchLimits
from bottega.routing import ShadowSampler
from bottega.types import Candidate, Compression, Example, Prefix, Prompt, Query, SearchTree, Usage

SEARCHED = "rcts"  # RequestRecord.search after a search with a result
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
NO_USAGE = Usage()
MAX_NAME = 200
ReadBody = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True)
class TierCapabilities:
    """Requests that a tier supports: the number of images (None: any), tools, audio, the tokens of
    context (None: any), images by URL that its server fetches."""

    images: int | None = None
    tools: bool = True
    audio: bool = False
    context: int | None = None
    image_urls: bool = False

    def support(self, request: ChatRequest) -> bool:
        return (
            (self.images is None or len(request.images) <= self.images)
            and (self.tools or not request.has_tools)
            and (self.audio or not request.has_audio)
            and (self.image_urls or not request.keeps_image_urls)
            and (self.context is None or request.total_tokens <= self.context)
        )


class Upstream(Protocol):
    """Backend that answers chat-completions bodies. It owns its retries, time-outs and concurrency,
    and replaces the body's `model` by its own. Raises `GenerationError`. Cancelling a call cancels
    the request to the model."""

    @property
    def model(self) -> str: ...

    async def complete(self, body: Body, /) -> ChatCompletion: ...

    def stream(self, body: Body, /) -> AsyncGenerator[bytes]:
        """Yield the JSON of each chunk, without the final `[DONE]`.

        The first chunk comes with the first content: a failure before it may be retried with
        another tier. The last chunk before the usage has a `finish_reason`; a stream that is cut
        raises `ServerFailedError`.
        """
        ...

    async def check(self) -> None:
        """Raise the error that a request would meet now, without a call of the model."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class ServedTier:
    """A tier as the gateway calls it. `extra` are the operator's fields, which override the
    client's. A request without a token limit gets `max_tokens`; if that is None, it is expected to
    generate at most `output_tokens`. `prompt` is set for the tiers of a user's pipeline; without it
    the demonstrations become turns before the client's own. With `reasons`, the tier is instructed
    to reason before its answers. With `search`, a tree search selects its demonstrations. With
    `passages`, it reads them as a KV prefix."""

    tier: Tier
    upstream: Upstream
    capabilities: TierCapabilities = TierCapabilities()
    extra: Body = field(default_factory=dict)
    output_tokens: int = 4096
    max_tokens: int | None = None
    prompt: Prompter | None = None
    reasons: bool = False
    search: SearchLimits | None = None
    passages: TierPassages | None = None

    @property
    def name(self) -> str:
        return self.tier.name

    @cached_property
    def turns_only(self) -> bool:
        """Whether the model supports only brief turns without reasoning."""
        return turns_only(self.tier.generator)

    @property
    def max_candidates(self) -> int:
        """Return the number of candidates that the tier retrieves."""
        searched = 0 if self.search is None else FETCH
        return max(self.tier.shots, searched, 0 if self.passages is None else self.passages.fetch)


@dataclass(slots=True)
class UpstreamCall:
    """One upstream call: the tier, the body sent to it, and the demonstrations and the pipeline's
    prompt in that body. `cost_usd` is set after the call, None if unknown. `abandoned` means that
    the client left before the reply. With `reasons` the reply contains reasoning, of which the
    client gets the final answer alone; `rationale` is the rest. `is_paid` means that the bill
    contains its cost already. `tree` is the search whose chosen answer this is. With `compression`,
    the demonstrations are passages that the model reads as a KV prefix."""

    served: ServedTier
    body: Body
    shown: tuple[Candidate, ...] = ()
    prompt: Prompt | None = None
    cost_usd: float | None = 0.0
    abandoned: bool = False
    reasons: bool = False
    rationale: str | None = None
    is_paid: bool = False
    tree: SearchTree | None = None
    compression: Compression | None = None

    @property
    def model(self) -> str:
        return self.served.upstream.model

    @property
    def similarity(self) -> float | None:
        return max((one.score for one in self.shown), default=None)


class PrefixUpstream(Upstream, Protocol):
    """Upstream in this process that can put a KV prefix in front of every prompt."""

    def with_prefix(self, prefix: Prefix, /) -> Upstream: ...


class TierPassages(Protocol):
    """Compressed passages of a local tier; `fetch` is the number of candidates to retrieve."""

    @property
    def fetch(self) -> int: ...

    async def read(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> tuple[list[Candidate], Prefix, Compression] | None:
        """Return up to `k` of the candidates that are compressed, with their prefix; None if none
        of them is. Raises `StoreError`."""
        ...


class ExampleWriter(Protocol):
    """Writer of examples to a cache."""

    async def store(self, example: Example, /, *, pin: bool = False) -> str | None:
        """Return the example's id once it is durable, that of a pinned example of the same question
        if there is one, or None if nothing was stored. With `pin`, the example replaces a pinned
        one, too, and is pinned."""
        ...


@dataclass(frozen=True)
class Tenant:
    """Pipeline and stores of a namespace. `stored_tiers` are the tiers whose answers become
    examples; without a `writer` none do. `shadow` measures the benefit of demonstrations, also
    where the gate of `pipeline` hides them: `ungated` shows them. `charge` is called with the cost
    of measurements, for a router that holds a budget. `best` returns the similarity of the nearest
    example found for a query, shown or not. `example` reads a stored example by its id and `embed`
    computes the vectors of queries with the embedder of the cache; these two block. `can_embed`
    returns whether that reads anything of a query: answers to others are not stored.
    `confidence_fields` are request fields that report the confidence of an answer, such as
    `logprobs` or `n`, by tier. `variants` are the tenant as the variants of an experiment see it,
    by id."""

    pipeline: Pipeline
    writer: ExampleWriter | None = None
    stored_tiers: frozenset[str] = frozenset()
    shadow: ShadowSampler | None = None
    ungated: Pipeline | None = None
    charge: Callable[[float], None] | None = None
    best: Callable[[Query], float | None] = lambda query: None
    example: Callable[[str], Example | None] = lambda id: None
    embed: Callable[[Sequence[Query]], Vectors] | None = None
    can_embed: Callable[[Query], bool] = lambda query: True
    confidence_fields: Mapping[str, Body] = field(default_factory=dict)
    variants: Mapping[str, Tenant] = field(default_factory=dict)


class Tenants(Protocol):
    async def open(self, namespace: str, /) -> Tenant: ...


@dataclass(slots=True)
class RequestRecord:
    """Record of one request, filled in while it is processed and logged when it ends."""

    request_id: str
    client_request_id: str = ""  # the client's own name for the request
    trace_id: str = ""
    begun: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    account: Account = ANONYMOUS
    entered: bool = False
    in_ledger: bool = False  # its ledger entry exists
    reservation: Reservation | None = None
    has_left: Callable[[], bool] = lambda: False
    namespace: str = ""
    route: str = ""
    model: str = ""
    state: State = "failed"
    fallback: str = ""  # tiers that failed before the one that answered
    degraded: bool = False  # router or examples were not available
    variant: str = ""  # of an experiment
    route_reason: str = ""  # why the router chose the tier, and later changes of the tier
    reason: str = ""  # for a failure, or for passing through without routing
    # The errors of tiers in their own words, which may quote the request: for its trace alone.
    tier_errors: list[str] = field(default_factory=list)
    shots: int = 0
    similarity: float | None = None
    search: str = ""  # SEARCHED, or why a search had no result
    usage: Usage = NO_USAGE
    cost_usd: float | None = 0.0
    dismissed_usd: float = 0.0
    stored: str | None = None
    status: int = 200
    wants_stream: bool = False  # the client requested a stream
    streamed: bool = False  # the status of a stream is sent

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.clock

    def entry(self) -> Entry:
        """Return the ledger entry. Its reason joins the reasons for the tier and for the end."""
        ended = f"{self.state}: {self.reason}".replace("_", " ") if self.reason else ""
        return Entry(
            time=self.begun,
            request_id=self.request_id,
            account=self.account.id,
            namespace=self.namespace,
            tier=self.route,
            model=self.model,
            state=self.state,
            shots=self.shots,
            similarity=self.similarity,
            prompt_tokens=self.usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens,
            cached_tokens=self.usage.cached_tokens,
            cost_usd=self.cost_usd,
            seconds=self.seconds,
            status=self.status,
            dismissed_usd=self.dismissed_usd,
            variant=self.variant,
            reason="; ".join(filter(None, (self.route_reason, ended))),
        )

    def add_route_reason(self, reason: str) -> None:
        self.route_reason = f"{self.route_reason}; {reason}" if self.route_reason else reason


@dataclass(slots=True)
class HttpReply:
    """Reply with either a `payload` or `events`, the encoded chunks of a stream. Those of a live
    one come from a model, so its cost is known at its end."""

    headers: Mapping[str, str]
    payload: bytes = b""
    events: AsyncGenerator[bytes] | None = None
    is_live: bool = False


AnswerHandler = Callable[[RequestRecord, Mapping[str, str], ReadBody], Awaitable[HttpReply]]


async def as_stream(payload: bytes, include_usage: bool) -> AsyncGenerator[bytes]:
    for step in to_chunks(payload, include_usage=include_usage):
        yield to_event(step)
    yield DONE_EVENT


def headers_of(record: RequestRecord) -> dict[str, str]:
    """Return the `x-bottega-*` headers of a reply that begins now."""
    cache = "augmented" if record.shots else "none"
    cache = {"replayed": "replayed", "passed_through": "passed"}.get(record.state, cache)
    # The upstream chooses the model's name; a header holds printable characters only.
    model = record.model[:MAX_NAME]
    if not model.isprintable():
        model = "".join(c if c.isprintable() else "?" for c in model)
    headers = {
        "x-bottega-route": record.route,
        "x-bottega-model": model,
        "x-bottega-cache": cache,
        "x-bottega-demonstrations": str(record.shots),
    }
    if record.fallback:
        headers["x-bottega-fallback"] = record.fallback
    if record.state == "passed_through":
        headers["x-bottega-passed"] = record.reason
    if record.search:
        headers["x-bottega-search"] = record.search
    if record.similarity is not None:
        headers["x-bottega-similarity"] = f"{record.similarity:.4f}"
    if record.usage.prompt_tokens or record.state == "replayed":
        headers["x-bottega-prompt-tokens"] = str(record.usage.prompt_tokens)
        headers["x-bottega-completion-tokens"] = str(record.usage.completion_tokens)
        if record.cost_usd is not None:
            headers["x-bottega-cost-usd"] = f"{record.cost_usd:.8f}"
    if record.stored is not None:
        headers["x-bottega-stored"] = record.stored
    if record.variant:
        headers["x-bottega-variant"] = record.variant
    return headers
