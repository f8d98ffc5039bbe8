"""Recorders of use counts and cached answers, a composite of several recorders, and prices."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from bottega._util.batch_writer import BatchWriter
from bottega._util.refusals import declines
from bottega.errors import BottegaError
from bottega.protocols import Recorder
from bottega.types import Answer, Example, Query, Trace, Usage

log = logging.getLogger(__name__)
MAX_BATCH = 64
ABSTENTION = "unknown"
# Also in "The answer is unknown.", "Label: unknown", a box, tags, and before a line of confidence.
ABSTENTION_REPLY = re.compile(
    r"\W*(?:(?:the )?(?:(?:final|correct) )?(?:answer(?: choice)?|label|class|category)(?: is)?"
    rf"\W+)?(?:boxed\W+)?{ABSTENTION}\W*(?:</answer>\W*)?(?:confidence(?: score)?\W+[\d.]+\W*)?",
    re.IGNORECASE,
)
# Adds tags to examples, in their order.
Tagger = Callable[[Sequence[Example]], Awaitable[Sequence[Example]]]


@dataclass(frozen=True)
class TokenPrice:
    """US dollars per million tokens. `cached` is the price of prompt tokens from the provider's
    cache, None if they cost the same as other prompt tokens."""

    input: float
    output: float
    cached: float | None = None

    def __call__(self, usage: Usage) -> float:
        cached = self.input if self.cached is None else self.cached
        uncached = usage.prompt_tokens - usage.cached_tokens
        dollars = (
            uncached * self.input
            + usage.cached_tokens * cached
            + usage.completion_tokens * self.output
        )
        return dollars / 1e6


# Names of the generators that run in this process.
FREE = {"local:*": TokenPrice(0, 0), "bundled:*": TokenPrice(0, 0)}


class PriceTable:
    """Published prices of models, from `genai-prices`, with `overrides`. An override applies to an
    exact name or to a prefix that ends in `*`; the longest one wins. The cost of an unknown model
    is None. Models in this process cost 0."""

    def __init__(self, overrides: Mapping[str, TokenPrice] | None = None) -> None:
        self.override(overrides or {})

    def override(self, overrides: Mapping[str, TokenPrice]) -> None:
        """Replace the overrides for all further requests."""
        given = FREE | dict(overrides)
        self._exact = {name: price for name, price in given.items() if not name.endswith("*")}
        prefixes = {name[:-1]: price for name, price in given.items() if name.endswith("*")}
        self._prefixes = sorted(prefixes.items(), key=lambda pair: -len(pair[0]))
        self._unpublished: set[str] = set()  # known to have no published price

    def __call__(self, model: str, usage: Usage) -> float | None:
        prefixed = (price for start, price in self._prefixes if model.startswith(start))
        price = self._exact.get(model) or next(prefixed, None)
        if price is not None:
            return price(usage)
        if model in self._unpublished:
            return None
        from genai_prices import Usage as Tokens  # slow to import
        from genai_prices import calc_price

        tokens = Tokens(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            cache_read_tokens=usage.cached_tokens,
        )
        try:
            return float(calc_price(tokens, model).total_price)
        except LookupError:
            self._unpublished.add(model)
            return None


class CompositeRecorder:
    """Recorder that passes each trace to several recorders in turn. A failure does not stop the
    others; the first one is raised at the end."""

    def __init__(self, *recorders: Recorder | None) -> None:
        self._recorders = [recorder for recorder in recorders if recorder is not None]

    async def __call__(self, trace: Trace, /) -> None:
        failures: list[Exception] = []
        for record in self._recorders:
            try:
                await record(trace)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]


class UseCounter(Protocol):
    """Use counts of a knowledge base."""

    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None: ...


class UseCountRecorder:
    """Recorder that counts the demonstrations used and the cost they saved. An answer of a cheaper
    tier saves the master's mean cost so far minus its own cost, and 0 if a price is unknown."""

    def __init__(self, knowledge: UseCounter, *, master: str) -> None:
        self._knowledge = knowledge
        self._master = master
        self._spent = 0.0
        self._priced = 0

    async def __call__(self, trace: Trace, /) -> None:
        cost, saved = trace.cost_usd, 0.0
        if cost is not None and trace.tier == self._master:
            self._spent, self._priced = self._spent + cost, self._priced + 1
        elif cost is not None and self._priced:
            saved = max(0.0, self._spent / self._priced - cost)
        shown = [c.example.id for c in trace.candidates if c.example.id is not None]
        if shown:
            await asyncio.to_thread(self._knowledge.used, shown, saved)


