"""Prompts read once where they begin alike: in one batch, and from one batch to the next.

Needs torch and transformers. Wrong keys and values would give wrong answers in silence, so two
things hold: only caches that are nothing but keys and values of every token take part, and the
first batch of each kind that is read this way is read in the ordinary way too, and compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image as Pillow
from transformers.cache_utils import DynamicCache, DynamicLayer

from bottega.generation.hub import hf
from bottega.generation.prefix_cache import Prefixes, common
from bottega.generation.tokenization import Spelled, Speller
from bottega.generation.vision_cache import VisionCache
from bottega.generation.with_prefix import Inputs, Look, PrefixForward

# Tokens that have to be spared: below, the ordinary way is as quick.
LEAST = 16
COMPARED = 8
NEAR, NEAR_IN_HALF_PRECISION = 1e-3, 0.3

Pictures: TypeAlias = Mapping[str, Pillow.Image]


class Reader:
    """What a model has read, at most `keep` bytes of it. Blocking, for one thread."""

    def __init__(
        self, model: Any, processor: Any, vision_cache: VisionCache | None, keep: int
    ) -> None:
        self.prefixes = Prefixes(keep)
        self.trusts = True
        self._model, self._processor, self._vision_cache = model, processor, vision_cache
        self._speller = Speller(processor, vision_cache.placeholder if vision_cache else None)
        pad = processor.tokenizer.pad_token_id
        self._continuing = PrefixForward(model, pad, self._speller.token, self.prefixes)
        self._compared: set[tuple[bool, bool]] = set()
        self._one_token = hf.GenerationConfig(
            max_new_tokens=1,
            do_sample=False,
            pad_token_id=pad,
            output_logits=True,
            return_dict_in_generate=True,
        )

    @classmethod
    def of(
        cls, model: Any, processor: Any, vision_cache: VisionCache | None, keep: int
    ) -> Reader | None:
        """None for a model whose cache holds anything else (sliding windows, recurrent states), or
        whose processor does not say what stands for an image."""
        layers = DynamicCache(config=model.config).layers
        plain = layers and all(type(layer) is DynamicLayer for layer in layers)
        takes = inspect.signature(model.forward).parameters
        if not (keep and plain and "position_ids" in takes and hasattr(processor, "image_token")):
            return None
        return cls(model, processor, vision_cache, keep)

    def spell(self, text: str, images: Sequence[str], pictures: Pictures) -> Spelled:
        return self._speller.spell(text, images, pictures)

    def inputs(
        self,
        rows: Sequence[Spelled],
        samples: int,
        pictures: Pictures,
        ordinary: Callable[[], Inputs],
    ) -> Inputs | None:
        """What `generate` takes for each row `samples` times, less what is known. None if too
        little is, or if this model turns out not to be one that can be read so: then `ordinary`
        is the way."""
        self.prefixes.trim()
        try:
            return self._inputs(rows, samples, self._looking(rows, pictures), ordinary)
        except Exception:
            if self._compared:
                raise
            self._distrust()  # what is truly wrong shows in the ordinary way
            return None

    def noting(self, rows: Sequence[Spelled], ordinary: Inputs) -> Inputs:
        """What is to be added to the ordinary inputs, so that `keep` has something to keep."""
        found, lengths = ordinary["input_ids"].cpu().numpy(), ordinary["attention_mask"].sum(dim=1)
        for row, ids, length in zip(rows, found, lengths.tolist(), strict=True):
            if length != len(row) or not np.array_equal(ids[-length:], row.ids):
                self._distrust()
        return {"past_key_values": DynamicCache(config=self._model.config)} if self.trusts else {}

    def keep(self, rows: Sequence[Spelled], samples: int, inputs: Inputs) -> None:
        """Of prompts that `generate` has read with these inputs."""
        if not self.trusts:
            return
        if not self._continuing.remember(rows, samples, inputs):
            self._distrust()
        self.prefixes.trim()

    def _distrust(self) -> None:
        self.trusts = False
        self.prefixes.clear()

    def _inputs(
        self, rows: Sequence[Spelled], samples: int, look: Look, ordinary: Callable[[], Inputs]
    ) -> Inputs | None:
        self._read_ahead(rows, samples, look)
        starts = self._continuing.starts(rows)
        if samples == 1 and sum(starts) < LEAST:
            return None
        left = [len(row.images_from(start)) for row, start in zip(rows, starts, strict=True)]
        seen = [len(row.images) - rest for row, rest in zip(rows, left, strict=True)]
        kind = any(seen), any(left)
        if kind not in self._compared and not self._agrees(rows, look, ordinary()):
            self._distrust()
            return None
        self._compared.add(kind)
        return self._continuing.inputs([row for row in rows for _ in range(samples)], look)

    def _read_ahead(self, rows: Sequence[Spelled], samples: int, look: Look) -> None:
        """What several rows begin with and nobody has read, if that spares enough."""
        ends = [len(row) for row in rows] if samples > 1 else _shared(rows)
        firsts = [row.until(row.cut(end)) for row, end in zip(rows, ends, strict=True)]
        begun = _longest(firsts)
        if self._unread(firsts) * samples - self._unread(begun) < (1 if samples > 1 else LEAST):
            return
        self._read_ahead(begun, 1, look)
        inputs = self._continuing.inputs(begun, look)
        self._next(inputs)
        self._continuing.remember(begun, 1, inputs)

    def _unread(self, rows: Sequence[Spelled]) -> int:
        return sum(len(row) - self.prefixes.longest(row.keys) for row in rows)

    def _agrees(self, rows: Sequence[Spelled], look: Look, ordinary: Inputs) -> bool:
        expected, found = self._next(ordinary), self._next(self._continuing.inputs(rows, look))
        top = expected.topk(min(COMPARED, expected.shape[-1])).indices
        far = (expected.gather(1, top) - found.gather(1, top)).abs().max()
        near = NEAR if self._model.dtype == torch.float32 else NEAR_IN_HALF_PRECISION
        return bool(far <= near)

    def _next(self, inputs: Inputs) -> torch.Tensor:
        """The log-probabilities of the token that follows; the cache is filled on the way."""
        output = self._model.generate(**inputs, generation_config=self._one_token)
        return torch.log_softmax(output.logits[0].float(), dim=-1)

    def _looking(self, rows: Sequence[Spelled], pictures: Pictures) -> Look:
        if self._vision_cache is None:
            return lambda shown: self._processed(shown, pictures)
        vision_cache, images = self._vision_cache, [sha for row in rows for sha in row.images]
        features = vision_cache.features(images, pictures) if images else {}
        return lambda shown: vision_cache.given([features[sha] for sha in shown])

    def _processed(self, shown: Sequence[str], pictures: Pictures) -> Inputs:
        """All of them as if in one prompt, less that prompt."""
        processed = self._processor(
            text=[self._processor.image_token * len(shown)],
            images=[[pictures[sha] for sha in shown]],
            return_tensors="pt",
        ).to(self._model.device, self._model.dtype)
        of_text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        return {name: value for name, value in processed.items() if name not in of_text}


def _shared(rows: Sequence[Spelled]) -> list[int]:
    """For each row, how many tokens it begins with like another."""
    # Equal beginnings are neighbours in any order that compares token by token.
    order = sorted(range(len(rows)), key=lambda i: rows[i].keys.astype(">i8").tobytes())
    shared = [0] * len(rows)
    for one, other in pairwise(order):
        length = common(rows[one].keys, rows[other].keys)
        shared[one], shared[other] = max(shared[one], length), max(shared[other], length)
    return shared


def _longest(rows: Sequence[Spelled]) -> list[Spelled]:
    """Without those that others begin with."""
    kept: list[Spelled] = []
    for row in sorted(rows, key=len, reverse=True):
        if len(row) and all(common(row.keys, one.keys) < len(row) for one in kept):
            kept.append(row)
    return kept
