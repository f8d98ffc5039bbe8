"""Recorders: use counters, new examples from a master's answers, and several as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Protocol

from bottega.errors import BottegaError
from bottega.protocols import Recorder
from bottega.types import Answer, Example, Query, Trace


class CompositeRecorder:
    """Each is told, one after the other, even if one before it failed; then the first failure is
    raised. Without recorders nothing happens."""

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
    def used(self, ids: Collection[str], saved_usd: float = 0.0) -> None: ...


class UseCountRecorder:
    """Tells a knowledge base which of its examples were shown. A cheaper tier's answer saved what
    the master's have cost on average until then, less its own cost; nothing as long as a price is
    not known."""

    def __init__(self, knowledge: UseCounter, *, master: str) -> None:
        self._knowledge = knowledge
        self._master = master
        self._spent = 0.0
        self._priced = 0

    async def __call__(self, trace: Trace, /) -> None:
        if trace.tier == self._master:
            if trace.cost_usd is not None:
                self._spent, self._priced = self._spent + trace.cost_usd, self._priced + 1
            saved = 0.0
        else:
            saved = self._saved(trace.cost_usd)
        shown = [c.example.id for c in trace.candidates if c.example.id is not None]
        if shown:
            await asyncio.to_thread(self._knowledge.used, shown, saved)

    def _saved(self, cost: float | None) -> float:
        if cost is None or not self._priced:
            return 0.0
        return max(0.0, self._spent / self._priced - cost)


log = logging.getLogger(__name__)

AT_ONCE = 64
Waiting = list[tuple[Example, Future[str | None]]]


class ExampleStore(Protocol):
    """A `KnowledgeBase`, as far as it is needed here."""

    def replace(
        self, examples: Sequence[Example], *, on_error: Callable[[BottegaError], None]
    ) -> list[str | None]: ...


class CacheRecorder:
    """Keeps the answers of the tiers that are `teachers`, and of nobody else: a `Recorder`.

    An answer that is invalid or was cut short is not kept, nor is an example whose texts have more
    than `longest` characters. The same question (images, text, choices and the tag
    `context`) is kept once: a newer answer replaces the older one, unless that is pinned. `source`
    says which tier and model answered. Answers that arrive together share one commit.
    Raises `StoreError`.
    """

    def __init__(
        self, knowledge: ExampleStore, *, teachers: Collection[str], longest: int = 32_000
    ) -> None:
        self._knowledge = knowledge
        self._teachers = frozenset(teachers)
        self._longest = longest
        self._waiting: Waiting = []
        self._lock = Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="remember")
        self._told: set[str] = set()

    async def __call__(self, trace: Trace, /) -> None:
        whole = all(one.finish_reason == "stop" for one in trace.reply.completions)
        if trace.tier in self._teachers and whole:
            await self._keep_valid(trace.query, trace.answer, f"{trace.tier}:{trace.reply.model}")

    async def learn(self, query: Query, answer: Answer, tier: str) -> None:
        """For a `Method` of the evaluation, which is told of answers without their traces."""
        if tier in self._teachers:
            await self._keep_valid(query, answer, tier)

    async def keep(self, example: Example) -> str | None:
        """Its id, once it is durable, or that of a pinned answer which stays; None if it cannot be
        stored, which is logged. It is stored even if the caller does not wait for it."""
        if _length(example) > self._longest:
            self._tell("too long", f"it has more than {self._longest} characters")
            return None
        done: Future[str | None] = Future()
        with self._lock:
            self._waiting.append((example, done))
        self._writer.submit(self._write)
        return await asyncio.wrap_future(done)

    async def _keep_valid(self, query: Query, answer: Answer, source: str) -> None:
        if not answer.valid:
            return
        alone = answer.labels in ((), (answer.text,))
        await self.keep(
            Example(
                replace(query, id=None),
                answer.text,
                labels=None if alone else answer.labels,
                rationale=answer.rationale,
                tags={"context": query.context} if query.context else {},
                source=source,
            )
        )

    def _write(self) -> None:
        """Runs once for each example; all but the first of a group find nothing left to do."""
        with self._lock:
            group, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
        if not group:
            return
        examples = [example for example, _ in group]
        waited_for = [done.set_running_or_notify_cancel() for _, done in group]
        try:
            ids = self._knowledge.replace(examples, on_error=self._tell_bad)
        except BaseException as error:
            for (_, done), waited in zip(group, waited_for, strict=True):
                if waited:
                    done.set_exception(error)
            return
        for (_, done), id, waited in zip(group, ids, waited_for, strict=True):
            if waited:
                done.set_result(id)

    def _tell_bad(self, error: BottegaError) -> None:
        self._tell(type(error).__name__, type(error).__name__)

    def _tell(self, kind: str, reason: str) -> None:
        """Once for each kind, without the error's words: whoever sends what cannot be stored may do
        so all day, and they may quote the question."""
        if kind not in self._told:
            self._told.add(kind)
            log.warning("an answer is not remembered: %s", reason)


def _length(example: Example) -> int:
    said = (example.query.text, example.answer, example.rationale or "")
    return sum(map(len, said))