class ExampleStore(Protocol):
    """Knowledge base that replaces examples."""

    def replace(
        self,
        examples: Sequence[Example],
        *,
        pin: bool = False,
        on_error: Callable[[BottegaError], None],
    ) -> list[str | None]: ...


def is_abstention(text: str) -> bool:
    """Return whether a reply is only the word with which the bundled models abstain, possibly
    formatted, after "Answer:" or "The answer is", or with a confidence."""
    return ABSTENTION_REPLY.fullmatch(text) is not None


def is_unanswered(text: str) -> bool:
    """Return whether a reply is empty, abstains, refuses or asks for the image."""
    return is_abstention(text) or declines(text)


def cached_example(trace: Trace) -> Example | None:
    """Return the answer of a trace as an example, None if it is invalid, truncated or abstains.

    "unknown" and a refusal are abstentions unless they are one of the choices.
    """
    if any(one.finish_reason != "stop" for one in trace.reply.completions):
        return None
    return _valid_example(trace.query, trace.answer, f"{trace.tier}:{trace.reply.model}")


def _valid_example(query: Query, answer: Answer, source: str) -> Example | None:
    is_missing = is_unanswered(answer.text) and answer.text not in query.choices
    if not answer.valid or is_missing:
        return None
    single = answer.labels in ((), (answer.text,))
    return Example(
        replace(query, id=None),
        answer.text,
        labels=None if single else answer.labels,
        rationale=answer.rationale,
        tags={"context": query.context} if query.context else {},
        source=source,
    )


class CacheRecorder:
    """Recorder that stores the answers of the tiers named in `stored_tiers` as examples.

    Invalid and truncated answers, abstentions and refusals are not stored, unless they are a
    choice; examples with texts of more than `max_characters` characters are not either. One answer
    is stored per question (images, text, choices and the tag `context`): a newer answer replaces
    the older one unless that is pinned. `source` is the tier and model. Concurrent answers share
    one commit. `tag` adds tags before an answer is embedded, such as the keywords of the response
    (`retrieval.tag_keywords`); if it fails, the answer is stored without them and a warning is
    logged. Raises `StoreError`.
    """

    def __init__(
        self,
        knowledge: ExampleStore,
        *,
        stored_tiers: Collection[str],
        max_characters: int = 32_000,
        tag: Tagger | None = None,
    ) -> None:
        self._tag = tag
        self._stored_tiers = frozenset(stored_tiers)
        self._max_characters = max_characters
        self._replace = partial(knowledge.replace, on_error=self._warn_error)
        self._writer = BatchWriter[Example, str | None](
            self._replace,
            name="bottega-cached-answers",
            max_batch=MAX_BATCH,
        )
        self._warned: set[str] = set()

    async def __call__(self, trace: Trace, /) -> None:
        example = cached_example(trace) if trace.tier in self._stored_tiers else None
        if example is not None:
            await self.store(example)

    async def learn(self, query: Query, answer: Answer, tier: str) -> None:
        """Store an answer without its trace, for a `Method` of the evaluation."""
        if tier in self._stored_tiers:
            await self._store_valid(query, answer, tier)

    async def store(self, example: Example, *, pin: bool = False) -> str | None:
        """Store an example and return its id once it is durable, or the id of a pinned answer that
        stays. With `pin`, it replaces a pinned answer, too, and is pinned. Return None, and log a
        warning, if it cannot be stored. A cancelled caller does not cancel the write."""
        texts = (example.query.text, example.answer, example.rationale or "")
        if sum(map(len, texts)) > self._max_characters:
            self._warn("too long", f"it has more than {self._max_characters} characters")
            return None
        example = await self._tagged(example)
        if not pin:
            return await self._writer.write(example)
        (stored,) = await asyncio.to_thread(self._replace, [example], pin=True)
        return stored

    async def _store_valid(self, query: Query, answer: Answer, source: str) -> None:
        if (example := _valid_example(query, answer, source)) is not None:
            await self.store(example)

    async def _tagged(self, example: Example) -> Example:
        if self._tag is None:
            return example
        try:
            [tagged] = await self._tag([example])
        except Exception as error:  # of the user's function: a paid answer must not be lost
            self._warn_without("tags", type(error).__name__)
            return example
        return tagged

    def _warn_without(self, part: str, reason: str) -> None:
        if part not in self._warned:
            self._warned.add(part)
            log.warning("an answer is stored without %s: %s", part, reason)

    def _warn_error(self, error: BottegaError) -> None:
        self._warn(type(error).__name__, type(error).__name__)

    def _warn(self, kind: str, reason: str) -> None:
        """Log once per kind and without the error text: a client may repeat such requests all day,
        and the text may quote the question."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("an answer is not stored: %s", reason)
