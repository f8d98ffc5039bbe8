"""Caches of a loaded model: image features, and keys and values by token prefix (needs torch)."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image as Pillow

from bottega._util.caching import LRUCache

IntArray: TypeAlias = npt.NDArray[np.int64]
TOKEN_BYTES = 16  # of one token besides its states: its key and its next position
MAX_BYTES = 256 * 1024 * 1024
# A function that returns stored vectors by image sha256, for some of the given images.
FeatureSource: TypeAlias = Callable[[Collection[str]], Mapping[str, npt.NDArray[np.float32]]]


@dataclass(eq=False)
class RadixNode:
    """Tokens that continue those of `parent`. `states` are the keys and values of all layers,
    (2 * layers, heads, tokens, width). `after` holds the next position after each token."""

    tokens: IntArray
    states: torch.Tensor
    after: IntArray
    parent: RadixNode | None = None
    children: dict[int, RadixNode] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.states.nbytes + self.tokens.nbytes + self.after.nbytes


class PrefixCache:
    """Radix tree of prefixes; `trim` drops the least recently used leaves beyond `max_bytes`. A key
    identifies a token, or a token of one specific image."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._roots: dict[int, RadixNode] = {}
        # A node precedes its parent in this order, so the first node is always a leaf.
        self._used: OrderedDict[RadixNode, None] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._used)

    def longest(self, tokens: IntArray) -> int:
        """Return the length of the longest cached prefix of the tokens."""
        return sum(length for _, length in self._walk(tokens))

    def states(self, tokens: IntArray) -> tuple[list[torch.Tensor], int]:
        """Return the keys and values of cached tokens, node by node, and the next position."""
        path = list(self._walk(tokens))
        self._touch(path[-1][0] if path else None)
        last = int(path[-1][0].after[path[-1][1] - 1]) if path else 0
        return [one.states[:, :, :length] for one, length in path], last

    def add(self, tokens: IntArray, states: torch.Tensor, after: IntArray) -> None:
        """Add tokens. `states` and `after` cover the last of them; the earlier ones are cached. The
        tree takes ownership of `states`."""
        cached, parent = 0, None
        for one, length in self._walk(tokens):
            cached += length
            parent = one if length == len(one.tokens) else self._split(one, length)
        begin = cached - (len(tokens) - states.shape[2])
        if cached < len(tokens):
            # A view would keep the memory of the whole tensor.
            new = states[:, :, begin:].clone() if begin else states
            rest = RadixNode(tokens[cached:].copy(), new, after[begin:].copy())
            parent = self._put(rest, parent)
        self._touch(parent)

    def trim(self) -> None:
        """Drop the least recently used leaves until the tree fits into `max_bytes`."""
        while self.nbytes > self._max_bytes:
            dropped, _ = self._used.popitem(last=False)
            del self._siblings(dropped)[int(dropped.tokens[0])]
            self.nbytes -= dropped.nbytes

    def clear(self) -> None:
        self._roots, self.nbytes = {}, 0
        self._used.clear()

    def capacity(self, nbytes: int) -> int:
        """Return the number of tokens that fit, at `nbytes` of keys and values per token."""
        return self._max_bytes // (nbytes + TOKEN_BYTES)

    def _walk(self, tokens: IntArray) -> Iterator[tuple[RadixNode, int]]:
        children, begin = self._roots, 0
        while begin < len(tokens) and (one := children.get(int(tokens[begin]))) is not None:
            length = common_prefix(one.tokens, tokens[begin:])
            yield one, length
            if length < len(one.tokens):
                return
            children, begin = one.children, begin + length

    def _split(self, one: RadixNode, length: int) -> RadixNode:
        """Split a node after `length` tokens; return the first part, parent of the second. Both
        parts are copies: dropping one frees its memory."""
        del self._used[one]
        self.nbytes -= one.nbytes
        cut = slice(None, length), slice(length, None)
        head, tail = (
            RadixNode(
                one.tokens[part].copy(), one.states[:, :, part].clone(), one.after[part].copy()
            )
            for part in cut
        )
        tail.children = one.children
        for child in tail.children.values():
            child.parent = tail
        self._put(head, one.parent)
        self._touch(self._put(tail, head))
        return head

    def _put(self, one: RadixNode, parent: RadixNode | None) -> RadixNode:
        one.parent = parent
        self._siblings(one)[int(one.tokens[0])] = one
        self._used[one] = None
        self.nbytes += one.nbytes
        return one

    def _siblings(self, one: RadixNode) -> dict[int, RadixNode]:
        return self._roots if one.parent is None else one.parent.children

    def _touch(self, one: RadixNode | None) -> None:
        while one is not None:
            self._used.move_to_end(one)
            one = one.parent


def common_prefix(one: IntArray, other: IntArray) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


