"""Baselines of RACC: one token for each passage, and reuse of full keys and values."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bottega.compression.hyper_model import HyperModel, Inputs
from bottega.compression.inputs import PromptEncoder, inserted, respelled, rows
from bottega.errors import SettingError
from bottega.kv_prefix import NO_LOGITS, Batch, KeyValues, decoder_config, own_offsets
from bottega.protocols import Prompter
from bottega.types import Candidate, Prefix, Query


class OneTokenCompressor(nn.Module):
    """The shape of xRAG (Cheng et al. 2024): a passage is one stored vector, and a bridge of two
    layers, all that is trained, makes it the embedding of one token in front of the question.

    The vector is the mean hidden state of the passage's tokens in the frozen `HyperModel`; xRAG
    takes a retriever's, and first trains the bridge to have passages said again. A `PassageStore`
    of one prompt a passage holds them. For models of a decoder alone.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bridge = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))

    def passage_vectors(self, hyper: HyperModel, inputs: Inputs) -> Tensor:
        """(passages, 1, width)"""
        with torch.no_grad():
            states = hyper.read(inputs)
        weights = states.mask[..., None].to(states.hidden)
        return (states.hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True)

    @torch.no_grad()
    def calibrate(self, vectors: Tensor, least: float = 0.02) -> None:
        """By (passages, 1, width) of those to come: dimensions differ by orders of size."""
        self.centre.copy_(vectors.mean((0, 1)))
        self.spread.copy_(vectors.flatten(0, 1).std(0).clamp(min=least))

    def embed(self, vectors: Tensor) -> Tensor:
        """(batch, passages, width) of both."""
        made: Tensor = self.bridge((vectors - self.centre) / self.spread)
        return made

    def forward(self, model: Any, vectors: Tensor) -> KeyValues:
        """What the frozen model has of these tokens: gradients pass through it to the bridge."""
        decoder = model.get_decoder().get_decoder()
        embedded = self.embed(vectors).to(model.dtype)
        cache = decoder(inputs_embeds=embedded, use_cache=True).past_key_values
        return KeyValues(tuple((layer.keys, layer.values) for layer in cache.layers))


Key = tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], int]


class KVReuse:
    """Full reuse of keys and values (Prompt Cache, Gim et al. 2024; TurboRAG, Lu et al. 2024): each
    passage is read alone, behind nothing but what opens every prompt, at the place where it will
    stand, and all stand before the question. No passage sees another; of a single one the prefix
    is what the model itself has of the prompt. Nothing is trained. Blocking, for one thread.

    Keys are rotated by their place, so a passage that was read is used again at the same place
    only: at another one it is read anew. The last `keep_mb` megabytes are kept.

    `encode`, `ends`: see `InputBuilder`. `prompt` is what the model will be asked with. Raises
    `SettingError` for a model with an encoder, and where `prompt` does not show each passage alike
    wherever it stands.
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
                f"{type(model).__name__} reads passages with an encoder: they leave no keys and"
                " values that could stand before a question",
                hint="use a model of a decoder alone",
            )
        self._model, self._encode, self._prompt = model, encode, prompt
        self._ends = ends
        self._keep = keep_mb * 1024 * 1024
        self._kept: OrderedDict[Key, Tensor] = OrderedDict()
        self._bytes = 0

    def prefix(self, query: Query, shown: Sequence[Candidate]) -> Prefix:
        """Of at least one passage."""
        bare = replace(query, text="?", images=())
        told = [self._told(bare, (one,)) for one in shown]
        without = rows(self._told(bare, ()))[0]
        start = inserted(rows(told[0])[0], without, self._ends).start
        spans = [ids[start : start + len(ids) - len(without)] for ids in (rows(t)[0] for t in told)]
        opening, place, parts = self._opening(query, shown, start, spans), start, []
        for one, inputs, span in zip(shown, told, spans, strict=True):
            images = tuple(image.sha256 for image in one.example.query.images)
            parts.append(self._states((opening, tuple(span), images, place), inputs))
            place += len(span)
        joined = torch.cat(parts, dim=3).float().cpu().numpy()
        return Prefix(tuple((keys, values) for keys, values in joined), start)

    def _told(self, query: Query, shown: Sequence[Candidate]) -> Inputs:
        return self._encode([self._prompt(query, shown)])

    def _opening(
        self, query: Query, shown: Sequence[Candidate], start: int, spans: Sequence[list[int]]
    ) -> tuple[int, ...]:
        """What stands before the passages, and opens the prompt without them."""
        alone, whole = (rows(self._told(query, some))[0] for some in ((), tuple(shown)))
        if whole != [*alone[:start], *itertools.chain(*spans), *alone[start:]]:
            raise SettingError(
                "the prompt does not show each passage alike, one after the other, before the"
                " question",
                hint="use a prompt of turns, such as Interleaved (--prompt interleaved)",
            )
        return tuple(alone[:start])

    def _states(self, key: Key, inputs: Inputs) -> Tensor:
        """(layers, 2, kv_heads, length, head_dim). The first passage brings the opening along."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        opening, span, _, place = key
        read = self._read(respelled(inputs, [[*opening, *span]]), len(opening), place)
        states = read if place == len(opening) else read[..., len(opening) :, :].clone()
        self._kept[key] = states
        self._bytes += states.nbytes
        while self._bytes > self._keep:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return states

    def _read(self, inputs: Inputs, opened: int, place: int) -> Tensor:
        batch = Batch(self._model, inputs)
        told = batch.behind(0)
        positions = told["position_ids"].clone()
        positions[..., opened:] += place - opened
        with torch.inference_mode(), own_offsets(self._model):
            cache = batch.output(
                **{**told, "position_ids": positions}, use_cache=True, logits_to_keep=NO_LOGITS
            ).past_key_values
            pairs = [torch.stack([one.keys[0], one.values[0]]) for one in cache.layers]
            return torch.stack(pairs)
