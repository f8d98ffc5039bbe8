"""Methods that `racc.py` times: ways to answer with passages, all with answers of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from bottega.compression import (
    InputBuilder,
    KVReuse,
    OneTokenCompressor,
    PassageCompressor,
    PassageStore,
)
from bottega.kv_prefix import KeyValues, generate
from bottega.types import Candidate, Example, Prefix, Query

hf: Any = transformers


@dataclass(frozen=True)
class Case:
    """Question with its retrieved passages. Answers have exactly `tokens` tokens, decoded
    greedily."""

    model: Any
    texts: InputBuilder
    query: Query
    shown: Sequence[Candidate]
    tokens: int = 10

    @property
    def passages(self) -> list[Example]:
        return [one.example for one in self.shown]

    @property
    def named(self) -> list[tuple[str, Example]]:
        return [(str(one.example.id), one.example) for one in self.shown]

    def generate_ids(self, inputs: Any, **more: bool) -> Any:
        """Return `generate` settings that do not end an answer early."""
        settings = hf.GenerationConfig(
            max_new_tokens=self.tokens, do_sample=False, pad_token_id=0, **more
        )
        return self.model.generate(**inputs, generation_config=settings)

    def alone(self) -> Tensor:
        return self._new(self.texts.questions([self.query]))

    def concatenated(self) -> Tensor:
        return self._new(self.texts.with_passages([self.query], [self.passages]))

    def with_prefix(self, prefix: Prefix) -> Tensor:
        """Move the prefix to the model as `TransformersGenerator` does."""
        layers = ((torch.from_numpy(k)[None], torch.from_numpy(v)[None]) for k, v in prefix.layers)
        return self.generated(KeyValues(tuple(layers)), prefix.opening)

    def generated(self, prefix: KeyValues, opening: int = 0) -> Tensor:
        inputs = dict(self.texts.questions([self.query]))
        for name in ("input_ids", "attention_mask"):
            inputs[name] = inputs[name][:, opening:]
        return generate(self.model, prefix, inputs, max_new_tokens=self.tokens, do_sample=False)

    def condensed(self, condenser: PassageCompressor) -> Tensor:
        return self.with_prefix(condenser.prefix(self.query, self.shown))

    def reused(self, reuse: KVReuse) -> Tensor:
        return self.with_prefix(reuse.prefix(self.query, self.shown))

    def one_token(self, method: OneTokenCompressor, store: PassageStore) -> Tensor:
        with torch.inference_mode():
            return self.generated(method(self.model, store.get(self.named).transpose(0, 1)))

    def _new(self, inputs: Any) -> Tensor:
        tokens: Tensor = self.generate_ids(inputs)[:, inputs["input_ids"].shape[1] :]
        return tokens


@dataclass(frozen=True)
class Picked:
    """Chosen passage and answer; `joint` are log probabilities, one per candidate."""

    tokens: Tensor
    joint: Tensor


def candidates(case: Case) -> Picked:
    """Answer with each passage alone, in one batch, and return the pair with the highest joint
    probability (RAVQA-v2). The library's `JointChoiceSearch` leaves batching and answer length
    to its generator.
    """
    passages = case.passages
    inputs = case.texts.with_passages([case.query] * len(passages), [[one] for one in passages])
    out = case.generate_ids(inputs, return_dict_in_generate=True, output_scores=True)
    tokens = out.sequences[:, inputs["input_ids"].shape[1] :]
    log_probabilities = torch.stack(out.scores, dim=1).log_softmax(-1).gather(-1, tokens[..., None])
    retrieved = torch.tensor([one.score for one in case.shown]).log_softmax(0)
    joint = retrieved + log_probabilities.sum((1, 2))
    return Picked(tokens[joint.argmax()][None], joint)
