"""In-process vision-language models through transformers, and the bundled ones."""

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

from bottega._util.native import LOADING
from bottega._util.tracing import traced_reply
from bottega.errors import BottegaError, PromptTooLongError, SettingError, needs_extra
from bottega.types import Prefix, Prompt, Reply, Sampling

if TYPE_CHECKING:
    from bottega.generation.in_process import InProcessModel
    from bottega.generation.loaded import LoadedModel
    from bottega.generation.tokenization import RenderedPrompt


Work = TypeVar("Work")
Done = TypeVar("Done")
# Turns of the event loop that a request waits for more of them: those of one task group arrive in
# fewer turns, and an idle loop needs a tenth of a millisecond.
BATCH_TURNS = 8
# Maximum pixels decoded for one batch: 128 MB as RGB.
BATCH_PIXELS = 32_000_000


@dataclass(frozen=True, eq=False)
class Request:
    """Waiting request with the future of its reply."""

    prompt: Prompt
    sampling: Sampling
    prefix: Prefix | None = None
    start: float = field(default_factory=time.perf_counter)
    reply: Future[Reply] = field(default_factory=Future)


class TransformersGenerator:
    """Generator for any `AutoModelForImageTextToText`, by hub id or path.

    `name` replaces the id in traces and prices. `device` is one of torch, by default a GPU if there
    is one. One thread answers waiting requests in batches of up to `max_batch` prompts; requests
    may come from any number of event loops. The first request, or `load()`, loads the model. The
    dtype "auto" is the model's own, and float32 on a CPU. `threads` sets torch's number of CPU
    threads for the whole process. `turns_only` tells recipes that the model reads demonstrations as
    turns and no long instructions. A seeded sample depends on its prompt and seed only, not on its
    batch.

    A common prefix of several prompts is read once. Its states stay in the model's memory between
    batches, up to `prefix_cache_mb` megabytes; the states of the current batch come on top. With 0
    every prompt is read completely. A model with Python code of its own is loaded only with
    `trust_remote_code`, which runs that code. Control tokens in user text reach the model as plain
    characters. Raises `ModelLoadError`, `GenerationError`, and `ImageError` for a damaged image.
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
        trust_remote_code: bool = False,
    ) -> None:
        for option, value, least in (
            ("max_batch", max_batch, 1),
            ("prefix_cache_mb", prefix_cache_mb, 0),
        ):
            if value < least:
                raise SettingError(
                    f"{option} must be at least {least}, got {value}",
                    hint="leave it out for the default, max_batch=16 and prefix_cache_mb=256",
                )
        path = Path(model).expanduser()
        self._source = str(path) if path.exists() else str(model)
        self.name = name or "local:" + (path.resolve().name if path.exists() else str(model))
        self.turns_only = turns_only
        self._device, self._dtype, self._keep = device, dtype, prefix_cache_mb * 1024 * 1024
        self._trust_remote_code = trust_remote_code
        self._max_batch, self._threads = max_batch, threads
        self._loaded: InProcessModel | None = None
        self._waiting: list[Request] = []
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._ended: ThreadPoolExecutor | None = None

    def __repr__(self) -> str:
        return f"TransformersGenerator({self.name!r})"

    async def load(self) -> None:
        """Load the model now, instead of at the first request."""
        await asyncio.wrap_future(self._submit(self._model))

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model. Raises `SettingError` before `load()`.

        A bundled model answers without transformers. This is then a second copy of it, loaded with
        transformers at the first use: changed weights affect only replies with a KV prefix.
        """
        model = self._loaded  # read once: `aclose` sets it to None in another thread
        if model is None:
            raise SettingError(
                f"{self.name} is not loaded", hint="call await generator.load() first"
            )
        return model.transformers_model()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        return await self._ask(Request(prompt, sampling))

    def with_prefix(self, prefix: Prefix, /) -> PrefixedGenerator:
        """Return a generator that puts a KV prefix in front of every prompt."""
        return PrefixedGenerator(self, prefix)

    async def run(self, work: Callable[[LoadedModel], Done]) -> Done:
        """Run other work with the model, in its thread, between two batches. With a bundled model,
        `work` gets the second copy that `loaded` describes."""
        return await asyncio.wrap_future(
            self._submit(lambda: work(self._model().transformers_model()))
        )

    async def _ask(self, request: Request) -> Reply:
        return await traced_reply(self.name, request.prompt, request.sampling, self._reply(request))

    async def _reply(self, request: Request) -> Reply:
        with self._lock:
            self._waiting.append(request)
        try:
            for _ in range(BATCH_TURNS):
                await asyncio.sleep(0)
            if request in self._waiting:  # else it is in a batch that another request began
                self._submit(self._answer_next_batch)
            return await asyncio.wrap_future(request.reply)
        finally:
            request.reply.cancel()  # no effect on a finished request

    async def aclose(self) -> None:
        """Ends the thread and lets go of the model; the next request would load it again."""
        with self._lock:
            if self._worker is not None:
                self._worker.submit(setattr, self, "_loaded", None)
                self._ended, self._worker = self._worker, None
            ended = self._ended
        if ended is not None:
            await asyncio.to_thread(ended.shutdown)

    def _submit(self, work: Callable[[], Done]) -> Future[Done]:
        with self._lock:
            if self._worker is None:
                # Only one thread may use a model: the new one waits for the last to end.
                wait = self._ended.shutdown if self._ended else None
                self._worker = ThreadPoolExecutor(1, self.name, initializer=wait)
            return self._worker.submit(work)

    def _model(self) -> InProcessModel:
        if self._loaded is None:
            # One load at a time in the process: concurrent imports of transformers fail.
            with LOADING:
                with needs_extra("local"):
                    import torch
                if self._threads is not None:
                    torch.set_num_threads(self._threads)
                self._loaded = self._load()
        return self._loaded

    def _load(self) -> InProcessModel:
        with needs_extra("local"):
            from bottega.generation.loaded import LoadedModel
        return LoadedModel.load(
            self._source, self._device, self._dtype, self._keep, self._trust_remote_code
        )

    def _answer_next_batch(self) -> None:
        """Answer one batch. Called by each request that still waits; the call may find none."""
        with self._lock:
            found, self._waiting = self._portion(self._waiting)
        requests = [one for one in found if one.reply.set_running_or_notify_cancel()]
        if not requests:
            return
        try:
            model = self._model()
            pairs = ((one, one) for one in requests)
            rendered = _each(pairs, lambda one: model.render(one.prompt, one.sampling, one.prefix))
            for batch in self._batches(model, rendered):
                self._answer(model, batch)
        except BaseException as error:  # callers would wait forever for a future without a result
            _fail([one for one in requests if not one.reply.done()], error)

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
        images = {image.sha256: image for image in request.prompt.images}
        cache = self._loaded.vision_cache if self._loaded else None
        return sum(
            image.width * image.height
            for sha256, image in images.items()
            if cache is None or not cache.contains(sha256)
        )

    def _batches(
        self, model: InProcessModel, rendered: Iterator[tuple[Request, RenderedPrompt]]
    ) -> Iterator[list[tuple[Request, RenderedPrompt]]]:
        ordered = sorted(rendered, key=lambda pair: pair[1].shape)
        for _, group in groupby(ordered, key=lambda pair: model.batch_kind(pair[1])):
            batch: list[tuple[Request, RenderedPrompt]] = []
            rows = 0
            for pair in group:
                rows += pair[1].samples
                if batch and rows > self._max_batch:
                    yield batch
                    batch, rows = [], pair[1].samples
                batch.append(pair)
            yield batch

    def _answer(
        self, model: InProcessModel, batch: Sequence[tuple[Request, RenderedPrompt]]
    ) -> None:
        ready = list(_each(batch, model.decode))
        try:
            answers = model.answer([rendered for _, rendered in ready]) if ready else []
        except BottegaError as error:
            if len(ready) == 1:
                if isinstance(error, PromptTooLongError):
                    error = PromptTooLongError(f"{self.name}: {error}", hint=error.hint)
                _fail([ready[0][0]], error)
            else:  # one prompt may cause the error: answer the others one by one
                for pair in ready:
                    self._answer(model, [pair])
            return
        for (request, _), (completions, usage) in zip(ready, answers, strict=True):
            seconds = time.perf_counter() - request.start
            request.reply.set_result(Reply(self.name, completions, usage, seconds))


@dataclass(frozen=True)
class PrefixedGenerator:
    """Generator that puts a KV prefix in front of every prompt of `model`, and shares its
    batches."""

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
        """Do nothing: the model belongs to its own generator."""


def _each(
    pairs: Iterable[tuple[Request, Work]], step: Callable[[Work], Done]
) -> Iterator[tuple[Request, Done]]:
    """Apply a step to each request; an error (template, damaged image) fails that request only."""
    for request, work in pairs:
        try:
            yield request, step(work)
        except BottegaError as error:
            _fail([request], error)


def _fail(requests: Sequence[Request], error: BaseException) -> None:
    for request in requests:
        request.reply.set_exception(error)
