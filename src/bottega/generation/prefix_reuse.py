"""Reuse of keys and values: given KV prefixes, and prefixes shared by prompts.

Needs torch and transformers. Prompts that begin with the same tokens are read once, within a batch
and across batches. Wrong keys and values would silently give wrong answers, hence two safeguards:
only models whose caches consist of plain keys and values take part, and the first batch of each
kind is also read without the cache and compared. `LoadedModel` answers a batch that fails here
without the cache, and disables it if that succeeds.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from transformers.cache_utils import DynamicCache, DynamicLayer

from bottega.generation.kv_caches import IntArray, PrefixCache, VisionCache, common_prefix
from bottega.generation.tokenization import PromptTokenizer, RenderedPrompt, TokenizedPrompt
from bottega.kv_prefix import KeyValues, ModelInputs

log = logging.getLogger(__name__)
# Minimum number of tokens to save; below it, reading whole prompts is as fast.
MIN_SAVED_TOKENS = 16
COMPARED_TOKENS = 8
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 0.3
Inputs: TypeAlias = dict[str, Any]
# From the sha256s of images, in order, to the model's inputs for them.
VisionInputs: TypeAlias = Callable[[Sequence[str]], Inputs]
hf: Any = transformers  # partly annotated
DecodedImages: TypeAlias = Mapping[str, Pillow.Image]


class PositionBuilder:
    """Builder of position ids for left-padded rows. A token's position is that of the previous
    token plus one. In models with `get_rope_index` (Qwen-VL) an image token has three positions;
    the token after the image continues the largest."""

    def __init__(self, model: Any, image_token: int) -> None:
        self._index = getattr(model.base_model, "get_rope_index", None)
        self._image_token = image_token

    def build(
        self, ids: torch.Tensor, mask: torch.Tensor, first: torch.Tensor, vision: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the position ids for `forward`: (rows, tokens) or (4, rows, tokens). Rows begin at
        the positions `first` (rows, 1). `vision` holds the model inputs of images."""
        plain = first + (mask.cumsum(-1) - 1).clamp(min=0)
        if self._index is None:
            return plain
        if "image_grid_thw" not in vision:
            return plain.expand(4, -1, -1)
        spatial, _ = self._index(
            ids,
            mm_token_type_ids=(ids == self._image_token).int(),
            image_grid_thw=vision["image_grid_thw"],
            attention_mask=mask,
        )
        return torch.cat([plain[None], spatial + first])

    def after(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the next position after each token (rows, tokens); images must be complete."""
        if positions.ndim == 2:
            return positions + 1
        return positions[1:].amax(dim=0).cummax(dim=-1).values + 1


def prefixed_inputs(
    model: Any, inputs: Mapping[str, Any], rows: Sequence[RenderedPrompt]
) -> dict[str, Any]:
    """Return the inputs for `generate` with the KV prefixes of the rows. Raises `SettingError` for
    a prefix that does not fit the model."""
    prefixes = [row.prefix for row in rows if row.prefix]
    # Mask the first tokens of each prompt that its prefix already contains.
    mask = inputs["attention_mask"].clone()
    for row, start, given in zip(mask, mask.argmax(dim=1).tolist(), prefixes, strict=True):
        row[start : start + given.opening] = 0
    batch = ModelInputs(model, {**inputs, "attention_mask": mask})
    layers = zip(*(one.layers for one in prefixes), strict=True)
    prefix = KeyValues(tuple((_stack(layer, 0), _stack(layer, 1)) for layer in layers))
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None  # Qwen would reuse those of the last call
    cache = batch.cache(batch.fit(prefix))
    arguments = batch.with_dummies(prefix.length)
    arguments.pop("decoder_start_token_id", None)  # the generation settings name it
    return {**arguments, "past_key_values": cache}


def _stack(layer: Sequence[Sequence[Any]], part: int) -> torch.Tensor:
    return torch.stack([torch.from_numpy(states[part]) for states in layer])


class PrefixInputBuilder:
    """Builder of model inputs that continue cached prefixes."""

    def __init__(self, model: Any, pad: int, image_token: int, prefixes: PrefixCache) -> None:
        self._model, self._pad, self._prefixes = model, pad, prefixes
        self._positions = PositionBuilder(model, image_token)

    def starts(self, rows: Sequence[TokenizedPrompt]) -> list[int]:
        """Return the number of cached tokens of each row."""
        return [row.cut(self._prefixes.longest(row.keys)) for row in rows]

    def inputs(self, rows: Sequence[TokenizedPrompt], vision_inputs: VisionInputs) -> Inputs:
        """Return the model inputs for the uncached tokens of each row, with the cached states."""
        starts = self.starts(rows)
        pairs = list(zip(rows, starts, strict=True))
        cached, width = max(starts), max(len(row) - start for row, start in pairs)
        states = [self._prefixes.states(row.keys[:start]) for row, start in pairs]
        # Columns: cached states, padded on the left, then the unread tokens, padded on the left.
        mask = np.zeros((len(rows), cached + width), np.int64)
        ids = np.full_like(mask, self._pad)
        for i, (row, start) in enumerate(pairs):
            mask[i, cached - start : cached] = 1
            mask[i, cached + width - (len(row) - start) :] = 1
            ids[i, mask[i] == 1] = row.ids
        images = [sha for row, start in pairs for sha in row.images_from(start)]
        first = np.array([[after] for _, after in states], np.int64)
        vision = vision_inputs(images) if images else {}
        device = self._model.device
        tokens, visible, begin = (torch.from_numpy(one).to(device) for one in (ids, mask, first))
        return vision | {
            "input_ids": tokens,
            "attention_mask": visible,
            "position_ids": self._positions.build(
                tokens[:, cached:], visible[:, cached:], begin, vision
            ),
            "past_key_values": self._cache([tensors for tensors, _ in states], cached),
        }

    def remember(self, rows: Sequence[TokenizedPrompt], samples: int, inputs: Inputs) -> bool:
        """Store the states of each row, which occupies `samples` rows of the cache. Return False,
        and store nothing, if the layers have different shapes."""
        layers = inputs["past_key_values"].layers
        states = [part for layer in layers for part in (layer.keys, layer.values)]
        if len({(one.shape[1], one.shape[3]) for one in states}) > 1:
            return False
        capacity = self._prefixes.capacity(states[0][0, :, :1].nbytes * len(states))
        positions = inputs.get("position_ids")
        if positions is None:  # read without the cache, from the first token
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            positions = self._positions.build(ids, mask, torch.zeros_like(ids[:, :1]), inputs)
        after: IntArray = self._positions.after(positions).cpu().numpy()
        for i, row in enumerate(rows):
            start, end = self._prefixes.longest(row.keys), min(len(row), capacity)
            if start < end:  # rows are padded on the left
                unread = slice(inputs["input_ids"].shape[1] - len(row) + start, None)
                new = [one[i * samples, :, unread][:, : end - start] for one in states]
                follows = after[i * samples, start - len(row) :][: end - start]
                self._prefixes.add(row.keys[:end], torch.stack(new), follows)
        return True

    def _cache(self, states: Sequence[Sequence[torch.Tensor]], cached: int) -> DynamicCache:
        """Return a new cache, left-padded to `cached` tokens; the model appends to it."""
        cache = DynamicCache(config=self._model.config)
        if cached:
            first = next(parts[0] for parts in states if parts)
            layers, heads, _, width = first.shape
            whole = first.new_zeros(layers, len(states), heads, cached, width)
            for i, parts in enumerate(states):
                if parts:
                    joined = torch.cat(list(parts), dim=2)
                    whole[:, i, :, cached - joined.shape[2] :] = joined
            for layer in range(layers // 2):
                cache.update(whole[2 * layer], whole[2 * layer + 1], layer)
        return cache


class BatchReader:
    """Prefix cache of one model, up to `max_bytes`. Blocking; use it from one thread. `enabled`
    turns False for a model whose states cannot be reused."""

    def __init__(
        self, model: Any, processor: Any, vision_cache: VisionCache | None, max_bytes: int
    ) -> None:
        self.prefixes = PrefixCache(max_bytes)
        self.enabled = True
        self._model, self._processor, self._vision_cache = model, processor, vision_cache
        self._tokenizer = PromptTokenizer(
            processor, vision_cache.placeholder if vision_cache else None
        )
        pad = processor.tokenizer.pad_token_id
        self.tokenize = self._tokenizer.tokenize
        self._input_builder = PrefixInputBuilder(model, pad, self._tokenizer.token, self.prefixes)
        self._compared: set[tuple[bool, bool]] = set()
        self._one_token = hf.GenerationConfig(
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=pad,
            output_logits=True,
            return_dict_in_generate=True,
        )

    @classmethod
    def for_model(
        cls, model: Any, processor: Any, vision_cache: VisionCache | None, max_bytes: int
    ) -> BatchReader | None:
        """Return a reader, or None for a model that cannot reuse prefixes. Those are models whose
        cache holds more than plain keys and values (sliding windows, recurrent states), and
        processors without an `image_token`."""
        layers = DynamicCache(config=model.config).layers
        plain = layers and all(type(layer) is DynamicLayer for layer in layers)
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        fits = plain and takes_positions and hasattr(processor, "image_token")
        return cls(model, processor, vision_cache, max_bytes) if max_bytes and fits else None

    def inputs(
        self,
        rows: Sequence[TokenizedPrompt],
        samples: int,
        decoded: DecodedImages,
        uncached: Callable[[], Inputs],
    ) -> Inputs | None:
        """Return inputs for `generate`, `samples` rows per prompt, without the cached tokens.
        Return None if too few tokens are cached, or if the model fails the comparison; use
        `uncached` then."""
        self.prefixes.trim()
        return self._inputs(rows, samples, self._vision_inputs(rows, decoded), uncached)

    def cache_inputs(self, rows: Sequence[TokenizedPrompt], uncached: Inputs) -> Inputs:
        """Return extra inputs that make `generate` fill a cache for `store`."""
        found, lengths = uncached["input_ids"].cpu().numpy(), uncached["attention_mask"].sum(dim=1)
        for row, ids, length in zip(rows, found, lengths.tolist(), strict=True):
            if length != len(row) or not np.array_equal(ids[-length:], row.ids):
                self.disable("other tokens than the processor's")
        return {"past_key_values": DynamicCache(config=self._model.config)} if self.enabled else {}

    def store(self, rows: Sequence[TokenizedPrompt], samples: int, inputs: Inputs) -> None:
        """Store the states of prompts after `generate` has read these inputs."""
        if not self.enabled:
            return
        if not self._input_builder.remember(rows, samples, inputs):
            self.disable("layers of different shapes")
        self.prefixes.trim()

    def disable(self, reason: str) -> None:
        """Read every prompt completely from now on."""
        log.info("the prefix cache of %s is off: %s", type(self._model).__name__, reason)
        self.enabled = False
        self.prefixes.clear()

    def _inputs(
        self,
        rows: Sequence[TokenizedPrompt],
        samples: int,
        vision_inputs: VisionInputs,
        uncached: Callable[[], Inputs],
    ) -> Inputs | None:
        self._read_ahead(rows, samples, vision_inputs)
        starts = self._input_builder.starts(rows)
        if samples == 1 and sum(starts) < MIN_SAVED_TOKENS:
            return None
        unread = [len(row.images_from(start)) for row, start in zip(rows, starts, strict=True)]
        cached = [len(row.images) - rest for row, rest in zip(rows, unread, strict=True)]
        kind = any(cached), any(unread)
        if kind not in self._compared and not self._agrees(rows, vision_inputs, uncached()):
            self.disable("other answers with cached states")
            return None
        self._compared.add(kind)
        return self._input_builder.inputs(
            [row for row in rows for _ in range(samples)], vision_inputs
        )

    def _read_ahead(
        self, rows: Sequence[TokenizedPrompt], samples: int, vision_inputs: VisionInputs
    ) -> None:
        """Read prefixes that several rows share, if that saves enough tokens."""
        ends = [len(row) for row in rows] if samples > 1 else _shared_lengths(rows)
        firsts = [row.until(row.cut(end)) for row, end in zip(rows, ends, strict=True)]
        shared = _drop_prefixes(firsts)
        if self._unread(firsts) * samples - self._unread(shared) < (
            1 if samples > 1 else MIN_SAVED_TOKENS
        ):
            return
        # Shared prefixes may themselves share shorter prefixes.
        self._read_ahead(shared, 1, vision_inputs)
        inputs = self._input_builder.inputs(shared, vision_inputs)
        self._next(inputs)
        self._input_builder.remember(shared, 1, inputs)

    def _unread(self, rows: Sequence[TokenizedPrompt]) -> int:
        return sum(len(row) - self.prefixes.longest(row.keys) for row in rows)

    def _agrees(
        self, rows: Sequence[TokenizedPrompt], vision_inputs: VisionInputs, uncached: Inputs
    ) -> bool:
        expected = self._next(uncached)
        found = self._next(self._input_builder.inputs(rows, vision_inputs))
        top = expected.topk(min(COMPARED_TOKENS, expected.shape[-1])).indices
        far = (expected.gather(1, top) - found.gather(1, top)).abs().max()
        near = TOLERANCE if self._model.dtype == torch.float32 else HALF_PRECISION_TOLERANCE
        return bool(far <= near)

    def _next(self, inputs: Inputs) -> torch.Tensor:
        """Return the log-probabilities of the next token; this also fills the cache."""
        output = self._model.generate(**inputs, generation_config=self._one_token)
        return torch.log_softmax(output.logits[0].float(), dim=-1)

    def _vision_inputs(
        self, rows: Sequence[TokenizedPrompt], decoded: DecodedImages
    ) -> VisionInputs:
        if self._vision_cache is None:
            return partial(self._processed, decoded)
        vision_cache, images = self._vision_cache, [sha for row in rows for sha in row.images]
        features = vision_cache.features(images, decoded) if images else {}
        return lambda keys: vision_cache.model_inputs([features[sha] for sha in keys])

    def _processed(self, decoded: DecodedImages, keys: Sequence[str]) -> Inputs:
        """Process the images as one prompt and return the image inputs only."""
        processed = self._processor(
            text=[self._processor.image_token * len(keys)],
            images=[[decoded[sha] for sha in keys]],
            return_tensors="pt",
        ).to(self._model.device, self._model.dtype)
        text_inputs = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        return {name: value for name, value in processed.items() if name not in text_inputs}


def _shared_lengths(rows: Sequence[TokenizedPrompt]) -> list[int]:
    """Return, for each row, the length of the longest prefix that it shares with another row."""
    # In an order that compares token by token, rows with long common prefixes are neighbours.
    order = sorted(range(len(rows)), key=lambda i: rows[i].keys.astype(">i8").tobytes())
    shared = [0] * len(rows)
    for one, other in pairwise(order):
        length = common_prefix(rows[one].keys, rows[other].keys)
        shared[one], shared[other] = max(shared[one], length), max(shared[other], length)
    return shared


def _drop_prefixes(rows: Sequence[TokenizedPrompt]) -> list[TokenizedPrompt]:
    """Drop rows that are prefixes of other rows."""
    kept: list[TokenizedPrompt] = []
    for row in sorted(rows, key=len, reverse=True):
        if len(row) and all(common_prefix(row.keys, one.keys) < len(row) for one in kept):
            kept.append(row)
    return kept
