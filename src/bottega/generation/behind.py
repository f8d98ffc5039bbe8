"""Prompts behind keys and values that the model did not read itself. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bottega.generation.rendered import Rendered
from bottega.prefixing.base import Batch
from bottega.prefixing.kv import KeyValues
from bottega.types import Prefix


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
