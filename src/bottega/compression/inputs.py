"""Model inputs of passages, images and questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bottega.compression.hyper_model import Inputs
from bottega.types import Example, Message, Prompt, Query

QUESTION = Message("user", ("?",))


class PromptEncoder(Protocol):
    """Function that turns prompts into model inputs, such as `generation.LoadedModel.encode`.
    Inputs hold `input_ids`, `attention_mask` and the tensors of images, padded on the left. Either
    all prompts have images or none has."""

    def __call__(self, prompts: Sequence[Prompt], /) -> Inputs: ...


class InputBuilder:
    """Builder of the inputs that a compressor and its base model read. The tokens of a passage are
    those that a prompt gains when the passage precedes a question. An example with an answer is a
    demonstration: a user turn and an assistant turn. `ends` are the tokens that end a turn. They
    decide which of two equal tokens, one before and one after a passage, belongs to it."""

    def __init__(self, encode: PromptEncoder, ends: frozenset[int]) -> None:
        self._encode, self._ends = encode, ends
        self._without = rows(encode([Prompt((QUESTION,))]))[0]

    def passages(self, passages: Sequence[Example]) -> Inputs:
        """Return the tokens of passages that either all have images or all have none."""
        inputs = self._encode([Prompt((*_turns(passage), QUESTION)) for passage in passages])
        spans = [row[inserted(row, self._without, self._ends)] for row in rows(inputs)]
        return with_tokens(inputs, spans)

    def query_inputs(self, queries: Sequence[Query]) -> tuple[Inputs, Inputs, Inputs]:
        """Return the inputs of the image, of the question and of both (eq. 2). Without images all
        three are the question. Either all queries have images or none has."""
        question = self.texts_only(queries)
        if not queries[0].images:
            return question, question, question
        return self.images(queries), question, self.questions(queries)

    def images(self, queries: Sequence[Query]) -> Inputs:
        """Return inputs of the images without text."""
        return self._encode([Prompt((Message("user", query.images),)) for query in queries])

    def texts_only(self, queries: Sequence[Query]) -> Inputs:
        """Return inputs of the texts without images."""
        return self._encode([Prompt((Message("user", (query.text,)),)) for query in queries])

    def questions(self, queries: Sequence[Query]) -> Inputs:
        """Return inputs of the questions with their images and without passages."""
        return self._encode([Prompt((_turn(query),)) for query in queries])

    def text_and_question(self, query: Query) -> Inputs:
        """Return one batch of two rows: the text of the question, and the question with its images.
        A large model takes little longer for two rows than for one."""
        both = self.questions([query])
        ids = rows(self.texts_only([query])) + rows(both)
        joined = {**both, **padded(ids, both["input_ids"].device)}
        if (kinds := both.get("mm_token_type_ids")) is not None:
            joined["mm_token_type_ids"] = torch.cat([torch.zeros_like(kinds), kinds])
        return joined

    def answers(self, queries: Sequence[Query], answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each answer at the start of a reply, without the end token."""
        prompts = [
            Prompt((_turn(query), Message("assistant", (answer,))))
            for query, answer in zip(queries, answers, strict=True)
        ]
        before, after = rows(self.questions(queries)), rows(self._encode(prompts))
        return [_between(opened, ids) for opened, ids in zip(before, after, strict=True)]

    def answers_in_text(self, answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each answer after another word. Byte-level tokenizers put the space
        before a word into its first token; the tokens of `answers` lack that space."""
        texts = [Prompt((Message("user", (f"{QUESTION.parts[0]} {one}",)),)) for one in answers]
        return [_between(self._without, ids) for ids in rows(self._encode(texts))]

    def with_passages(
        self, queries: Sequence[Query], passages: Sequence[Sequence[Example]]
    ) -> Inputs:
        """Return inputs with all passages before each question (concatenation)."""
        prompts = []
        for query, before in zip(queries, passages, strict=True):
            turns = [turn for passage in before for turn in _turns(passage)]
            prompts.append(Prompt((*turns, _turn(query))))
        return self._encode(prompts)


def _turn(query: Query) -> Message:
    return Message("user", (*query.images, query.text))


def _turns(example: Example) -> tuple[Message, ...]:
    """Return the turns that `InterleavedPrompter` renders."""
    if not example.answer:
        return (_turn(example.query),)
    return _turn(example.query), Message("assistant", (example.reply,))


def rows(inputs: Inputs) -> list[list[int]]:
    """Return the token ids of each row, without padding."""
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def _between(opened: list[int], ids: list[int]) -> list[int]:
    """Return the tokens that `ids` add to `opened`, before any end token (as T5 appends one)."""
    start = _common(opened, ids)
    return ids[start : len(ids) - (len(opened) - start)]


def inserted(ids: Sequence[int], without: Sequence[int], ends: frozenset[int]) -> slice:
    """Return the span of `ids` that `without` lacks. Of several such spans, prefer the one after a
    token that ends a turn, else the first."""
    latest = _common(ids, without)
    start = len(without) - _common(ids[::-1], without[::-1])
    for index in range(start, latest):
        if ids[index] in ends:
            start = index + 1
    return slice(start, start + len(ids) - len(without))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), shorter)


def with_tokens(inputs: Inputs, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return `inputs` with other rows of tokens and the same images."""
    ids, replaced = inputs["input_ids"], padded(rows)
    if "mm_token_type_ids" in inputs:  # they mark the tokens of images
        kinds = inputs["mm_token_type_ids"]
        kind_of = dict(zip(ids.flatten().tolist(), kinds.flatten().tolist(), strict=True))
        replaced["mm_token_type_ids"] = torch.tensor(
            [[kind_of.get(token, 0) for token in row] for row in replaced["input_ids"].tolist()]
        )
    return {**inputs, **{name: one.to(ids.device) for name, one in replaced.items()}}


def padded(rows: Sequence[Sequence[int]], device: torch.device | None = None) -> dict[str, Tensor]:
    """Return `input_ids` and `attention_mask` of the rows, padded on the left."""
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, length - len(row) :] = torch.tensor(row)
        mask[index, length - len(row) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
