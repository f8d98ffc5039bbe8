"""Generation from a `TokenTree`, several tokens of a reply at a time (needs torch).

Short replies often repeat earlier text: the last reply to the same query, or labels and phrases of
the demonstrations. Such drafts are read with the prompt, and one pass gives the logits after each
of their tokens. A draft is kept up to the first token that the model would not have chosen, so the
replies are those of a pass per token (speculative decoding; Saxena, Prompt Lookup Decoding, 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bottega.generation.token_tree import TokenTree

if TYPE_CHECKING:
    pass
from collections.abc import Iterator
from dataclasses import field

import torch

from bottega._util.caching import LRUCache
from bottega.generation.sampling import (
    MIN_TEMPERATURE,
    Decode,
    SampleRow,
    cut_at_stop,
    to_completion,
)
from bottega.generation.token_tree import PathWithDrafts
from bottega.types import Completion

MAX_DRAFT = 8
# Tokens of all drafts of a row. In a larger batch, passes cost less, and a row has one draft.
MAX_DRAFTED, SMALL_BATCH = 12, 4
# Tokens at the end of a prompt that identify its last turn.
TURN_TOKENS, MAX_TURNS = 8, 1024
# Attention scores of the prompts that are read together, each padded to the longest.
MAX_SCORES = 1 << 24
ChosenToken = tuple[int, float]  # with its log-probability


@dataclass
class ReplyState:
    """Reply of one row. `text` are the keys of its prompt and tokens, `path` their nodes, `nodes`
    those of each draft. `previous` is the last reply to the same turn, `latest` the last one to
    any."""

    row: SampleRow
    text: list[int]
    previous: list[int]
    latest: list[int]
    path: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    nodes: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_done: bool = False

    def __post_init__(self) -> None:
        self._generator = self.row.noise(torch.device("cpu"))
        self._noise: list[torch.Tensor] = []  # exponential variables of each token, (vocabulary)

    @property
    def count(self) -> int:
        """Number of nodes whose logits the next pass returns."""
        return 1 + sum(map(len, self.drafts))

    def draft(self, limit: int, ends: frozenset[int]) -> None:
        """Set up to `limit` drafts of the next tokens, without end tokens."""
        longest = min(MAX_DRAFT, self.row.sampling.max_tokens - len(self.tokens) - 1)
        room, self.drafts = MAX_DRAFTED, []
        for guess in self._guesses(limit > 1):
            stop = next((i for i, key in enumerate(guess) if key in ends or key < 0), None)
            draft = guess[:stop][: min(longest, room)]
            if not any(draft == one[: len(draft)] for one in self.drafts):
                self.drafts.append(draft)
                room -= len(draft)
            if len(self.drafts) == limit:
                return

    def _guesses(self, has_room: bool) -> Iterator[list[int]]:
        """Yield likely continuations, the likeliest first."""
        done = len(self.tokens)
        if self.previous and self.tokens == self.previous[:done]:
            yield self.previous[done:]
        if not done and not has_room:
            return
        # What followed the last two tokens before; at first, what follows the start of an answer.
        length, is_repeated = (2 if done else 1), False
        for i in range(len(self.text) - 1, length - 1, -1):
            if self.text[i - length : i] == self.text[-length:]:
                is_repeated = True
                yield self.text[i : i + MAX_DRAFT]
        if done and not is_repeated:  # replies often have the same form
            yield (self.previous or self.latest)[done:]

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the scores (count, vocabulary) whose largest ones are the chosen tokens."""
        if self._generator is None:
            return logits
        start = len(self.tokens)
        steps = [start, *(start + 1 + i for draft in self.drafts for i in range(len(draft)))]
        while len(self._noise) <= max(steps):
            empty = torch.empty_like(logits[0])
            self._noise.append(empty.exponential_(generator=self._generator))
        noise = torch.stack([self._noise[step] for step in steps])
        temperature = max(self.row.sampling.temperature, MIN_TEMPERATURE)
        return logits / temperature - noise.log()

    def confirm(self, chosen: Sequence[ChosenToken], ends: frozenset[int], decode: Decode) -> None:
        """Add the tokens chosen after the path and after the draft that agrees longest."""
        found, kept = list(chosen[:1]), list[int]()
        rest = chosen[1:]
        for draft, nodes in zip(self.drafts, self.nodes, strict=True):
            branch, rest = [chosen[0], *rest[: len(draft)]], rest[len(draft) :]
            pairs = enumerate(zip(branch, draft, strict=False))
            agreed = next((i for i, (one, token) in pairs if one[0] != token), len(draft))
            if agreed > len(kept):
                found, kept = branch[: agreed + 1], nodes[:agreed]
        self.path += kept
        sampling = self.row.sampling
        for token, logprob in found:
            self.tokens.append(token)
            self.text.append(token)
            self.logprobs.append(logprob)
            full = len(self.tokens) >= sampling.max_tokens
            if full or token in ends or self._has_stop(decode):
                self.is_done = True
                return

    def _has_stop(self, decode: Decode) -> bool:
        stop = self.row.sampling.stop
        return bool(stop) and cut_at_stop(decode(self.tokens), stop) is not None


