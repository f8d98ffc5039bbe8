"""What was found for a query, as the prefix that the base model reads."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from bottega.compression.hyper_model import HyperModel
from bottega.compression.inputs import InputBuilder
from bottega.compression.model import QueryPrompts, RaccModel
from bottega.compression.store import PassageStore
from bottega.errors import SettingError
from bottega.kv_prefix import KeyValues
from bottega.protocols import Generator, Parser, PrefixGenerator, Prompter
from bottega.types import Candidate, Example, Prefix, Query, Sampling, SearchResult

LOWEST = -1e30  # finite in single precision after any temperature
CACHED_IMAGES = 1000  # with the paper's 12 prompts of 2048 numbers 100 MB


class PassageCompressor:
    """A trained compressor with its frozen hyper model; blocking. Examples with an answer are
    compressed with it.

    What it made of an image is kept for the next question about it, for the last `cached_images`.

    Passages are compressed when they are asked for, unless `store` holds them: then one that is
    missing, or has changed since, raises `StoreError`.
    """

    def __init__(
        self,
        racc: RaccModel,
        hyper: HyperModel,
        texts: InputBuilder,
        store: PassageStore | None = None,
        *,
        cached_images: int = CACHED_IMAGES,
    ) -> None:
        self._racc, self._hyper, self._texts, self._store = racc.eval(), hyper, texts, store
        racc.to(hyper.device)
        self._images: OrderedDict[tuple[str, ...], Tensor] = OrderedDict()
        self._known_images = cached_images
        self._lock = threading.Lock()

    def prefix(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        """Raises `SettingError` for scores that are not finite."""
        with torch.inference_mode():
            documents = self._documents(shown)[None]
            asked = self._asked(query)
            scores = torch.tensor([compared([one.score for one in shown])])
            return to_prefix(self._racc(documents, asked, scores))

    def compress(self, passages: Sequence[Example]) -> Tensor:
        """(passages, prompts, width). Some may have pictures."""
        return self._racc.compress(self._hyper, self._texts, passages)

    def _asked(self, query: Query) -> QueryPrompts:
        if not query.images:
            question = self._racc.queries(self._hyper, self._texts.texts_only([query]))
            return QueryPrompts(question, question, question)
        question, both = self._racc.queries(
            self._hyper, self._texts.text_and_question(query)
        ).split(1)
        return QueryPrompts(self._image(query), question, both)

    def _image(self, query: Query) -> Tensor:
        shown = tuple(image.sha256 for image in query.images)
        with self._lock:
            if shown in self._images:
                self._images.move_to_end(shown)
                return self._images[shown]
        made: Tensor = self._racc.queries(self._hyper, self._texts.images([query]))
        with self._lock:
            self._images[shown] = made
            while len(self._images) > self._known_images:
                self._images.popitem(last=False)
        return made

    def _documents(self, shown: Sequence[Candidate]) -> Tensor:
        passages = [one.example for one in shown]
        if self._store is None:
            return self.compress(passages)
        ids = [str(one.id or one.query.id) for one in passages]
        return self._store.get(list(zip(ids, passages, strict=True))).to(self._hyper.device)


def compared(scores: Sequence[float]) -> list[float]:
    """Below the greatest, which is all that is read of them (log_softmax): so those far from zero
    still differ in single precision."""
    if not all(map(math.isfinite, scores)):
        raise SettingError(
            "a candidate's score is not a finite number",
            hint="compression goes by the scores: the retriever has to give each candidate one",
        )
    most = max(scores)
    return [max(score - most, LOWEST) for score in scores]


def to_prefix(prefix: KeyValues) -> Prefix:
    """Of one query."""
    return Prefix(
        tuple(
            (keys[0].float().cpu().numpy(), values[0].float().cpu().numpy())
            for keys, values in prefix.layers
        )
    )


PrefixFunction = Callable[[Query, Sequence[Candidate]], Awaitable[Prefix]]


class PrefixSearcher:
    """Shows the model no passage: what is found stands before its prompt as keys and values.

    A `Searcher`, to be a pipeline's `search`. Without candidates the model is asked as it is.
    """

    def __init__(
        self,
        condense: PrefixFunction,
        base: PrefixGenerator,
        *,
        prompt: Prompter,
        parse: Parser,
        sampling: Sampling | None = None,
    ) -> None:
        self._condense, self._base = condense, base
        self._prompt, self._parse = prompt, parse
        self._sampling = sampling or Sampling()

    async def search(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> SearchResult:
        if k < 1:
            raise SettingError(f"cannot choose {k} candidates", hint="use k >= 1")
        shown = tuple(candidates[:k])
        generator: Generator = self._base
        if shown:
            generator = self._base.behind(await self._condense(query, shown))
        prompt = self._prompt(query, ())
        reply = await generator.generate(prompt, self._sampling)
        return SearchResult(shown, prompt, reply, self._parse(query, reply.completions[0]))