class VisionCache:
    """Projected features by image sha256, up to `max_bytes`.

    `sources` return vectors of images, which are then not encoded. A vector is the first part of a
    feature; the other dimensions are the projector's biases. `views` returns variants of an image;
    its feature is the mean over them. By default it returns only the image.
    """

    def __init__(self, model: Any, processor: Any, placeholder: str, max_bytes: int) -> None:
        self._model, self._processor = model, processor
        self.placeholder = placeholder
        self._separate = False
        self.sources: tuple[FeatureSource, ...] = ()
        self.views: Callable[[Pillow.Image], list[Pillow.Image]] = lambda image: [image]
        self._features: LRUCache[str, torch.Tensor] = LRUCache(
            max_bytes, size=lambda rows: rows.nbytes
        )

    @classmethod
    def for_model(
        cls, model: Any, processor: Any, max_bytes: int = MAX_BYTES
    ) -> VisionCache | None:
        """Return a cache for the model, or None if it accepts no features or their shapes vary."""
        if "mm_encoder_outputs" not in inspect.signature(model.forward).parameters:
            return None
        try:
            placeholder = _placeholder(model, processor)
        except Exception:  # another kind of model; real errors appear when it encodes an image
            return None
        return cls(model, processor, placeholder, max_bytes) if placeholder else None

    def set_sources(self, *sources: FeatureSource) -> None:
        """Replace the sources, and forget the features of the earlier ones."""
        self.sources = sources
        self._features.clear()

    def contains(self, sha256: str) -> bool:
        return self._cached(sha256) is not None

    def _cached(self, sha256: str) -> torch.Tensor | None:
        rows = self._features.get(sha256)
        for source in self.sources:
            if rows is not None:
                break
            if (vector := source([sha256]).get(sha256)) is not None:
                rows = self._model.model.multi_modal_projector.linear_2.bias.detach().clone()[None]
                rows[0, : len(vector)] = torch.from_numpy(vector.copy())
                self._features.put(sha256, rows)
        return rows

    def features(
        self, images: Iterable[str], decoded: Mapping[str, Pillow.Image]
    ) -> dict[str, torch.Tensor]:
        """Return the features by sha256; `decoded` holds the images that are not cached."""
        cached = {sha: self._cached(sha) for sha in images}
        fresh = self._encode_images(
            {sha: decoded[sha] for sha, rows in cached.items() if rows is None}
        )
        for sha, rows in fresh.items():
            self._features.put(sha, rows)
        return fresh | {sha: rows for sha, rows in cached.items() if rows is not None}

    def model_inputs(self, features: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the model inputs for images in prompt order. The features are a tuple or one
        tensor, as the model's own vision tower returns them."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooled: Any = tuple(features) if self._separate else torch.stack(list(features))
        return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=pooled)}}

    def expand_placeholders(self, text: str) -> str:
        """Repeat the image token once per feature of each image."""
        return text.replace(self._processor.image_token, self.placeholder)

    def _encode_images(self, decoded: Mapping[str, Pillow.Image]) -> dict[str, torch.Tensor]:
        if not decoded:
            return {}
        views = [self.views(image) for image in decoded.values()]
        pixels = self._processor.image_processor(
            list(chain.from_iterable(views)), return_tensors="pt"
        )
        features = _encode(self._model, pixels["pixel_values"])
        self._separate = not isinstance(features, torch.Tensor)
        # Means are copies: a slice would keep the memory of the whole batch.
        rest = iter(features)
        return {
            sha: torch.stack(list(islice(rest, len(one)))).mean(0)
            for sha, one in zip(decoded, views, strict=True)
        }


def _placeholder(model: Any, processor: Any) -> str | None:
    """Return the text of one image, or None if it differs between two image shapes, or if the
    processor writes more than it and the prompt."""
    probes = [Pillow.new("RGB", size) for size in ((8, 8), (200, 90))]
    pixels = processor.image_processor(probes, return_tensors="pt")
    values = pixels["pixel_values"]
    if set(pixels) != {"pixel_values"} or values.ndim != 4 or len(values) != 2:
        return None
    with torch.inference_mode():
        tokens = len(_encode(model, values)[0])
    found = {processor.replace_image_token(pixels, image_idx=i) for i in (0, 1)}
    placeholder = str(processor.image_token) * tokens
    # PaliGemma's processor adds tokens to the text.
    read = processor(text=[f"{processor.image_token}text"], images=[probes[:1]])["input_ids"][0]
    written = processor.tokenizer(f"{placeholder}text")["input_ids"]
    return placeholder if found == {placeholder} and list(read) == list(written) else None


def _encode(model: Any, pixels: torch.Tensor) -> torch.Tensor | Sequence[torch.Tensor]:
    """Encode pixels (n, channels, height, width) as features (n, tokens, model width)."""
    features: torch.Tensor | Sequence[torch.Tensor] = model.base_model.get_image_features(
        pixels.to(model.device, model.dtype), return_dict=True
    ).pooler_output
    return features
