"""How a compressor is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bottega.compression.hyper_model import HyperModel, Inputs, kinds, map_by_images, parts
from bottega.compression.inputs import InputBuilder, respelled, rows
from bottega.compression.model import LARGEST_SEED, RaccModel, check_range
from bottega.errors import SettingError
from bottega.kv_prefix import (
    NO_LOGITS,
    Batch,
    Geometry,
    KeyValues,
    decoder_config,
    forward,
    generate,
)
from bottega.types import Example, Query


@dataclass(frozen=True)
class TrainingConfig:
    """The paper's training where nothing else is said: AdamW, a learning rate that rises from
    `first_rate` to `rate` within `warm_up` steps and falls to 0 as a cosine.

    `answer` weighs the loss of eq. 5, the cross-entropy of the annotated answers; `cache` weighs
    the distance from the prefix that the base model itself makes of the relevant passage
    (`Modulation.distance`), which is ours. `taught` replaces the annotated answers by the base
    model's own replies after all passages (sequence distillation, as PISCO does), which is not the
    paper's loss. `prdb` stops gradients at irrelevant passages. `flat` is
    the share of lessons whose retrieval scores are hidden, ours too: where scores always tell which
    passage is right, nothing else is learned. `validate_every` 0 never validates; training stops
    early after `patience` validations without a better loss.
    """

    steps: int
    rate: float = 1e-4
    first_rate: float = 1e-5
    warm_up: int = 1000
    weight_decay: float = 0.01
    clip: float = 1.0
    accumulate: int = 1
    half_precision: bool = False
    answer: float = 1.0
    cache: float = 0.0
    taught: bool = False
    prdb: bool = True
    flat: float = 0.0
    seed: int = 0
    checkpoint_every: int = 500
    validate_every: int = 0
    patience: int = 5

    def __post_init__(self) -> None:
        check_range(self, "steps", "accumulate", "checkpoint_every", "patience", low=1)
        check_range(self, "rate", "clip", low=0, open=True)
        check_range(self, "first_rate", "warm_up", "weight_decay", "validate_every", low=0)
        check_range(self, "answer", "cache", low=0)
        check_range(self, "flat", low=0, high=1)
        check_range(self, "seed", low=0, high=LARGEST_SEED)
        if not (self.answer or self.cache):
            raise SettingError("nothing is learned", hint="weigh answer or cache with more than 0")

    def rate_at(self, step: int) -> float:
        """Of step 0 to `steps` - 1."""
        if step < self.warm_up:
            return self.first_rate + (self.rate - self.first_rate) * step / self.warm_up
        share = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class TrainingExample:
    """A query with what was retrieved for it. `relevant` are the passages that hold one of the
    annotated answers (pseudo-relevance, Luo et al. 2021), or demonstrations that give it."""

    query: Query
    passages: tuple[Example, ...]
    scores: tuple[float, ...]
    relevant: tuple[bool, ...]
    answer: str


class TrainingBatches(Protocol):
    """The batch of a step, always the same one: that is what makes training resumable. All of a
    batch have equally many passages."""

    def __call__(self, step: int, /) -> Sequence[TrainingExample]: ...


def retrieval_scores(examples: Sequence[TrainingExample]) -> Tensor:
    return torch.tensor([example.scores for example in examples])


def relevance_mask(examples: Sequence[TrainingExample]) -> Tensor:
    return torch.tensor([example.relevant for example in examples])


IGNORED = -100  # what cross-entropy skips


@dataclass(frozen=True)
class TrainingObjective:
    """The frozen models around a compressor: homogeneous where `hyper` and `base` are one model,
    heterogeneous where they differ. `end` is the token that ends a reply of `base`."""

    hyper: HyperModel
    inputs: InputBuilder
    base: Any
    base_inputs: InputBuilder
    end: int
    most_answer_tokens: int = 16

    def __post_init__(self) -> None:
        self.base.requires_grad_(False).eval()  # `HyperModel` has frozen the other one

    def calibrate(self, racc: RaccModel, examples: Sequence[TrainingExample]) -> None:
        """Sets the scales of hidden states and of scores, and where there are such starts from
        prefixes as the base model itself makes them of relevant passages. Needs a few hundred
        lessons."""
        racc.to(self.hyper.device)
        passages = [passage for example in examples for passage in example.passages]
        asked = self.inputs.query_inputs([example.query for example in examples])
        seen = [*(self.inputs.passages(part) for part in parts(passages)), *asked]
        racc.documents.calibrate(self.hyper, seen)
        racc.queries.calibrate(self.hyper, seen)
        racc.aggregator.calibrate(retrieval_scores(examples))
        if not self._rotates:
            return
        long = [one for one, ok in zip(passages, self._long(racc, passages), strict=True) if ok]
        racc.modulation.calibrate(self.base_prefix(racc, long or passages))
        taught = [examples[place] for place in self._shown(racc, examples)]
        if not taught:
            raise SettingError(
                f"none of {len(examples)} lessons has a relevant passage to start from",
                hint="draw more lessons, or look at whether retrieval finds the answers",
            )
        with torch.no_grad():
            prompts = self.prompts(racc, taught, retrieval_scores(taught))
        racc.modulation.fit(prompts, self.base_prefix(racc, [_relevant(one) for one in taught]))

    def prompts(
        self,
        racc: RaccModel,
        examples: Sequence[TrainingExample],
        scores: Tensor,
        *,
        prdb: bool = False,
    ) -> Tensor:
        """The aggregated prompts (batch, L_vq, width)."""
        passages = [passage for example in examples for passage in example.passages]
        documents = racc.compress(self.hyper, self.inputs, passages)
        documents = documents.view(len(examples), -1, *documents.shape[1:])
        if prdb:
            relevant = relevance_mask(examples)[:, :, None, None].to(documents.device)
            documents = torch.where(relevant, documents, documents.detach())
        asked = racc.compress_query(
            self.hyper, self.inputs.query_inputs([one.query for one in examples])
        )
        return racc.aggregate(documents, asked, scores)

    def base_prefix(self, racc: RaccModel, passages: Sequence[Example]) -> KeyValues:
        """What the base model itself keeps of the end of each passage, at the places of a prefix.

        Positions before the first are negative, which rotary embeddings allow. Raises
        `SettingError` for a base model without these (an encoder-decoder, OPT), and for a passage
        that is shorter than the prefix.
        """
        if not self._rotates:
            raise SettingError(
                f"{type(self.base).__name__} makes no keys and values of a passage that could"
                " stand at the places of a prefix",
                hint="set the course's cache to 0: training by answers needs none",
            )
        length = racc.modulation.length
        rows = map_by_images(passages, lambda part: self._kept(part, length))
        return KeyValues(tuple((layer[0], layer[1]) for layer in rows.movedim(0, 2)))

    def _kept(self, passages: Sequence[Example], length: int) -> Tensor:
        """(passages, layers, 2, heads, length, dimensions)"""
        inputs = self.base_inputs.passages(passages)
        if int(inputs["attention_mask"].sum(-1).min()) < length:
            raise SettingError(
                f"a passage is shorter than the {length} places of the prefix",
                hint="use fewer query prompts, or set the course's cache to 0",
            )
        batch = Batch(self.base, inputs)
        told = batch.behind(0)
        told["position_ids"] = told["position_ids"] - told["position_ids"][..., -1:] + length - 1
        with torch.no_grad():
            out = batch.output(**told, use_cache=True, logits_to_keep=NO_LOGITS)
        ends = [
            torch.stack([layer.keys[:, :, -length:], layer.values[:, :, -length:]], dim=1)
            for layer in out.past_key_values.layers
        ]
        return torch.stack(ends, dim=1)

    @property
    def _rotates(self) -> bool:
        """Whether the base model may read at any position, negative ones too."""
        return getattr(decoder_config(self.base), "rope_parameters", None) is not None

    def loss(
        self,
        racc: RaccModel,
        examples: Sequence[TrainingExample],
        config: TrainingConfig,
        scores: Tensor,
    ) -> Tensor:
        prompts = self.prompts(racc, examples, scores, prdb=config.prdb)
        losses = []
        if config.answer > 0:
            prefix = racc.modulation(prompts)
            of_answers = self.answer_loss(prefix, examples, taught=config.taught)
            losses.append(config.answer * of_answers.to(prompts.device))
        if config.cache > 0 and (taught := self._shown(racc, examples)):
            real = self.base_prefix(racc, [_relevant(examples[place]) for place in taught])
            losses.append(config.cache * racc.modulation.distance(prompts[taught], real))
        # A batch may hold nothing to learn from.
        return torch.stack(losses or [prompts.sum() * 0]).sum()

    def _shown(self, racc: RaccModel, examples: Sequence[TrainingExample]) -> list[int]:
        """The places of those with a relevant passage that a prefix can be made of."""
        places = [place for place, example in enumerate(examples) if any(example.relevant)]
        if not places:
            return []
        long = self._long(racc, [_relevant(examples[place]) for place in places])
        return [place for place, ok in zip(places, long, strict=True) if ok]

    def _long(self, racc: RaccModel, passages: Sequence[Example]) -> list[bool]:
        """Which have a token for each place of the prefix."""
        tokens = map_by_images(
            passages, lambda part: self.base_inputs.passages(part)["attention_mask"].sum(-1)
        )
        return [count >= racc.modulation.length for count in tokens.tolist()]

    def answer_loss(
        self, prefix: KeyValues, examples: Sequence[TrainingExample], *, taught: bool = False
    ) -> Tensor:
        """Eq. 5: cross-entropy of the answers after prefix and question."""
        queries = [example.query for example in examples]
        answers = self._said(examples) if taught else self._annotated(examples)
        asked = self.base_inputs.questions(queries)
        inputs, labels = self._answered(asked, answers)
        loss = forward(self.base, prefix, inputs, labels).loss
        assert loss is not None
        return loss

    def _answered(self, asked: Inputs, answers: Sequence[list[int]]) -> tuple[Inputs, Tensor]:
        """Inputs and labels. An encoder-decoder's answers stand apart from the question."""
        if decoder_config(self.base).is_encoder_decoder:
            length = max(map(len, answers))
            told = [[*said, *[IGNORED] * (length - len(said))] for said in answers]
            return asked, torch.tensor(told, device=asked["input_ids"].device)
        joined = [[*ids, *said] for ids, said in zip(rows(asked), answers, strict=True)]
        inputs = respelled(asked, joined)
        labels = torch.full_like(inputs["input_ids"], IGNORED)
        for row, said in zip(labels, answers, strict=True):
            row[-len(said) :] = torch.tensor(said)
        return inputs, labels

    def _annotated(self, examples: Sequence[TrainingExample]) -> list[list[int]]:
        """Return the annotated answers in the tokens that the base model would generate.

        A model that copies a word from a passage also copies the space in its first token. Of the
        two tokenizations, choose the one whose first token the base model finds likelier after
        reading all passages.
        """
        answers = [example.answer for example in examples]
        begun = self.base_inputs.answers([example.query for example in examples], answers)
        copied = self.base_inputs.answers_in_text(answers)
        differ = [
            index
            for index, (one, other) in enumerate(zip(begun, copied, strict=True))
            if one and other and one[0] != other[0]
        ]
        first = self._replies(
            [examples[index] for index in differ],
            [[begun[index][0], copied[index][0]] for index in differ],
        )
        for index, (token,) in zip(differ, first, strict=True):
            if token == copied[index][0]:
                begun[index] = copied[index]
        return [[*answer, self.end] for answer in begun]

    def _said(self, examples: Sequence[TrainingExample]) -> list[list[int]]:
        """Return the base model's replies after reading all passages (concatenation teacher)."""
        return [_until_end(row, self.end) for row in self._replies(examples)]

    def _replies(
        self, examples: Sequence[TrainingExample], first: Sequence[list[int]] = ()
    ) -> list[list[int]]:
        """Return greedy replies after all passages. With `first`, return only the likeliest token
        among each lesson's choices."""
        read = [(*(seen.query for seen in one.passages), one.query) for one in examples]
        replies: dict[int, list[int]] = {}
        for places in kinds([any(turn.images for turn in turns) for turns in read]):
            rows = self._reply(
                [examples[place] for place in places],
                [first[place] for place in places] if first else (),
            )
            replies.update(zip(places, rows, strict=True))
        return [replies[place] for place in range(len(examples))]

    def _reply(
        self, examples: Sequence[TrainingExample], first: Sequence[list[int]]
    ) -> list[list[int]]:
        """As `_replies`, for lessons that either all have images or all have none."""
        read = self.base_inputs.with_passages(
            [example.query for example in examples], [example.passages for example in examples]
        )
        nothing = KeyValues.none(Geometry.of(self.base), len(examples))
        most = self.most_answer_tokens
        settings = _one_token_of(first) if first else {"max_new_tokens": most}
        tokens = generate(self.base, nothing, read, do_sample=False, **settings)
        return [list(row) for row in tokens.tolist()]


def _relevant(example: TrainingExample) -> Example:
    return example.passages[example.relevant.index(True)]


def _one_token_of(choices: Sequence[list[int]]) -> dict[str, Any]:
    """Return settings of `generate` that restrict each row to one token of its choices."""

    def allowed(row: int, tokens: Tensor) -> list[int]:
        return choices[row]

    return {"max_new_tokens": 1, "prefix_allowed_tokens_fn": allowed}


def _until_end(tokens: list[int], end: int) -> list[int]:
    """With the token that ends it, if there is one."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens
