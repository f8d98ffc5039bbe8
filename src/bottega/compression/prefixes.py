"""KV prefixes of retrieved passages: RACC's compressor, one token per passage, full KV reuse."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bottega._util.caching import LRUCache
from bottega._util.identity import image_hashes
from bottega.compression.hyper_model import (
    HyperModel,
    InputBuilder,
    ProcessorInputs,
    PromptEncoder,
    inserted,
    rows,
    with_tokens,
)
from bottega.compression.model import QueryPrompts, RaccModel
from bottega.compression.passage_store import PassageStore
from bottega.errors import SettingError, check_scores
from bottega.kv_prefix import (
    KEEP_NO_LOGITS,
    KeyValues,
    ModelInputs,
    decoder_config,
    fresh_rope_offsets,
)
from bottega.protocols import Generator, Parser, PrefixGenerator, Prompter
from bottega.types import Candidate, Compression, Example, Prefix, Query, Sampling, SearchResult

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
        self._images: LRUCache[tuple[str, ...], Tensor] = LRUCache(cached_images)

    def prefix(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        """Return the prefix of the candidates. Raises `SettingError` for scores that are not
        finite."""
        with torch.inference_mode():
            documents = self._documents(shown)[None]
            prompts = self._query_prompts(query)
            relative = relative_scores([one.score for one in shown])
            scores = torch.tensor([relative], dtype=torch.float32)
            return to_prefix(self._racc(documents, prompts, scores))

    def stored(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that the store holds with their current content; all without a
        store."""
        if self._store is None:
            return list(candidates)
        missing = self._store.missing([_named(one.example) for one in candidates])
        return [one for one in candidates if one.example not in missing]

    def compress(self, passages: Sequence[Example]) -> Tensor:
        """Return prompts (passages, prompts, width). Passages may have images."""
        return self._racc.compress(self._hyper, self._inputs, passages)

    def _query_prompts(self, query: Query) -> QueryPrompts:
        if not query.images:
            question = self._racc.queries(self._hyper, self._inputs.texts_only([query]))
            return QueryPrompts(question, question, question)
        key = image_hashes(query)
        image = self._images.get(key)
        unread = [self._inputs.images([query])] if image is None else []
        if self._hyper.supports_packing:
            texts = [self._inputs.texts_only([query]), self._inputs.questions([query]), *unread]
            question, both, *read = self._racc.queries.compress_packed(self._hyper, texts)
        else:
            rows = self._racc.queries(self._hyper, self._inputs.text_and_question(query))
            question, both = rows.split(1)
            read = [self._racc.queries(self._hyper, one) for one in unread]
        if image is None:
            [image] = read
            self._images.put(key, image)
        return QueryPrompts(image, question, both)

    def _documents(self, shown: Sequence[Candidate]) -> Tensor:
        passages = [one.example for one in shown]
        if self._store is None:
            return self.compress(passages)
        return self._store.get([_named(one) for one in passages]).to(self._hyper.device)


def _named(passage: Example) -> tuple[str, Example]:
    """Return a passage with its id in a store."""
    return str(passage.id or passage.query.id), passage


def relative_scores(scores: Sequence[float]) -> list[float]:
    """Return the scores minus their maximum. Only differences matter (log_softmax); this way large
    scores still differ in single precision."""
    check_scores(scores)
    highest = max(scores)
    return [max(score - highest, LOWEST) for score in scores]


def to_prefix(prefix: KeyValues) -> Prefix:
    """Return the prefix of a batch of one query, as numpy arrays."""
    # In fp32: numpy has no bfloat16.
    return Prefix(
        tuple(
            (keys[0].float().cpu().numpy(), values[0].float().cpu().numpy())
            for keys, values in prefix.layers
        )
    )


PrefixFunction = Callable[[Query, Sequence[Candidate]], Awaitable[Prefix]]


class PrefixSearcher:
    """Searcher that gives the model its candidates as a KV prefix instead of as text. Use it as the
    `search` of a pipeline. Without candidates the model answers without a prefix. `describe`
    returns the compression for the trace."""

    def __init__(
        self,
        make_prefix: PrefixFunction,
        base: PrefixGenerator,
        *,
        prompt: Prompter,
        parse: Parser,
        sampling: Sampling | None = None,
        describe: Callable[[Prefix], Compression] | None = None,
    ) -> None:
        self._make_prefix, self._base, self._describe = make_prefix, base, describe
        self._prompt, self._parse = prompt, parse
        self._sampling = sampling or Sampling()

    async def search(
        self, query: Query, candidates: Sequence[Candidate], k: int, /
    ) -> SearchResult:
        if k < 1:
            raise SettingError(f"k must be at least 1, got {k}", hint="set k to 1 or more")
        shown = tuple(candidates[:k])
        generator: Generator = self._base
        compression = None
        if shown:
            prefix = await self._make_prefix(query, shown)
            generator = self._base.with_prefix(prefix)
            compression = self._describe(prefix) if self._describe else None
        prompt = self._prompt(query, ())
        reply = await generator.generate(prompt, self._sampling)
        answer = self._parse(query, reply.completions[0])
        return SearchResult(shown, prompt, reply, answer, compression=compression)


class OneTokenCompressor(nn.Module):
    """Compressor with the architecture of xRAG (Cheng et al. 2024): one token per passage.

    A passage is stored as one vector. A bridge of two layers, the only trained part, maps it to the
    embedding of one token before the question. The vector is the mean hidden state of the passage's
    tokens in the frozen `HyperModel`; xRAG uses the retriever's vector and pre-trains the bridge to
    reconstruct passages. A `PassageStore` with one prompt per passage holds the vectors. Works for
    decoder-only models.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bridge = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    def passage_vectors(self, hyper: HyperModel, inputs: ProcessorInputs) -> Tensor:
        """Return the mean hidden states of the passages, of shape (passages, 1, width)."""
        with torch.no_grad():
            states = hyper.read(inputs)
        weights = states.mask[..., None].to(states.hidden)  # 0 for padding
        return (states.hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)

    @torch.no_grad()
    def calibrate(self, vectors: Tensor, least: float = 0.02) -> None:
        """Set centre and spread from typical vectors (passages, 1, width). Dimensions of hidden
        states differ by orders of magnitude."""
        self.centre.copy_(vectors.mean((0, 1)))
        self.spread.copy_(vectors.flatten(0, 1).std(0).clamp(min=least))

    def embed(self, vectors: Tensor) -> Tensor:
        """Return token embeddings for `vectors`; both have shape (batch, passages, width)."""
        embedded: Tensor = self.bridge((vectors - self.centre) / self.spread)
        return embedded

    def forward(self, model: Any, vectors: Tensor) -> KeyValues:
        """Return the frozen model's keys and values of these tokens. Gradients pass through the
        model to the bridge."""
        decoder = model.get_decoder().get_decoder()
        embedded = self.embed(vectors).to(model.dtype)
        cache = decoder(inputs_embeds=embedded, use_cache=True).past_key_values
        return KeyValues(tuple((layer.keys, layer.values) for layer in cache.layers))


# Tokens before the passages, tokens of the passage, hashes of its images, its position.
CacheKey = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], int]


class KVReuse:
    """Full reuse of keys and values (Prompt Cache, Gim et al. 2024; TurboRAG, Lu et al. 2024).

    The model reads each passage separately, after the tokens that open every prompt and at its
    final position. The joined keys and values precede the question. No passage attends to another;
    for a single passage the prefix equals the model's own. Nothing is trained. Calls block; use one
    thread.

    Keys are rotated by position, so a cached passage is reused at the same position only. The cache
    holds the last `keep_mb` megabytes.

    `encode` and `ends` come from an `InputBuilder`; `prompt` must be the prompter that the pipeline
    uses. Raises `SettingError` for a model with an encoder, and for a `prompt` that renders a
    passage differently at different positions.
    """

    def __init__(
        self,
        model: Any,
        encode: PromptEncoder,
        ends: frozenset[int],
        prompt: Prompter,
        *,
        keep_mb: int = 256,
    ) -> None:
        if decoder_config(model).is_encoder_decoder:
            raise SettingError(
                f"KV reuse needs a decoder-only model, got {type(model).__name__}",
                hint="use a decoder-only model, or compress passages with RACC",
            )
        self._model, self._encode, self._prompt = model, encode, prompt
        self._ends = ends
        self._cache: LRUCache[CacheKey, Tensor] = LRUCache(
            keep_mb * 1024 * 1024, lambda states: states.nbytes
        )

    def prefix(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        """Return the prefix of at least one passage."""
        # Spans of passages must not depend on the query: they are cached for all queries.
        bare = replace(query, text="?", images=())
        encoded = [self._encode([self._prompt(bare, (one,))]) for one in shown]
        without = rows(self._encode([self._prompt(bare, ())]))[0]
        ids = [rows(inputs)[0] for inputs in encoded]
        start = inserted(ids[0], without, self._ends).start
        spans = [row[start : start + len(row) - len(without)] for row in ids]
        opening, position, parts = self._opening(query, shown, start, spans), start, []
        for one, inputs, span in zip(shown, encoded, spans, strict=True):
            images = image_hashes(one.example.query)
            parts.append(self._states((opening, tuple(span), images, position), inputs))
            position += len(span)
        joined = torch.cat(parts, dim=3).float().cpu().numpy()
        return Prefix(tuple((keys, values) for keys, values in joined), start)

    def _opening(
        self, query: Query, shown: Sequence[Candidate], start: int, spans: Sequence[list[int]]
    ) -> tuple[int, ...]:
        """Return the tokens before the passages, which also open the prompt without passages."""
        alone, full = (
            rows(self._encode([self._prompt(query, some)]))[0] for some in ((), tuple(shown))
        )
        if full != [*alone[:start], *itertools.chain(*spans), *alone[start:]]:
            raise SettingError(
                "the prompt does not render each passage identically, in sequence, before the"
                " question",
                hint="use a prompt of turns, such as InterleavedPrompter (--prompt interleaved)",
            )
        return tuple(alone[:start])

    def _states(self, key: CacheKey, inputs: ProcessorInputs) -> Tensor:
        """Return cached or new keys and values: (layers, 2, kv_heads, length, head_dim). Those of
        the first passage include the opening."""
        if (cached := self._cache.get(key)) is not None:
            return cached
        opening, span, _, position = key
        read = self._read(with_tokens(inputs, [[*opening, *span]]), len(opening), position)
        # The clone frees the memory of the opening; a view would keep it.
        states = read if position == len(opening) else read[..., len(opening) :, :].clone()
        self._cache.put(key, states)
        return states

    def _read(self, inputs: ProcessorInputs, opening: int, position: int) -> Tensor:
        """Run the model with the tokens after the first `opening` moved to `position`."""
        batch = ModelInputs(self._model, inputs)
        arguments = batch.inputs_after(0)
        positions = arguments["position_ids"].clone()
        # RoPE rotates keys by position: the passage gets its final positions in the prompt.
        positions[..., opening:] += position - opening
        with torch.inference_mode(), fresh_rope_offsets(self._model):
            cache = batch.output(
                **{**arguments, "position_ids": positions},
                use_cache=True,
                logits_to_keep=KEEP_NO_LOGITS,
            ).past_key_values
            pairs = [torch.stack([one.keys[0], one.values[0]]) for one in cache.layers]
            return torch.stack(pairs)
