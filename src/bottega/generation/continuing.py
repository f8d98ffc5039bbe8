"""From prompts, part of which has been read, to what `generate` takes; and back to what is kept.

Needs torch and transformers. A row is what is known, padded on the left, and then what is left to
read, padded on the left as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from bottega.generation.positions import Positions
from bottega.generation.prefixes import Numbers, Prefixes
from bottega.generation.spelling import Spelled

Inputs: TypeAlias = dict[str, Any]
# The model's inputs for images, by their sha256s in order.
Look: TypeAlias = Callable[[Sequence[str]], Inputs]


class Continuing:
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
