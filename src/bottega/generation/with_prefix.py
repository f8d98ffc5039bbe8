"""Generation after keys and values that were not read from the prompt. Needs torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from bottega.generation.prefix_cache import Numbers, Prefixes
from bottega.generation.tokenization import Rendered, Spelled
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
