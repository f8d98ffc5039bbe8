"""The ways to answer with passages that `racc.py` times. Those that are not RACC stand here and not
in the library: they are measured, not offered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from bottega.compression import Condenser, PassageStore, Texts
from bottega.compression.texts import rows
from bottega.prefixing import KeyValues
from bottega.prefixing.injecting import generate
from bottega.types import Candidate, Query

hf: Any = transformers


@dataclass(frozen=True)
class Case:
    """A question with what was found for it. Answers have exactly `tokens` tokens, greedy."""

    model: Any
    texts: Texts
    query: Query
    shown: Sequence[Candidate]
    tokens: int = 10

    @property
    def passages(self) -> list[Query]:
        return [one.example.query for one in self.shown]

    @property
    def named(self) -> list[tuple[str, Query]]:
        return [(str(one.example.id), one.example.query) for one in self.shown]

    def said(self, inputs: Any, **more: bool) -> Any:
        """Of `generate`, with nothing that ends an answer early."""
        settings = hf.GenerationConfig(
            max_new_tokens=self.tokens, do_sample=False, pad_token_id=0, **more
        )
        return self.model.generate(**inputs, generation_config=settings)

    def alone(self) -> Tensor:
        return self._new(self.texts.questions([self.query]))

    def concatenated(self) -> Tensor:
        return self._new(self.texts.reading([self.query], [self.passages]))

    def behind(self, prefix: KeyValues, inputs: Any = None) -> Tensor:
        if inputs is None:
            inputs = self.texts.questions([self.query])
        return generate(self.model, prefix, inputs, max_new_tokens=self.tokens, do_sample=False)

    def condensed(self, condenser: Condenser) -> Tensor:
        """RACC, as `Transformers.behind` brings its prefix to the model."""
        made = condenser.prefix(self.query, self.shown)
        layers = ((torch.from_numpy(k)[None], torch.from_numpy(v)[None]) for k, v in made.layers)
        return self.behind(KeyValues(tuple(layers)))

    def _new(self, inputs: Any) -> Tensor:
        tokens: Tensor = self.said(inputs)[:, inputs["input_ids"].shape[1] :]
        return tokens


@dataclass(frozen=True)
class Picked:
    """`joint` are log probabilities, one a candidate."""

    tokens: Tensor
    joint: Tensor


def candidates(case: Case) -> Picked:
    """RAVQA-v2: an answer from each passage alone, in one batch, and the one whose passage and
    answer are likeliest together."""
    passages = case.passages
    inputs = case.texts.reading([case.query] * len(passages), [[one] for one in passages])
    out = case.said(inputs, return_dict_in_generate=True, output_scores=True)
    tokens = out.sequences[:, inputs["input_ids"].shape[1] :]
    said = torch.stack(out.scores, dim=1).log_softmax(-1).gather(-1, tokens[..., None])
    retrieved = torch.tensor([one.score for one in case.shown]).log_softmax(0)
    joint = retrieved + said.sum((1, 2))
    return Picked(tokens[joint.argmax()][None], joint)


class OneToken:
    """xRAG: a stored vector a passage, and a small network that makes it the embedding of one token
    in front of the question."""

    def __init__(self, store: PassageStore, width: int) -> None:
        self._store = store
        self._bridge = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def __call__(self, case: Case) -> Tensor:
        with torch.inference_mode():
            out = case.model.model.language_model(inputs_embeds=self.embedded(case), use_cache=True)
            return case.behind(KeyValues(_layers(out.past_key_values)))

    def embedded(self, case: Case) -> Tensor:
        """(1, passages, width)"""
        made: Tensor = self._bridge(self._store.get(case.named)[:, 0])[None]
        return made


class ReadAhead:
    """Full reuse of keys and values: each passage's real ones, read ahead at the places where it
    will stand, without the passages before it. One file each, memory-mapped, in half precision
    unless told otherwise."""

    def __init__(self, case: Case, folder: Path, kind: type[np.floating[Any]] = np.float16) -> None:
        self._folder = folder
        spans = rows(case.texts.passages(case.passages))
        whole = rows(case.texts.reading([case.query], [case.passages]))[0]
        alone = rows(case.texts.questions([case.query]))[0]
        shown = list(itertools.chain(*spans))
        opened = next((i for i in range(len(whole)) if whole[i : i + len(shown)] == shown), 0)
        opening, start = whole[:opened], opened
        if whole != [*opening, *shown, *alone[opened:]]:
            raise ValueError("the template does not show passages one after the other")
        self._cut = opened  # of the question's own prompt, which opens alike
        self._save("opening", read_at(case.model, [], opening, 0), kind)
        self._names = ["opening"]
        for (id, _), span in zip(case.named, spans, strict=True):
            self._save(id, read_at(case.model, opening, span, start), kind)
            self._names.append(id)
            start += len(span)

    @property
    def bytes_a_passage(self) -> float:
        sizes = [self._path(name).stat().st_size for name in self._names[1:]]
        return sum(sizes) / len(sizes)

    def prefix(self) -> KeyValues:
        kept = [np.load(self._path(name), mmap_mode="r") for name in self._names]
        joined = torch.from_numpy(np.concatenate(kept, axis=3)).float()
        return KeyValues(tuple((keys[None], values[None]) for keys, values in joined))

    def rest(self, case: Case) -> dict[str, Any]:
        """The question behind what has been read."""
        inputs = dict(case.texts.questions([case.query]))
        for name in ("input_ids", "attention_mask"):
            inputs[name] = inputs[name][:, self._cut :]
        return inputs

    def __call__(self, case: Case) -> Tensor:
        return case.behind(self.prefix(), self.rest(case))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"

    def _save(self, name: str, read: KeyValues, kind: type[np.floating[Any]]) -> None:
        both = torch.stack([torch.stack([keys[0], values[0]]) for keys, values in read.layers])
        np.save(self._path(name), both.numpy().astype(kind))


def read_at(model: Any, opening: list[int], span: list[int], start: int) -> KeyValues:
    """Of `span` alone, which stands at `start` and sees the opening and itself."""
    places = [*range(len(opening)), *range(start, start + len(span))]
    ids = torch.tensor([opening + span])
    with torch.no_grad():
        out = model.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.tensor([places]),
            use_cache=True,
        )
    cut = len(opening)
    return KeyValues(tuple((k[:, :, cut:], v[:, :, cut:]) for k, v in _layers(out.past_key_values)))


def _layers(cache: Any) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple((layer.keys, layer.values) for layer in cache.layers)
