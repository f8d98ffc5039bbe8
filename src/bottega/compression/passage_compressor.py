"""Compression of retrieved passages into the prefix that the base model reads."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from bottega._util.caching import SharedLRUCache
from bottega._util.identity import image_hashes
from bottega.compression.hyper_model import HyperModel, InputBuilder
from bottega.compression.model import QueryPrompts, RaccModel
from bottega.compression.store import PassageStore
from bottega.errors import SettingError
from bottega.kv_prefix import KeyValues
from bottega.protocols import Generator, Parser, PrefixGenerator, Prompter
from bottega.types import Candidate, Example, Prefix, Query, Sampling, SearchResult

LOWEST = -1e30  # finite in single precision after any temperature
CACHED_IMAGES = 1000  # 100 MB with the paper's 12 prompts of 2048 numbers


class PassageCompressor:
    """Trained compressor with its frozen hyper model; calls block. The answer of an example is
    compressed with its text. Prompts of the last `cached_images` images are cached for further
    questions about them. Passages are compressed on demand, or read from `store`. With a store, a
    passage that is missing or has changed raises `StoreError`."""

    def __init__(
        self,
        racc: RaccModel,
        hyper: HyperModel,
        inputs: InputBuilder,
        store: PassageStore | None = None,
        *,
        cached_images: int = CACHED_IMAGES,
    ) -> None:
        self._racc, self._hyper, self._inputs, self._store = racc.eval(), hyper, inputs, store
        racc.to(hyper.device)
        self._images: SharedLRUCache[tuple[str, ...], Tensor] = SharedLRUCache(cached_images)

    def prefix(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        """Return the prefix of the candidates. Raises `SettingError` for scores that are not
        finite."""
        with torch.inference_mode():
            documents = self._documents(shown)[None]
            prompts = self._query_prompts(query)
            scores = torch.tensor([relative_scores([one.score for one in shown])])
            return to_prefix(self._racc(documents, prompts, scores))

    def compress(self, passages: Sequence[Example]) -> Tensor:
        """Return prompts (passages, prompts, width). Passages may have images."""
        return self._racc.compress(self._hyper, self._inputs, passages)

    def _query_prompts(self, query: Query) -> QueryPrompts:
        if not query.images:
            question = self._racc.queries(self._hyper, self._inputs.texts_only([query]))
            return QueryPrompts(question, question, question)
        rows = self._racc.queries(self._hyper, self._inputs.text_and_question(query))
        question, both = rows.split(1)
        key = image_hashes(query)
        if (image := self._images.get(key)) is None:
            image = self._racc.queries(self._hyper, self._inputs.images([query]))
            self._images.put(key, image)
        return QueryPrompts(image, question, both)

    def _documents(self, shown: Sequence[Candidate]) -> Tensor:
        passages = [one.example for one in shown]
        if self._store is None:
            return self.compress(passages)
        named = [(str(one.id or one.query.id), one) for one in passages]
        return self._store.get(named).to(self._hyper.device)


def relative_scores(scores: Sequence[float]) -> list[float]:
    """Return the scores minus their maximum. Only differences matter (log_softmax); this way large
    scores still differ in single precision."""
    if not all(map(math.isfinite, scores)):
        raise SettingError(
            "a candidate's score is not a finite number",
            hint="use a retriever that gives each candidate a finite score",
        )
    most = max(scores)
    return [max(score - most, LOWEST) for score in scores]


def to_prefix(prefix: KeyValues) -> Prefix:
    """Return the prefix of a batch of one query, as numpy arrays."""
    return Prefix(
        tuple(
            (keys[0].float().cpu().numpy(), values[0].float().cpu().numpy())
            for keys, values in prefix.layers
        )
    )


PrefixFunction = Callable[[Query, Sequence[Candidate]], Awaitable[Prefix]]


class PrefixSearcher:
    """Searcher that gives the model its candidates as a KV prefix instead of as text. Use it as the
    `search` of a pipeline. Without candidates the model answers without a prefix."""

    def __init__(
        self,
        make_prefix: PrefixFunction,
        base: PrefixGenerator,
        *,
        prompt: Prompter,
        parse: Parser,
        sampling: Sampling | None = None,
    ) -> None:
        self._make_prefix, self._base = make_prefix, base
        self._prompt, self._parse = prompt, parse
        self._sampling = sampling or Sampling()

    async def search(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> SearchResult:
        if k < 1:
            raise SettingError(f"k must be at least 1, got {k}", hint="set k to 1 or more")
        shown = tuple(candidates[:k])
        generator: Generator = self._base
        if shown:
            generator = self._base.with_prefix(await self._make_prefix(query, shown))
        prompt = self._prompt(query, ())
        reply = await generator.generate(prompt, self._sampling)
        return SearchResult(shown, prompt, reply, self._parse(query, reply.completions[0]))
