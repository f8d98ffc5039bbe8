"""Passages, pictures and questions as one model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bottega.compression.hyper_model import Inputs
from bottega.image import Image
from bottega.types import Example, Message, Prompt, Query

QUESTION = Message("user", ("?",))


class PromptEncoder(Protocol):
    """Prompts to what a model takes: `input_ids`, `attention_mask` and whatever its pictures need.

    Left padded. Either all prompts have pictures or none. `generation.LoadedModel.encode` is one.
    """

    def __call__(self, prompts: Sequence[Prompt], /) -> Inputs: ...


class InputBuilder:
    """`passages` are read as the model's own prompts show them, without what stands around them:
    the tokens that a prompt has more when the passage stands before a question. An example with an
    answer is a demonstration: its question's turn, and the assistant's. `ends` are the tokens that
    end a turn: where the same token stands before and behind a passage, they tell which of the two
    is its own."""

    def __init__(self, encode: PromptEncoder, ends: frozenset[int]) -> None:
        self._encode, self._ends = encode, ends
        self._without = rows(encode([Prompt((QUESTION,))]))[0]

    def passages(self, passages: Sequence[Example]) -> Inputs:
        """All with pictures, or all without."""
        inputs = self._encode([Prompt((*_turns(passage), QUESTION)) for passage in passages])
        spans = [row[inserted(row, self._without, self._ends)] for row in rows(inputs)]
        return respelled(inputs, spans)

    def query_inputs(self, queries: Sequence[Query]) -> tuple[Inputs, Inputs, Inputs]:
        """Image alone, question alone, and both (eq. 2). Without images three times the question.

        All have images or none has.
        """
        question = self.texts_only(queries)
        if not queries[0].images:
            return question, question, question
        return self.images(queries), question, self.questions(queries)

    def images(self, queries: Sequence[Query]) -> Inputs:
        """Without a word."""
        return self._user([query.images for query in queries])

    def texts_only(self, queries: Sequence[Query]) -> Inputs:
        """Without images."""
        return self._user([(query.text,) for query in queries])

    def questions(self, queries: Sequence[Query]) -> Inputs:
        """As the model is asked without any passage."""
        return self._user([(*query.images, query.text) for query in queries])

    def text_and_question(self, query: Query) -> Inputs:
        """The question alone and with its images, as two rows of one batch: a model of some size
        takes little longer for both than for one."""
        both = self.questions([query])
        ids = rows(self.texts_only([query])) + rows(both)
        joined = {**both, **padded(ids, both["input_ids"].device)}
        if (kinds := both.get("mm_token_type_ids")) is not None:
            joined["mm_token_type_ids"] = torch.cat([torch.zeros_like(kinds), kinds])
        return joined

    def answers(self, queries: Sequence[Query], answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each answer at the start of a reply, without the end token."""
        told = [
            Prompt((_turn(query), Message("assistant", (answer,))))
            for query, answer in zip(queries, answers, strict=True)
        ]
        before, after = rows(self.questions(queries)), rows(self._encode(told))
        return [_between(opened, ids) for opened, ids in zip(before, after, strict=True)]

    def answers_in_text(self, answers: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each answer after another word. Byte-level tokenizers put the space
        before a word into its first token; the tokens of `answers` lack that space."""
        texts = [Prompt((Message("user", (f"{QUESTION.parts[0]} {one}",)),)) for one in answers]
        return [_between(self._without, ids) for ids in rows(self._encode(texts))]

    def with_passages(
        self, queries: Sequence[Query], passages: Sequence[Sequence[Example]]
    ) -> Inputs:
        """As the model is asked with all passages before the question: concatenation."""
        prompts = []
        for query, before in zip(queries, passages, strict=True):
            turns = [turn for passage in before for turn in _turns(passage)]
            prompts.append(Prompt((*turns, _turn(query))))
        return self._encode(prompts)

    def _user(self, parts: Sequence[tuple[str | Image, ...]]) -> Inputs:
        return self._encode([Prompt((Message("user", part),)) for part in parts])


def _turn(query: Query) -> Message:
    return Message("user", (*query.images, query.text))


def _turns(example: Example) -> tuple[Message, ...]:
    """As `InterleavedPrompter` shows it."""
    if not example.answer:
        return (_turn(example.query),)
    return _turn(example.query), Message("assistant", (example.reply,))


def rows(inputs: Inputs) -> list[list[int]]:
    """Token ids without padding."""
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def _between(opened: list[int], ids: list[int]) -> list[int]:
    """What `ids` have more, be it before a token that ends every text, as T5's tokenizer has it."""
    start = _common(opened, ids)
    return ids[start : len(ids) - (len(opened) - start)]


def inserted(ids: Sequence[int], without: Sequence[int], ends: frozenset[int]) -> slice:
    """Where `ids` have more than `without`. Of several such places the one behind a token that ends
    a turn, or else the first."""
    latest = _common(ids, without)
    start = len(without) - _common(ids[::-1], without[::-1])
    for place in range(start, latest):
        if ids[place] in ends:
            start = place + 1
    return slice(start, start + len(ids) - len(without))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))


def respelled(inputs: Inputs, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The inputs with their pictures and other rows of tokens."""
    ids, told = inputs["input_ids"], padded(rows)
    if "mm_token_type_ids" in inputs:  # they say which tokens stand for pictures
        kinds = inputs["mm_token_type_ids"]
        known = dict(zip(ids.flatten().tolist(), kinds.flatten().tolist(), strict=True))
        told["mm_token_type_ids"] = torch.tensor(
            [[known.get(token, 0) for token in row] for row in told["input_ids"].tolist()]
        )
    return {**inputs, **{name: one.to(ids.device) for name, one in told.items()}}


def padded(rows: Sequence[Sequence[int]], device: torch.device | None = None) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, the rows at the end."""
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, length - len(row) :] = torch.tensor(row)
        mask[place, length - len(row) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
