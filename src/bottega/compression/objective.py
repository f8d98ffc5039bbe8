"""Training settings, training examples and the loss of a compressor (eq. 5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from bottega._util.progress import plural
from bottega._util.settings import check_settings
from bottega.compression.hyper_model import (
    HyperModel,
    InputBuilder,
    ProcessorInputs,
    image_groups,
    map_by_images,
    rows,
    split_by_images,
    with_tokens,
)
from bottega.compression.model import LARGEST_SEED, RaccModel
from bottega.errors import SettingError
from bottega.kv_prefix import (
    KEEP_NO_LOGITS,
    Geometry,
    KeyValues,
    ModelInputs,
    decoder_config,
    forward,
    generate,
)
from bottega.types import Example, Query

IGNORED = -100  # label that cross-entropy ignores


@dataclass(frozen=True)
class TrainingConfig:
    """Optimizer settings and loss weights. The defaults are the paper's.

    AdamW's learning rate rises from `initial_rate` to `learning_rate` within `warmup_steps` and
    falls to 0 as a cosine.

    `answer_weight` is the weight of the loss of eq. 5, the cross-entropy of the annotated answers.
    `cache_weight`, which is ours, weights the distance from the base model's own prefix of the
    relevant passage (`Modulation.distance`). `distill`, also ours, replaces the annotated answers
    with the base model's replies after all passages (sequence distillation, as in PISCO). `prdb`
    stops gradients at irrelevant passages. `hide_scores`, also ours, is the fraction of examples
    whose retrieval scores are hidden: if the scores always identify the relevant passage, the model
    learns nothing else. `validate_every` 0 disables validation; training stops early after
    `patience` validations without a better loss.
    """

    steps: PositiveInt
    learning_rate: PositiveFloat = 1e-4
    initial_rate: NonNegativeFloat = 1e-5
    warmup_steps: NonNegativeInt = 1000
    weight_decay: NonNegativeFloat = 0.01
    clip: PositiveFloat = 1.0
    accumulate: PositiveInt = 1
    half_precision: bool = False
    answer_weight: NonNegativeFloat = 1.0
    cache_weight: NonNegativeFloat = 0.0
    distill: bool = False
    prdb: bool = True
    hide_scores: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    checkpoint_every: PositiveInt = 500
    validate_every: NonNegativeInt = 0
    patience: PositiveInt = 5

    def __post_init__(self) -> None:
        check_settings(self)
        if not (self.answer_weight or self.cache_weight):
            raise SettingError(
                "answer_weight and cache_weight must not both be 0", hint="set one of them above 0"
            )

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0 to `steps` - 1."""
        if step < self.warmup_steps:
            rise = self.learning_rate - self.initial_rate
            return self.initial_rate + rise * step / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class TrainingExample:
    """Query with its retrieved passages, their scores and the annotated answer. `relevant` marks
    passages that contain an annotated answer (pseudo-relevance, Luo et al. 2021) and demonstrations
    with that answer."""

    query: Query
    passages: tuple[Example, ...]
    scores: tuple[float, ...]
    relevant: tuple[bool, ...]
    answer: str


# Function from a step to its batch. The same step must give the same batch, so training can resume.
# All examples of a batch have equally many passages.
TrainingBatches = Callable[[int], Sequence[TrainingExample]]


def retrieval_scores(examples: Sequence[TrainingExample]) -> Tensor:
    """Return scores of shape (batch, passages)."""
    return torch.tensor([example.scores for example in examples])


def relevance_mask(examples: Sequence[TrainingExample]) -> Tensor:
    """Return the relevance of passages, of shape (batch, passages)."""
    return torch.tensor([example.relevant for example in examples])


