"""Training objective and initial weights of a compressor. Needs torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bottega._util.progress import plural
from bottega.compression import (
    CompressorConfig,
    HyperModel,
    InputBuilder,
    RaccModel,
    sentence_prompts,
)
from bottega.compression.hyper_model import rows
from bottega.compression.objective import TrainingObjective
from bottega.errors import SettingError
from bottega.generation.loaded import LoadedModel
from bottega.types import Example, Query

ANSWERS = 256  # per call of the tokenizer
# PIPE: the paper's sentence for documents, and our sentence for queries.
HARD_PROMPTS = (
    "Summarize the key information of the given passage in a concise manner.",
    "Say what the image shows and what the question asks for.",
)


def training_objective(
    base: LoadedModel,
    hyper: LoadedModel | None = None,
    *,
    layer: int = -1,
    answer_tokens: int = 16,
) -> TrainingObjective:
    """Return the training objective: `hyper` compresses for `base`, and defaults to `base`. `layer`
    is the layer whose hidden states are read, see `HyperModel`; answers have at most
    `answer_tokens` tokens. Raises `SettingError` for a layer that does not exist."""
    texts = InputBuilder(base.encode, base.ends)
    hyper_model = HyperModel((hyper or base).model, layer=layer)
    if not hyper_model.has_layer:
        raise SettingError(
            f"layer does not exist, got {layer}",
            hint=f"use 0 (the embeddings) to {hyper_model.depth}, or -1 (the last)",
        )
    return TrainingObjective(
        hyper_model,
        texts if hyper is None else InputBuilder(hyper.encode, hyper.ends),
        base.model,
        texts,
        min(base.ends),
        answer_tokens,
    )


def check_answers(objective: TrainingObjective, questions: Sequence[Example]) -> None:
    """Raise `SettingError` for an annotated answer that is longer than the limit of the
    objective."""
    limit = objective.most_answer_tokens
    answers = {one.answer for one in questions}
    # A token is at least a byte of the answer with a space before it: most need no tokenizer.
    long = sorted(one for one in answers if len(one.encode()) >= limit)
    most, longest = 0, ""
    for start in range(0, len(long), ANSWERS):
        some = long[start : start + ANSWERS]
        counts = map(len, objective.base_inputs.answers_in_text(some))
        most, longest = max((most, longest), *zip(counts, some, strict=True))
    if most > limit:
        raise SettingError(
            f"an annotated answer must have at most {plural(limit, 'token')}, got {most}:"
            f" {longest[:60]!r}",
            hint=f"set answer_tokens = {most}, or shorten the answers",
        )


def new_compressor(
    config: CompressorConfig, objective: TrainingObjective, *, seed: int = 0, pipe: bool = True
) -> RaccModel:
    """Return a compressor with initial weights, which `TrainingObjective.calibrate` calibrates.
    With `pipe`, appended prompts start as the embeddings of a sentence, else they are random."""
    torch.manual_seed(seed)
    hard = pipe and config.prompting != "reading"
    return RaccModel(config, _hard_prompts(config, objective) if hard else None)


def _hard_prompts(config: CompressorConfig, objective: TrainingObjective) -> tuple[Tensor, Tensor]:
    token_ids = (
        rows(objective.inputs.passages([Example(Query(text), "")]))[0] for text in HARD_PROMPTS
    )
    documents, queries = (
        sentence_prompts(objective.hyper, torch.tensor(ids), count)
        for ids, count in zip(
            token_ids, (config.document_prompts, config.query_prompts), strict=True
        )
    )
    return documents, queries
