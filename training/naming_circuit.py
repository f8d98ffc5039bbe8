"""Naming circuit of the master: answers without demonstrations.

The master first states the property and its value, then the answer: "colour red", a new line,
"Answer: red". After any demonstration it answers like the demonstrations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bottega.tasks.attributes import SIZES, VALUES
from training import architecture as a
from training.arithmetic_circuit import WRITE
from training.key_circuit import GATE, KEY, SEEN
from training.tokenizer import DIGIT_NAMES, DIGIT_WORDS, END, piece_id, token_id
from training.tower import EMBEDDING
from training.weights import (
    ASKING,
    FLAG,
    KEY_COPY,
    NEAREST,
    NORM_1,
    PREVIOUS,
    SEEN_COPY,
    SEEN_INPUT,
    SHOWN_BEFORE,
    TEXT_NORM,
    TEXT_SIZE,
    TOKEN_COPY,
    TOPIC_COPY,
    Attention,
    Units,
    dims,
)

FREE_VALUES = 173  # the first slot of layer 0's values that `training.circuits` leaves free
FREE_SLOT = 160  # of layer 1's keys: after those of the match, and still slow
NAMING_GATE = 15.0


def aspects() -> list[tuple[str, int, list[int], list[str]]]:
    """Return each property that the master can name: its word, its topic dimension, the dimensions
    of its values and their words.
    """
    topics = dims(a.TOPIC).tolist()
    values = iter(dims(a.SCENES).tolist())
    nameable = [
        (name, topics[index], [next(values) for _ in range(size)], list(VALUES[name]))
        for index, (name, size) in enumerate(zip(VALUES, SIZES, strict=True))
    ]
    return [*nameable, ("digit", a.ABOUT_DIGIT, dims(a.DIGIT).tolist(), list(DIGIT_NAMES))]


def flag_named_words(table: Tensor, tokenizer: Any) -> None:
    def flag(text: str, dim: int) -> None:
        table[piece_id(tokenizer, text), dim] = FLAG

    for word in DIGIT_WORDS:
        flag(f" {word}", a.ABOUT_DIGIT)
    for name, _, _, words in aspects():
        flag(name, a.ASPECT)
        for word in words:
            flag(f" {word}", a.VALUE)
    flag("\n", a.NEW_LINE)
    flag("Answer", a.ANSWER_WORD)
    table[token_id(END), a.ENDS] = FLAG


def install_digit_circuit(layers: Any, units: Units) -> None:
    """Copy digits in layer 0 like other visible values; record in layer 1 whether a demonstration
    exists.
    """
    shared = Attention(layers[0])
    token_scale = shared.width**0.5 / TEXT_NORM
    asks = int(a.ROTARY.slow_slots(2, 1))
    shared.offer_flag(asks, a.ABOUT_DIGIT)
    topic = shared.offer_values(FREE_VALUES, a.ABOUT_DIGIT)
    digit = shared.offer_values(FREE_VALUES + 1, a.DIGIT)
    aspect = shared.offer_values(int(digit[-1]) + 1, a.ASPECT)
    colon = shared.offer_values(int(digit[-1]) + 2, a.COLON)
    shared.head(ASKING).copy(topic, a.ABOUT_DIGIT, TOPIC_COPY / (token_scale * FLAG))
    shared.head(NEAREST).copy(digit, a.DIGIT, SEEN_COPY / (SEEN_INPUT * shared.width**0.5))
    before = TOKEN_COPY / (token_scale * FLAG)
    shared.head(PREVIOUS).copy(aspect, a.AFTER_ASPECT, before)
    shared.head(PREVIOUS).copy(colon, a.AFTER_COLON, before)
    _install_digit_keys(units)
    _install_shown(Attention(layers[1]))


def _install_digit_keys(units: Units) -> None:
    gate = {a.ABOUT_DIGIT: 1.0, a.TEXT: -0.25 / TEXT_SIZE}
    for value, key in zip(dims(a.DIGIT).tolist(), dims(a.KEY_DIGIT).tolist(), strict=True):
        units.add(gate, {value: 1 / SEEN}, 0.25, torch.tensor(KEY), key, GATE)


def _install_shown(shared: Attention) -> None:
    """Write the share of ended answers that follow an image: 0 for the opening one alone."""
    scale = shared.width**0.5 / NORM_1
    slot = int(a.ROTARY.slow_slots(FREE_SLOT, 1))
    shared.offer_flag(slot, a.ENDS)
    head = shared.head(SHOWN_BEFORE)
    head.prefer_flag(slot, 60.0, scale * FLAG)
    ended = shared.offer_values(EMBEDDING, a.ENDS)
    shared.v[ended, a.BLIND] = -FLAG / KEY_COPY
    head.copy(ended, a.SHOWN, 1 / (scale * FLAG))


def install_naming(units: Units, codes: Tensor, tokenizer: Any) -> None:
    def write(gate: dict[int, float], up: dict[int, float], text: str) -> None:
        token = token_id(text) if text == END else piece_id(tokenizer, text)
        units.add(gate, up, 0.25, codes[token] * WRITE, a.TOKEN, NAMING_GATE)

    text, both = {a.TEXT: 1 / TEXT_SIZE}, -0.75 / TEXT_SIZE  # a gate for two flags at once
    topics = {topic: 1 / TOPIC_COPY for _, topic, _, _ in aspects()}
    for name, topic, values, words in aspects():
        # Only of what shows such a thing: otherwise the opening "unknown" is copied.
        seen = {**dict.fromkeys(values, 1.0), a.TEXT: both - SEEN / TEXT_SIZE}
        write({a.ANSWERS: 1.0, topic: 1.0, a.SHOWN: -4.0, **seen}, text, name)
        for value, word in zip(values, words, strict=True):
            gate = {a.ASPECT: 1.0, a.COLON: 1.0, topic: 1.0, a.TEXT: both}
            write(gate, {value: 1 / SEEN}, f" {word}")
    write({a.VALUE: 1.0, a.AFTER_ASPECT: 1.0, a.TEXT: both}, text, "\n")
    write({a.NEW_LINE: 1.0, a.TEXT: -0.25 / TEXT_SIZE}, topics, "Answer")
    write({a.ANSWER_WORD: 1.0, a.TEXT: -0.25 / TEXT_SIZE}, topics, ":")
    write({a.VALUE: 1.0, a.AFTER_COLON: 1.0, a.TEXT: both}, text, END)