@dataclass(frozen=True)
class TrainingObjective:
    """Loss of a compressor between two frozen models. The paper calls the setting homogeneous if
    `hyper` and `base` are one model, else heterogeneous. `end` is the token that ends a reply of
    `base`."""

    hyper: HyperModel
    inputs: InputBuilder
    base: Any
    base_inputs: InputBuilder
    end: int
    most_answer_tokens: int = 16

    def __post_init__(self) -> None:
        self.base.requires_grad_(False).eval()  # `HyperModel` freezes the other model

    @property
    def tokenizers(self) -> dict[str, str]:
        """Digests of the tokenizers of both models, for `persistence.save`."""
        return {"hyper": self.inputs.tokenizer, "base": self.base_inputs.tokenizer}

    def calibrate(self, racc: RaccModel, examples: Sequence[TrainingExample]) -> None:
        """Set the scales of hidden states and scores from a few hundred examples. If the base model
        has rotary positions, also fit the modulation to its own prefixes of relevant passages.
        Raises `SettingError` if no example has a relevant passage."""
        racc.to(self.hyper.device)
        passages = [passage for example in examples for passage in example.passages]
        queries = self.inputs.query_inputs([example.query for example in examples])
        seen = [*(self.inputs.passages(part) for part in split_by_images(passages)), *queries]
        racc.documents.calibrate(self.hyper, seen)
        racc.queries.calibrate(self.hyper, seen)
        racc.aggregator.calibrate(retrieval_scores(examples))
        if not self._rotates:
            return
        long_enough = self._long_enough(racc, passages)
        long = [one for one, ok in zip(passages, long_enough, strict=True) if ok]
        # Without one long passage, `base_prefix` raises an error that names the remedy.
        racc.modulation.calibrate(self.base_prefix(racc, long or passages))
        usable = [examples[index] for index in self._with_target(racc, examples)]
        if not usable:
            raise SettingError(
                "calibration needs a relevant passage, got none in"
                f" {plural(len(examples), 'example')}",
                hint="use more training examples, or check that retrieval finds the answers",
            )
        with torch.no_grad():
            prompts = self.prompts(racc, usable, retrieval_scores(usable))
        racc.modulation.fit(prompts, self.base_prefix(racc, [_relevant(one) for one in usable]))

    def prompts(
        self,
        racc: RaccModel,
        examples: Sequence[TrainingExample],
        scores: Tensor,
        *,
        prdb: bool = False,
    ) -> Tensor:
        """Return the aggregated prompts (batch, L_vq, width)."""
        passages = [passage for example in examples for passage in example.passages]
        documents = racc.compress(self.hyper, self.inputs, passages)
        documents = documents.view(len(examples), -1, *documents.shape[1:])
        if prdb:
            relevant = relevance_mask(examples)[:, :, None, None].to(documents.device)
            documents = torch.where(relevant, documents, documents.detach())
        queries = self.inputs.query_inputs([one.query for one in examples])
        return racc.aggregate(documents, racc.compress_query(self.hyper, queries), scores)

    def base_prefix(self, racc: RaccModel, passages: Sequence[Example]) -> KeyValues:
        """Return the base model's keys and values of the end of each passage, at prefix positions.
        Raises `SettingError` for a base model without rotary embeddings (an encoder-decoder, OPT),
        and for a passage shorter than the prefix."""
        if not self._rotates:
            raise SettingError(
                f"the cache loss needs rotary positions, got {type(self.base).__name__}",
                hint="set cache_weight to 0 and answer_weight above 0; the answer loss works for"
                " every model",
            )
        length = racc.modulation.length
        rows = map_by_images(passages, lambda part: self._last_states(part, length))
        return KeyValues(tuple((layer[0], layer[1]) for layer in rows.movedim(0, 2)))

    def _last_states(self, passages: Sequence[Example], length: int) -> Tensor:
        """Return keys and values (passages, layers, 2, heads, length, head_dim)."""
        inputs = self.base_inputs.passages(passages)
        if (shortest := int(inputs["attention_mask"].sum(-1).min())) < length:
            raise SettingError(
                f"a passage must have at least {plural(length, 'token')}, the length of the prefix,"
                f" got {shortest}",
                hint="set query_prompts lower, or cache_weight to 0",
            )
        batch = ModelInputs(self.base, inputs)
        arguments = batch.inputs_after(0)
        positions = arguments["position_ids"]
        # Left padding aligns the ends: the last token of each row gets position length - 1. RoPE
        # attends by differences of positions, so earlier tokens may have negative ones.
        arguments["position_ids"] = positions - positions[..., -1:] + length - 1
        with torch.no_grad():
            out = batch.output(**arguments, use_cache=True, logits_to_keep=KEEP_NO_LOGITS)
        ends = [
            torch.stack([layer.keys[:, :, -length:], layer.values[:, :, -length:]], dim=1)
            for layer in out.past_key_values.layers
        ]
        return torch.stack(ends, dim=1)

    @property
    def _rotates(self) -> bool:
        """Whether the base model can read at any position, negative ones included."""
        return getattr(decoder_config(self.base), "rope_parameters", None) is not None

    def loss(
        self,
        racc: RaccModel,
        examples: Sequence[TrainingExample],
        config: TrainingConfig,
        scores: Tensor,
    ) -> Tensor:
        """Return the weighted loss of a batch; 0 if no example has a target."""
        prompts = self.prompts(racc, examples, scores, prdb=config.prdb)
        losses = []
        if config.answer_weight > 0:
            prefix = racc.modulation(prompts)
            answer_loss = self.answer_loss(prefix, examples, distill=config.distill)
            losses.append(config.answer_weight * answer_loss.to(prompts.device))
        if config.cache_weight > 0 and (indices := self._with_target(racc, examples)):
            real = self.base_prefix(racc, [_relevant(examples[index]) for index in indices])
            losses.append(config.cache_weight * racc.modulation.distance(prompts[indices], real))
        # A zero with gradients: `backward` fails on a constant.
        return torch.stack(losses or [prompts.sum() * 0]).sum()

    def _with_target(self, racc: RaccModel, examples: Sequence[TrainingExample]) -> list[int]:
        """Return the indices of examples with a relevant passage that is long enough."""
        if not (indices := [i for i, example in enumerate(examples) if any(example.relevant)]):
            return []
        long = self._long_enough(racc, [_relevant(examples[index]) for index in indices])
        return [index for index, ok in zip(indices, long, strict=True) if ok]

    def _long_enough(self, racc: RaccModel, passages: Sequence[Example]) -> list[bool]:
        """Return whether each passage has a token for each position of the prefix."""
        tokens = map_by_images(
            passages, lambda part: self.base_inputs.passages(part)["attention_mask"].sum(-1)
        )
        return [count >= racc.modulation.length for count in tokens.tolist()]

    def answer_loss(
        self, prefix: KeyValues, examples: Sequence[TrainingExample], *, distill: bool = False
    ) -> Tensor:
        """Return the cross-entropy of the answers after prefix and question (eq. 5)."""
        queries = [example.query for example in examples]
        answers = self._teacher_replies(examples) if distill else self._annotated(examples)
        questions = self.base_inputs.questions(queries)
        inputs, labels = self._with_answers(questions, answers)
        loss = forward(self.base, prefix, inputs, labels).loss
        assert loss is not None
        return loss

    def _with_answers(
        self, questions: ProcessorInputs, answers: Sequence[list[int]]
    ) -> tuple[ProcessorInputs, Tensor]:
        """Return inputs and labels. An encoder-decoder has its answers in the labels only."""
        if decoder_config(self.base).is_encoder_decoder:
            length = max(map(len, answers))
            padded = [[*answer, *[IGNORED] * (length - len(answer))] for answer in answers]
            return questions, torch.tensor(padded, device=questions["input_ids"].device)
        joined = [[*ids, *answer] for ids, answer in zip(rows(questions), answers, strict=True)]
        inputs = with_tokens(questions, joined)
        labels = torch.full_like(inputs["input_ids"], IGNORED)
        for row, answer in zip(labels, answers, strict=True):  # padded on the left
            row[-len(answer) :] = torch.tensor(answer)
        return inputs, labels

    def _annotated(self, examples: Sequence[TrainingExample]) -> list[list[int]]:
        """Return the annotated answers in the tokens that the base model would generate. A model
        that copies a word from a passage also copies the space in its first token. Of the two
        tokenizations, choose the one whose first token the base model finds likelier after reading
        all passages."""
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

    def _teacher_replies(self, examples: Sequence[TrainingExample]) -> list[list[int]]:
        """Return the base model's replies after reading all passages, up to the end token."""
        rows = self._replies(examples)
        return [row[: row.index(self.end) + 1] if self.end in row else row for row in rows]

    def _replies(
        self, examples: Sequence[TrainingExample], first: Sequence[list[int]] = ()
    ) -> list[list[int]]:
        """Return greedy replies after all passages. With `first`, return only the likeliest token
        among the choices of each example."""
        turns = [(*(passage.query for passage in one.passages), one.query) for one in examples]
        replies: dict[int, list[int]] = {}
        for group in image_groups([any(turn.images for turn in one) for one in turns]):
            inputs = self.base_inputs.with_passages(
                [examples[index].query for index in group],
                [examples[index].passages for index in group],
            )
            settings: dict[str, Any] = {"max_new_tokens": self.most_answer_tokens}
            if first:
                settings = _one_token_of([first[index] for index in group])
            no_prefix = KeyValues.none(Geometry.of(self.base), len(group))
            tokens = generate(self.base, no_prefix, inputs, do_sample=False, **settings)
            replies.update(zip(group, tokens.tolist(), strict=True))
        return [replies[index] for index in range(len(examples))]


def _relevant(example: TrainingExample) -> Example:
    return example.passages[example.relevant.index(True)]


def _one_token_of(choices: Sequence[list[int]]) -> dict[str, Any]:
    """Return settings of `generate` that restrict each row to one token of its choices."""

    def allowed(row: int, tokens: Tensor) -> list[int]:
        return choices[row]

    return {"max_new_tokens": 1, "prefix_allowed_tokens_fn": allowed}
