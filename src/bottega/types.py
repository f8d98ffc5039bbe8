"""Data types that pass between parts: frozen dataclasses without behaviour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bottega import notebook
from bottega.errors import SettingError, check_count
from bottega.image import Image

Role = Literal["system", "user", "assistant"]
IMAGE_QUESTION = "What is in the image above?"  # for an image without a question


@dataclass(frozen=True)
class Query:
    """A question with its images. `choices` are the allowed answers, empty if any text is allowed.

    `context` identifies other inputs that the answer depends on, such as a digest of the system
    instructions: an answer from one context is not an example for another.

    A query never holds its gold answer, which belongs to `Example`.
    """

    text: str
    images: tuple[Image, ...] = ()
    choices: tuple[str, ...] = ()
    id: str | None = None
    context: str = ""


@dataclass(frozen=True)
class Example:
    """A query with its answer. `labels` are the classes of a multi-label answer, and `answer` is
    then their text in a demonstration; None means that the answer is the only label.

    An example with an empty answer is a passage, which the model reads. `rationale` is the
    reasoning that a demonstration shows before its answer.

    `source` is the provenance; the knowledge base assigns `id`.
    """

    query: Query
    answer: str
    labels: tuple[str, ...] | None = None
    rationale: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    id: str | None = None

    @property
    def reply(self) -> str:
        """Return the assistant turn of the demonstration: the rationale, if any, and the answer."""
        return f"{self.rationale}\nAnswer: {self.answer}" if self.rationale else self.answer


@dataclass(frozen=True)
class Candidate:
    """A retrieved example. Higher scores are nearer; the scale depends on the retriever."""

    example: Example
    score: float


@dataclass(frozen=True)
class ExampleChange:
    """Entry of a change log: an example that was stored, or one that was `deleted`."""

    seq: int
    id: str
    deleted: bool = False


@dataclass(frozen=True)
class Message:
    """Turn of a prompt: texts and images in order."""

    role: Role
    parts: tuple[str | Image, ...]


@dataclass(frozen=True)
class Prompt:
    """Messages of one request to a model, in order."""

    messages: tuple[Message, ...]

    @property
    def parts(self) -> tuple[str | Image, ...]:
        """Texts and images of all messages, in order."""
        return tuple(part for message in self.messages for part in message.parts)

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))


@dataclass(frozen=True, eq=False)
class Prefix:
    """KV prefix: keys and values in a model's cache before the prompt, one pair per layer.

    Each array is (key-value heads, length, head dimension) in float32; keys are stored after the
    rotary rotation. The prefix includes the prompt's first `opening` tokens, which the model does
    not read again.
    """

    layers: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]
    opening: int = 0

    @property
    def length(self) -> int:
        """Return the number of tokens."""
        return int(self.layers[0][0].shape[1])


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: `n` completions per call, each at most `max_tokens` long.

    Temperature 0 is greedy. A completion ends before any text of `stop`. `seed` makes
    sampling repeatable if the backend supports it. Raises `SettingError` for invalid values.
    """

    temperature: float = 0.0
    max_tokens: int = 256
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_count("n", self.n)
        check_count("max_tokens", self.max_tokens)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SettingError(
                f"temperature must be 0 or more, got {self.temperature}",
                hint="set temperature=0 (greedy)",
            )
        if "" in self.stop:
            raise SettingError("stop text is empty", hint="leave it out, or set a text")


@dataclass(frozen=True)
class Usage:
    """Token counts of one call; `completion_tokens` is the sum over its samples."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True)
class Completion:
    """One sample. `logprob` is the sum over its tokens, None if the backend reports none."""

    text: str
    finish_reason: str = "stop"
    logprob: float | None = None


Samples = tuple[tuple[Completion, ...], Usage]  # of one prompt


@dataclass(frozen=True)
class Reply:
    """Result of one call to a model. `seconds` is its wall time including retries."""

    model: str
    completions: tuple[Completion, ...]
    usage: Usage = Usage()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)  # tens of thousands are held at once
class Answer:
    """A parsed completion. An unparsable one has `valid=False` and counts as wrong, not as missing.

    `labels` are the chosen classes (several for a multi-label query). `confidence` is in [0, 1].
    """

    text: str
    valid: bool = True
    labels: tuple[str, ...] = ()
    confidence: float | None = None
    rationale: str | None = None

    def _repr_html_(self) -> str:
        return notebook.render("answer", self)


@dataclass(frozen=True)
class SearchNode:
    """Node of a search tree with its demonstration, None at the root. `value` is Q, `visits` is N.

    At the end of a branch, `answer` is the model's answer with all demonstrations on the path (at
    the root: without any), and `rewards` are the rewards of that answer by name.
    """

    candidate: Candidate | None = None
    value: float = 0.0
    visits: int = 0
    children: tuple[SearchNode, ...] = ()
    answer: Answer | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


Ended = Literal["rollouts", "agreement", "exhausted", "budget"]


@dataclass(frozen=True)
class SearchTree:
    """Record of a search. `path` is the chosen branch: the index of each child among its siblings,
    empty if the root's answer was chosen.

    `requests` is the number of requests, `calls` the number of completions and `usage` their total
    token counts, including those of the chosen answer.
    """

    root: SearchNode
    path: tuple[int, ...]
    ended: Ended
    requests: int = 0
    calls: int = 0
    usage: Usage = Usage()


@dataclass(frozen=True)
class Compression:
    """Compression of the shown passages into a KV prefix: names of the compressor and of the store
    (None if they were compressed on demand), and the number of `tokens` of the prefix."""

    compressor: str
    store: str | None
    tokens: int


@dataclass(frozen=True)
class SearchResult:
    """The demonstrations shown, in order, and the model's answer with them. `tree` is the search
    that chose them, None if no search ran. With `compression`, they were shown as a KV prefix."""

    shown: tuple[Candidate, ...]
    prompt: Prompt
    reply: Reply
    answer: Answer
    tree: SearchTree | None = None
    compression: Compression | None = None


@dataclass(frozen=True)
class Trace:
    """Record of one query, with an `id` of its own. `candidates` are the demonstrations in the
    order shown. `prompt` was sent to the model of `tier` at `time` (unix seconds); `answer` was
    parsed from its `reply`.

    `seconds` is the wall time of the whole answer. `dismissed` are the replies of earlier tiers,
    whose answers led to an escalation. `cost_usd` includes them and all requests of a search; it is
    None if a price is unknown. `tree` is the search that chose the candidates. With `compression`,
    the candidates are passages that the model read as a KV prefix, not in the prompt. `reason`
    is the router's reason for the tier, empty if it gives none.
    """

    id: str
    time: float
    query: Query
    tier: str
    candidates: tuple[Candidate, ...]
    prompt: Prompt
    reply: Reply
    answer: Answer
    seconds: float
    cost_usd: float | None = None
    dismissed: tuple[Reply, ...] = ()
    tree: SearchTree | None = None
    compression: Compression | None = None
    reason: str = ""

    @property
    def usage(self) -> Usage:
        """Return the tokens of the reply, or of the whole search, without dismissed replies."""
        return self.reply.usage if self.tree is None else self.tree.usage

    @property
    def calls(self) -> int:
        """Return the number of completions of the reply, or of the whole search."""
        return len(self.reply.completions) if self.tree is None else self.tree.calls

    def _repr_html_(self) -> str:
        return notebook.render("trace", self)
