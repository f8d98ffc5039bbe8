"""Generation after keys and values that were not read from the prompt. Needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers
from PIL import Image as Pillow
from transformers.cache_utils import DynamicCache, DynamicLayer

from bottega.generation.prefix_cache import Numbers, Prefixes, common
from bottega.generation.tokenization import Rendered, Spelled, Speller
from bottega.generation.vision_cache import VisionCache
from bottega.kv_prefix import Batch, KeyValues
from bottega.types import Prefix


class Positions:
    """A token's position is one more than that of the token before; in models with
    `get_rope_index` (Qwen-VL) the tokens of an image have three, and the token behind it follows on
    the largest."""

    def __init__(self, model: Any, image_token: int) -> None:
        self._index = getattr(model.base_model, "get_rope_index", None)
        self._image_token = image_token

    def of(
        self, ids: torch.Tensor, mask: torch.Tensor, first: torch.Tensor, seen: Mapping[str, Any]
    ) -> torch.Tensor:
        """As the model's `forward` takes them, (rows, tokens) or (4, rows, tokens), for rows that
        are padded on the left and begin at `first`, (rows, 1). `seen` describes their images."""
        plain = first + (mask.cumsum(-1) - 1).clamp(min=0)
        if self._index is None:
            return plain
        if "image_grid_thw" not in seen:
            return plain.expand(4, -1, -1)
        spatial, _ = self._index(
            ids,
            mm_token_type_ids=(ids == self._image_token).int(),
            image_grid_thw=seen["image_grid_thw"],
            attention_mask=mask,
        )
        return torch.cat([plain[None], spatial + first])

    def after(self, positions: torch.Tensor) -> torch.Tensor:
        """(rows, tokens): the position of what follows on each token, whole images provided."""
        if positions.ndim == 2:
            return positions + 1
        return positions[1:].amax(dim=0).cummax(dim=-1).values + 1


def behind(model: Any, inputs: Mapping[str, Any], rows: Sequence[Rendered]) -> dict[str, Any]:
    """The inputs of `rows` for `generate`. Raises `SettingError` for a prefix of another shape."""
    prefixes = [row.prefix for row in rows if row.prefix]
    batch = Batch(model, _unopened(inputs, [one.opening for one in prefixes]))
    prefix = _stacked(prefixes)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None  # the last call's, which Qwen would go on with
    cache = batch.cache(batch.fitted(prefix))
    return {**batch.with_dummies(prefix.length), "past_key_values": cache}


def _unopened(inputs: Mapping[str, Any], openings: Sequence[int]) -> dict[str, Any]:
    """With tokens that the prefix holds as more of the padding on the left."""
    mask = inputs["attention_mask"].clone()
    starts = mask.argmax(dim=1).tolist()
    for row, start, opening in zip(mask, starts, openings, strict=True):
        row[start : start + opening] = 0
    return {**inputs, "attention_mask": mask}


def _stacked(prefixes: Sequence[Prefix]) -> KeyValues:
    layers = zip(*(prefix.layers for prefix in prefixes), strict=True)
    return KeyValues(
        tuple(
            (
                torch.stack([torch.from_numpy(keys) for keys, _ in layer]),
                torch.stack([torch.from_numpy(values) for _, values in layer]),
            )
            for layer in layers
        )
    )


Inputs: TypeAlias = dict[str, Any]
# The model's inputs for images, by their sha256s in order.
Look: TypeAlias = Callable[[Sequence[str]], Inputs]


class PrefixForward:
    def __init__(self, model: Any, pad: int, image_token: int, prefixes: Prefixes) -> None:
        self._model, self._pad, self._prefixes = model, pad, prefixes
        self._positions = Positions(model, image_token)

    def starts(self, rows: Sequence[Spelled]) -> list[int]:
        """How many tokens of each are known."""
        return [row.cut(self._prefixes.longest(row.keys)) for row in rows]

    def inputs(self, rows: Sequence[Spelled], look: Look) -> Inputs:
        starts = self.starts(rows)
        pairs = list(zip(rows, starts, strict=True))
        known, wide = max(starts), max(len(row) - start for row, start in pairs)
        held = [self._prefixes.states(row.keys[:start]) for row, start in pairs]
        mask = np.zeros((len(rows), known + wide), np.int64)
        ids = np.full_like(mask, self._pad)
        for i, (row, start) in enumerate(pairs):
            mask[i, known - start : known] = 1
            mask[i, known + wide - (len(row) - start) :] = 1
            ids[i, mask[i] == 1] = row.ids
        images = [sha for row, start in pairs for sha in row.images_from(start)]
        first = np.array([[after] for _, after in held], np.int64)
        inputs = self._placed(ids, mask, first, known, look(images) if images else {})
        return inputs | {"past_key_values": self._cache([states for states, _ in held], known)}

    def remember(self, rows: Sequence[Spelled], samples: int, inputs: Inputs) -> bool:
        """What was read of each row, which stands in the cache `samples` times. False if its layers
        are of different shapes, which are not kept as one piece."""
        layers = inputs["past_key_values"].layers
        states = [part for layer in layers for part in (layer.keys, layer.values)]
        if len({(one.shape[1], one.shape[3]) for one in states}) > 1:
            return False
        room = self._prefixes.room(states[0][0, :, :1].nbytes * len(states))
        after = self._after(inputs)
        for i, row in enumerate(rows):
            start, end = self._prefixes.longest(row.keys), min(len(row), room)
            if start < end:  # what was read stands at the right
                left = slice(inputs["input_ids"].shape[1] - len(row) + start, None)
                new = [one[i * samples, :, left][:, : end - start] for one in states]
                follows = after[i * samples, start - len(row) :][: end - start]
                self._prefixes.add(row.keys[:end], torch.stack(new), follows)
        return True

    def _placed(
        self, ids: Numbers, mask: Numbers, first: Numbers, known: int, seen: Inputs
    ) -> Inputs:
        device = self._model.device
        tokens, shown, begin = (torch.from_numpy(one).to(device) for one in (ids, mask, first))
        positions = self._positions.of(tokens[:, known:], shown[:, known:], begin, seen)
        return {"input_ids": tokens, "attention_mask": shown, "position_ids": positions} | seen

    def _after(self, inputs: Inputs) -> Numbers:
        positions = inputs.get("position_ids")
        if positions is None:  # read in the ordinary way, from the first token on
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            positions = self._positions.of(ids, mask, torch.zeros_like(ids[:, :1]), inputs)
        after: Numbers = self._positions.after(positions).cpu().numpy()
        return after

    def _cache(self, held: Sequence[Sequence[torch.Tensor]], known: int) -> DynamicCache:
        """A new one, because the model appends to it."""
        cache = DynamicCache(config=self._model.config)
        if known:
            like = next(states[0] for states in held if states)
            layers, heads, _, width = like.shape
            whole = like.new_zeros(layers, len(held), heads, known, width)
            for i, states in enumerate(held):
                if states:
                    joined = torch.cat(list(states), dim=2)
                    whole[:, i, :, known - joined.shape[2] :] = joined
            for layer in range(layers // 2):
                cache.update(whole[2 * layer], whole[2 * layer + 1], layer)
        return cache


hf: Any = transformers  # partly annotated
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
