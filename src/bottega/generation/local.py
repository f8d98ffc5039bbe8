"""Vision-language models in this process, through transformers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bottega._util.loading import LOADING
from bottega.errors import BottegaError, MissingDependencyError, SettingError
from bottega.image import Image
from bottega.types import Prefix, Prompt, Reply, Sampling

if TYPE_CHECKING:
    from bottega.generation.loaded import LoadedModel
    from bottega.generation.tokenization import RenderedPrompt

Work = TypeVar("Work")
Done = TypeVar("Done")
# Seconds to wait for more requests: those of one task group arrive well within.
BATCH_WINDOW = 0.002
MAX_WINDOWS = 10
# Maximum pixels decoded for one batch: 128 MB as RGB.
BATCH_PIXELS = 32_000_000


@dataclass(frozen=True, eq=False)
class Request:
    prompt: Prompt
    sampling: Sampling
    prefix: Prefix | None = None
    start: float = field(default_factory=time.perf_counter)
    reply: Future[Reply] = field(default_factory=Future)


class TransformersGenerator:
    """Any `AutoModelForImageTextToText`, by hub id or by path.

    Requests that wait together are answered together, at most `max_batch` prompts at a time, by
    one thread; they may come from any number of event loops. The model is loaded at the first
    request or by `load()`. `dtype` "auto" is the model's own, but float32 on a CPU. `threads`
    sets torch's number of CPU threads, which is the whole process's. `turns_only` tells
    recipes that the model reads demonstrations as turns and no long instructions. A seeded sample
    depends on its own prompt and seed, not on the batch it lands in. Prompts that begin alike are
    read once: what was read is kept, in the model's memory, up to `prefix_cache_mb` megabytes
    between batches; what a batch itself reads comes on top until it is answered. 0 reads every
    prompt whole. Control tokens that a text spells out reach the model as plain characters.
    Raises `ModelLoadError`, `GenerationError`, `ImageError` for a damaged image.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        name: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        max_batch: int = 16,
        threads: int | None = None,
        turns_only: bool = False,
        prefix_cache_mb: int = 256,
    ) -> None:
        if max_batch < 1:
            raise SettingError(f"max_batch is {max_batch}", hint="use 1 or more")
        if prefix_cache_mb < 0:
            raise SettingError(
                f"prefix_cache_mb is {prefix_cache_mb}", hint="0 keeps nothing, 256 is usual"
            )
        path = Path(model).expanduser()
        self._source = str(path) if path.exists() else str(model)
        self.name = name or "local:" + (path.resolve().name if path.exists() else str(model))
        self.turns_only = turns_only
        self._device, self._dtype, self._keep = device, dtype, prefix_cache_mb * 1024 * 1024
        self._max_batch, self._threads = max_batch, threads
        self._loaded: LoadedModel | None = None
        self._waiting: list[Request] = []
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._ended: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"TransformersGenerator({self.name!r})"

    async def load(self) -> None:
        await asyncio.wrap_future(self._submit(self._model))

    @property
    def loaded(self) -> LoadedModel:
        """The model itself. Raises `SettingError` before `load()`."""
        if self._loaded is None:
            raise SettingError(f"{self.name} is not loaded", hint="await its load() first")
        return self._loaded

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        return await self._ask(Request(prompt, sampling))

    def with_prefix(self, prefix: Prefix, /) -> PrefixedGenerator:
        """The model with every prompt behind keys and values that it did not read itself."""
        return PrefixedGenerator(self, prefix)

    async def run(self, work: Callable[[LoadedModel], Done]) -> Done:
        """Anything else that is done with the model, in its thread, between two batches."""
        return await asyncio.wrap_future(self._submit(lambda: work(self._model())))

    async def _ask(self, request: Request) -> Reply:
        with self._lock:
            self._waiting.append(request)
        self._submit(self._answer_next_batch)
        return await asyncio.wrap_future(request.reply)

    async def aclose(self) -> None:
        """Ends the thread and lets go of the model; the next request would load it again."""
        with self._lock:
            if self._worker is not None:
                self._worker.submit(self._unload)
                self._ended, self._worker = self._worker, None
            ended = self._ended
        if ended is not None:
            await asyncio.to_thread(ended.shutdown)

    def _submit(self, work: Callable[[], Done]) -> Future[Done]:
        with self._lock:
            if self._worker is None:
                # One thread at a time may use a model: the next waits for the end of the last.
                wait = self._ended.shutdown if self._ended else None
                self._worker = ThreadPoolExecutor(1, self.name, initializer=wait)
            return self._worker.submit(work)

    def _unload(self) -> None:
        self._loaded = None

    def _model(self) -> LoadedModel:
        if self._loaded is None:
            with LOADING:  # transformers cannot even be imported twice at once
                try:
                    import torch

                    from bottega.generation.loaded import LoadedModel
                except ModuleNotFoundError as error:
                    raise MissingDependencyError(error.name or "torch", "local") from error
                if self._threads is not None:
                    torch.set_num_threads(self._threads)
                self._loaded = LoadedModel.load(self._source, self._device, self._dtype, self._keep)
        return self._loaded

    def _answer_next_batch(self) -> None:
        """Runs once for each request; all but the first of a group find nothing left to do."""
        requests = [one for one in self._gather() if one.reply.set_running_or_notify_cancel()]
        if not requests:
            return
        try:
            model = self._model()
            asked = ((one, one) for one in requests)
            rendered = _each(asked, lambda one: model.render(one.prompt, one.sampling, one.prefix))
            for batch in self._batches(rendered):
                self._answer(model, batch)
        except BaseException as error:
            _fail([one for one in requests if not one.reply.done()], error)

    def _gather(self) -> list[Request]:
        seen = 0
        for _ in range(MAX_WINDOWS):
            if seen == (seen := len(self._waiting)):
                break
            time.sleep(BATCH_WINDOW)
        with self._lock:
            found, self._waiting = self._portion(self._waiting)
        return found

    def _portion(self, waiting: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Split the waiting requests into a batch and the rest. The batch is the oldest request
        with as many others as `BATCH_PIXELS` allows, smallest images first. Each request triggers
        one call, so later calls take the rest."""
        room = BATCH_PIXELS - sum(map(self._pixels, waiting[:1]))
        chosen = set(waiting[:1])
        for request in sorted(waiting[1:], key=self._pixels):
            room -= self._pixels(request)
            if room < 0:
                break
            chosen.add(request)
        rest = [request for request in waiting if request not in chosen]
        return [request for request in waiting if request in chosen], rest

    def _pixels(self, request: Request) -> int:
        """Return the pixels of the request's images that have to be decoded."""
        parts = [part for message in request.prompt.messages for part in message.parts]
        images = {part.sha256: part for part in parts if isinstance(part, Image)}
        vision_cache = self._loaded.vision_cache if self._loaded else None
        fresh = (
            one
            for sha, one in images.items()
            if vision_cache is None or not vision_cache.contains(sha)
        )
        return sum(image.width * image.height for image in fresh)

    def _batches(
        self, rendered: Iterator[tuple[Request, RenderedPrompt]]
    ) -> Iterator[list[tuple[Request, RenderedPrompt]]]:
        ordered = sorted(rendered, key=lambda pair: pair[1].shape)
        for (_, samples, _), group in groupby(ordered, key=lambda pair: pair[1].shape[:3]):
            members, size = list(group), max(1, self._max_batch // samples)
            for start in range(0, len(members), size):
                yield members[start : start + size]

    def _answer(self, model: LoadedModel, batch: Sequence[tuple[Request, RenderedPrompt]]) -> None:
        ready = list(_each(batch, model.decode))
        try:
            answers = model.answer([rendered for _, rendered in ready]) if ready else []
        except BottegaError as error:
            if len(ready) == 1:
                _fail([ready[0][0]], error)
            else:  # one prompt may be the culprit: the others get their answers
                for pair in ready:
                    self._answer(model, [pair])
            return
        for (request, _), (completions, usage) in zip(ready, answers, strict=True):
            seconds = time.perf_counter() - request.start
            request.reply.set_result(Reply(self.name, completions, usage, seconds))


@dataclass(frozen=True)
class PrefixedGenerator:
    """A model whose prompts stand behind a prefix; what it asks shares batches with the others."""

    model: TransformersGenerator
    prefix: Prefix

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def turns_only(self) -> bool:
        return self.model.turns_only

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        return await self.model._ask(Request(prompt, sampling, self.prefix))

    async def aclose(self) -> None:
        """The model stays: it is not this one's."""


def _each(
    pairs: Iterable[tuple[Request, Work]], step: Callable[[Work], Done]
) -> Iterator[tuple[Request, Done]]:
    """A request whose step fails, for its template or a damaged image, fails alone."""
    for request, work in pairs:
        try:
            yield request, step(work)
        except BottegaError as error:
            _fail([request], error)


def _fail(requests: Sequence[Request], error: BaseException) -> None:
    for request in requests:
        request.reply.set_exception(error)
