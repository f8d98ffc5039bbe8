"""Generators without a model: scripted replies, and a record of replies on disk."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import orjson

from bottega._util.caching import SingleFlight
from bottega._util.durable_files import os_errors
from bottega._util.identity import request_key
from bottega._util.tracing import traced_reply
from bottega.errors import GenerationError, ReplayMissError, SettingError, StoreError
from bottega.protocols import Generator
from bottega.types import Completion, Prompt, Reply, Sampling, Usage

FIRST_BYTES = b'{"key":'


@dataclass(frozen=True)
class Call:
    """One call of `ScriptedGenerator.generate`."""

    prompt: Prompt
    sampling: Sampling


class ScriptedGenerator:
    """Test double that replies from a function of the prompt, or from a sequence.

    A sequence has one item per sample. An exception in it is raised; after its end
    `GenerationError` is raised. `calls` holds all calls. Each word and each image counts as one
    token. `latency` is in seconds.
    """

    def __init__(
        self,
        replies: Callable[[Prompt], str] | Sequence[str | Exception],
        *,
        name: str = "scripted",
        latency: float = 0.0,
    ) -> None:
        self.name = name
        self.calls: list[Call] = []
        self._latency = latency
        self._function = replies if callable(replies) else None
        self._rest: Iterator[str | Exception] = iter(() if callable(replies) else replies)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        self.calls.append(Call(prompt, sampling))
        return await traced_reply(self.name, prompt, sampling, self._reply(prompt, sampling))

    async def _reply(self, prompt: Prompt, sampling: Sampling) -> Reply:
        texts = [self._next(prompt) for _ in range(sampling.n)]
        if self._latency:
            await asyncio.sleep(self._latency)
        words = sum(len(part.split()) if isinstance(part, str) else 1 for part in prompt.parts)
        usage = Usage(words, sum(len(text.split()) for text in texts))
        return Reply(self.name, tuple(map(Completion, texts)), usage, self._latency)

    async def aclose(self) -> None:
        pass

    def _next(self, prompt: Prompt) -> str:
        if self._function is not None:
            return self._function(prompt)
        item = next(self._rest, None)
        if item is None:
            raise GenerationError(
                f"the script of {self.name!r} ended after {len(self.calls) - 1} calls",
                hint="pass more replies, or a function",
            )
        if isinstance(item, Exception):
            raise item
        return item


class ReplayGenerator:
    """Generator that replies from the record at `path` and calls `inner` for missing replies.

    With `inner=None` a missing reply raises `ReplayMissError`: tests and published runs are then
    free and exact. The record defines the model; `model` selects one of several. Concurrent equal
    requests make one call. Failures are never recorded.

    The file is append-only JSON lines with one `write` per reply. Several processes may share it; a
    line cut short by a crash is ignored. The first of several lines with one key counts. A model's
    `fingerprint`, if any, replaces its name in the key.
    """

    def __init__(
        self, path: str | Path, inner: Generator | None = None, *, model: str | None = None
    ) -> None:
        self._path = Path(path)
        self._inner = inner
        self._replies: dict[str, Reply] = {}
        self._flights: SingleFlight[str, Reply] = SingleFlight()
        self._lock = threading.Lock()
        self._torn = False
        fingerprints = self._load()
        own = str(getattr(inner, "fingerprint", inner.name)) if inner else None
        self._fingerprint = self._choose(fingerprints, model) if own is None else own
        self.name = inner.name if inner else fingerprints[self._fingerprint]
        self.turns_only = bool(getattr(inner, "turns_only", False))

    def __len__(self) -> int:
        return len(self._replies)

    def replies(self) -> list[Reply]:
        """Return all recorded replies, also those to other prompts than this run's."""
        return list(self._replies.values())

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        key = request_key(self._fingerprint, prompt, sampling)
        if (recorded := self._replies.get(key)) is not None:
            return recorded
        if self._inner is None:
            raise ReplayMissError(
                f"{self._path.name} contains no reply of {self.name!r} to this request",
                hint="record it: run once with the model as the inner generator",
            )
        work = partial(self._call, key, self._inner, prompt, sampling)
        return await self._flights.run(key, work)

    async def aclose(self) -> None:
        if self._inner is not None:
            await self._inner.aclose()

    async def _call(self, key: str, inner: Generator, prompt: Prompt, sampling: Sampling) -> Reply:
        reply = await inner.generate(prompt, sampling)
        row = {"key": key, "fingerprint": self._fingerprint, "reply": asdict(reply)}
        await asyncio.to_thread(self._append, orjson.dumps(row) + b"\n")
        self._replies[key] = reply
        return reply

    def _append(self, line: bytes) -> None:
        with os_errors(self._path):
            with self._lock, self._path.open("ab", buffering=0) as file:
                data = (b"\n" if self._torn else b"") + line
                self._torn = file.write(data) < len(data)
            if self._torn:  # a full disk takes a part of the line without an error
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _load(self) -> dict[str, str]:
        """Load the replies; return the model name of each fingerprint."""
        with os_errors(self._path):
            content = self._path.read_bytes() if self._path.exists() else b""
        names: dict[str, str] = {}
        for key, fingerprint, reply in _rows(content):
            self._replies.setdefault(key, reply)
            names[fingerprint] = reply.model
        # A full disk may leave nothing but the begin of the first line.
        if content.strip() and not names and not content.startswith(FIRST_BYTES):
            raise StoreError(f"{self._path} is not a record of replies", hint="check the path")
        self._torn = bool(content) and not content.endswith(b"\n")
        return names

    def _choose(self, fingerprints: dict[str, str], model: str | None) -> str:
        matching = [key for key, name in fingerprints.items() if model in (None, name, key)]
        if len(matching) == 1:
            return matching[0]
        models = ", ".join(sorted(fingerprints)) or "no model"
        raise SettingError(
            f"{self._path} must contain one matching model, got {models}",
            hint="pass model=, or an inner generator to record with",
        )


def _rows(content: bytes) -> Iterator[tuple[str, str, Reply]]:
    for line in content.splitlines():
        try:
            row = orjson.loads(line)
            reply = row["reply"]
            completions = tuple(Completion(**one) for one in reply["completions"])
            usage, seconds = Usage(**reply["usage"]), float(str(reply["seconds"]))
            if not all(isinstance(one.text, str) for one in completions):
                continue
            yield row["key"], row["fingerprint"], Reply(reply["model"], completions, usage, seconds)
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a crash or a full disk: the reply is requested again