class TreeGenerator:
    """Generator of replies to tokenized prompts. Blocking; use it from one thread."""

    def __init__(self, tree: TokenTree, ends: frozenset[int], decode: Decode) -> None:
        self.tree = tree
        self._ends, self._decode = ends, decode
        self._previous: LRUCache[tuple[int, ...], list[int]] = LRUCache(MAX_TURNS)
        self._latest: list[int] = []

    def generate(
        self, prompts: Sequence[list[int]], rows: Sequence[SampleRow]
    ) -> list[tuple[Completion, int]]:
        """Return the completion of each row and its number of tokens. `prompts` are keys of the
        tree, one prompt per row."""
        replies = [self._begin(keys, row) for keys, row in zip(prompts, rows, strict=True)]
        try:
            self._answer(replies, prompts)
        except BaseException:
            self.tree.clear()  # it may have nodes without states
            raise
        for keys, reply in zip(prompts, replies, strict=True):
            self._previous.put(_turn(keys), reply.tokens)
            self._latest = reply.tokens
        return [
            to_completion(one.tokens, one.logprobs, self._ends, one.row, self._decode)
            for one in replies
        ]

    def _answer(self, replies: list[ReplyState], prompts: Sequence[list[int]]) -> None:
        active, unread = replies, list(prompts)
        while active:
            limit = SMALL_BATCH if len(active) <= SMALL_BATCH else 1
            logits = self.tree.logits(
                [self._extended(one, keys, limit) for one, keys in zip(active, unread, strict=True)]
            )
            parts = torch.split(logits, [one.count for one in active])
            pairs = zip(active, parts, strict=True)
            tokens = torch.cat([one.scores(part) for one, part in pairs]).argmax(dim=-1)
            logprobs = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
            chosen = iter(zip(tokens.tolist(), logprobs.tolist(), strict=True))
            for one in active:
                one.confirm([next(chosen) for _ in range(one.count)], self._ends, self._decode)
            active = [one for one in active if not one.is_done]
            unread = [one.tokens[-1:] for one in active]

    def _begin(self, keys: list[int], row: SampleRow) -> ReplyState:
        return ReplyState(row, list(keys), self._previous.get(_turn(keys)) or [], self._latest)

    def _extended(self, reply: ReplyState, keys: Sequence[int], limit: int) -> PathWithDrafts:
        """Add the nodes of tokens to a reply, and those of its drafts."""
        self.tree.extend(reply.path, keys)
        reply.draft(limit, self._ends)
        reply.nodes = []
        for draft in reply.drafts:
            path = reply.path[-1:]
            self.tree.extend(path, draft)
            reply.nodes.append(path[1:])
        return reply.path, reply.nodes


def parts_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of prompts that are read together, the longest first: a long prompt would
    delay all shorter ones that are padded to its length."""
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] ** 2 <= MAX_SCORES:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def _turn(prompt: Sequence[int]) -> tuple[int, ...]:
    return tuple(prompt[-TURN_TOKENS:])
