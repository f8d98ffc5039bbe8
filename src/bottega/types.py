"""The nouns that travel between rooms: frozen dataclasses, no behaviour."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bottega.errors import SettingError
from bottega.image import Image

Role = Literal["system", "user", "assistant"]
IMAGE_QUESTION = "What is in the image above?"  # for an image without a question


@dataclass(frozen=True)
class Query:
    """What is asked. `choices` are the admissible answers, empty if any text may be answered.

    `context` says what else the answer depends on, such as a digest of the instructions around the
    question: an answer that was given in one context is no example for another.

    A query never holds its gold answer: that belongs to the `Example` around it.
    """

    text: str
    images: tuple[Image, ...] = ()
    choices: tuple[str, ...] = ()
    id: str | None = None
    context: str = ""


@dataclass(frozen=True)
class Example:
    """A query with its answer. `labels` are the classes of a multi-label answer, in which case
    `answer` is how a demonstration shows them; None means that the answer is the only label.

    An example with an empty answer is a passage: it is read, not imitated. `rationale` is the
    reasoning that a demonstration shows before its answer.

    `source` says where the example came from (provenance), `id` is given by the knowledge base.
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
        """What a demonstration has the assistant say."""
        return f"{self.rationale}\nAnswer: {self.answer}" if self.rationale else self.answer


@dataclass(frozen=True)
class Candidate:
    """An example that a retriever found. Higher scores are nearer; the scale is the retriever's."""

    example: Example
    score: float


@dataclass(frozen=True)
class ExampleChange:
    """One entry of a change log: an example that was stored, or is gone by now (`deleted`)."""

    seq: int
    id: str
    deleted: bool = False


@dataclass(frozen=True)
class Message:
    role: Role
    parts: tuple[str | Image, ...]


@dataclass(frozen=True)
class Prompt:
    messages: tuple[Message, ...]


@dataclass(frozen=True, eq=False)
class Prefix:
    """What stands before a prompt in a model's cache: for each layer keys and values, each
    (key-value heads, length, head dimension) in float32, keys as they are after the rotation.

    The prompt's first `opening` tokens are among them, and are not read again."""

    layers: tuple[tuple[NDArray[np.float32], NDArray[np.float32]], ...]
    opening: int = 0

    @property
    def length(self) -> int:
        return int(self.layers[0][0].shape[1])


@dataclass(frozen=True)
class Sampling:
    """How to sample: `n` completions in one call, at most `max_tokens` each.

    Temperature 0 is greedy. `seed` makes sampling repeatable where the backend can.
    Raises `SettingError` for values that no model can follow.
    """

    temperature: float = 0.0
    max_tokens: int = 256
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, count in (("n", self.n), ("max_tokens", self.max_tokens)):
            if count < 1:
                raise SettingError(f"{name} is {count}", hint=f"set {name} to 1 or more")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SettingError(
                f"temperature is {self.temperature}", hint="set it to 0 (greedy) or more"
            )


@dataclass(frozen=True)
class Usage:
    """Tokens of one call; `completion_tokens` is the sum over its samples."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Completion:
    """One sample. `logprob` is the sum over its tokens, None where the backend gives none."""

    text: str
    finish_reason: str = "stop"
    logprob: float | None = None


@dataclass(frozen=True)
class Reply:
    """What one call to a model returned, in `seconds` of wall time, retries included."""

    model: str
    completions: tuple[Completion, ...]
    usage: Usage = Usage()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)  # tens of thousands are held at once
class Answer:
    """A parsed completion. Unparsable means `valid=False`: it counts as wrong, never as missing.

    `labels` are the chosen classes (several for a multi-label query), `confidence` in [0, 1].
    """

    text: str
    valid: bool = True
    labels: tuple[str, ...] = ()
    confidence: float | None = None
    rationale: str | None = None


@dataclass(frozen=True)
class SearchNode:
    """A demonstration at its place in a search tree; the root has none. `value` is Q, `visits` N.

    Where a branch ends, `answer` is what was said after all demonstrations on the way (at the root:
    after none), and `rewards` what it was worth, by name.
    """

    candidate: Candidate | None = None
    value: float = 0.0
    visits: int = 0
    children: tuple[SearchNode, ...] = ()
    answer: Answer | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchTree:
    """What a search did. `path` leads to the branch that was chosen: the place of each child among
    its siblings, empty where the root's answer was taken.

    `requests` were sent and `calls` completions came back; `usage` is that of them all, the chosen
    answer's included.
    """

    root: SearchNode
    path: tuple[int, ...]
    ended: Literal["rollouts", "agreement", "exhausted", "budget"]
    requests: int = 0
    calls: int = 0
    usage: Usage = Usage()


@dataclass(frozen=True)
class SearchResult:
    """The demonstrations that were shown, in order, and what the model said after them; with the
    `tree`, if a search has chosen them."""

    shown: tuple[Candidate, ...]
    prompt: Prompt
    reply: Reply
    answer: Answer
    tree: SearchTree | None = None


@dataclass(frozen=True)
class Trace:
    """Everything that happened to one query. `candidates` stand in the order they were shown.

    `seconds` is the whole answer's wall time. `dismissed` are the replies of tiers that were asked
    first and whose answers were not good enough; `cost_usd` includes them and all that a search has
    asked, and is None where a price is not known. `tree` is the search that chose the candidates.
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

    @property
    def usage(self) -> Usage:
        """Tokens of the reply, or of all that a search has asked; without the dismissed replies."""
        return self.reply.usage if self.tree is None else self.tree.usage

    @property
    def calls(self) -> int:
        """Completions, counted in the same way."""
        return len(self.reply.completions) if self.tree is None else self.tree.calls
