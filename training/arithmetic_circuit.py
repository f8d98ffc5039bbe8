"""Arithmetic circuit, the MLP of layer 1: computes a rule.

An answer that begins with the word of a rule continues with the left number, the right number and a
line with the result. Numbers are thermometers (`training.key_circuit.install_steps`): the larger of
two is the union of their steps, the smaller the intersection, and a sum counts all steps. There is
no lookup table, so unseen pairs of numbers are not harder.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bottega.tasks.rules import RULES
from bottega.tasks.task import TOPICS
from training import architecture as a
from training.tokenizer import END, piece_id, token_id
from training.weights import FLAG, TEXT_SIZE, Units, dims

SEEN = 0.25
WRITE = 30.0  # against the 6 of a copied token
GATE, COUNTING = 15.0, 60.0
RULE_AT_COLON = 0.2  # RULE five positions after its word
Gate = dict[int, float]


def install_sums(units: Units, codes: Tensor, tokenizer: Any) -> None:
    number = [codes[piece_id(tokenizer, f" {n}")] for n in range(19)]
    _install_reading_out(units, number, codes, tokenizer)
    _install_results(units, number)


def _install_reading_out(units: Units, number: list[Tensor], codes: Tensor, tokenizer: Any) -> None:
    """Write the left number after the rule, then the right one, then a new line, and the end after
    the result.
    """
    symbol = dims(a.TOPIC).tolist()[TOPICS.index("symbol")]
    first = {a.IS_RULE: 1.0, symbol: 1.0, a.TEXT: -0.75 / TEXT_SIZE}
    second = {a.NUMBER: 1.0, a.AFTER_RULE: 1.0, a.TEXT: -0.75 / TEXT_SIZE}
    for gate, part in ((first, a.LEFT), (second, a.RIGHT)):
        for value, dim in enumerate(dims(part).tolist()):
            _write(units, gate, {dim: 1 / SEEN}, 0.25, number[value] * WRITE)
    rule = dict.fromkeys(dims(a.RULE).tolist(), 1.0)
    third = {a.NUMBER: 1.0, a.AFTER_NUMBER: 1.0, a.TEXT: -0.75 / TEXT_SIZE}
    line = codes[piece_id(tokenizer, "\n")] * WRITE
    _write(units, third, dict.fromkeys(rule, 1 / RULE_AT_COLON), 0.25, line)
    last = {a.NUMBER: 1.0, a.AFTER_NUMBER: -1.0, a.AFTER_RULE: -1.0, a.TEXT: -0.25 / TEXT_SIZE}
    end = codes[token_id(END)] * WRITE
    _write(units, last, dict.fromkeys(rule, 2 / RULE_AT_COLON), 0.25, end)


def _write(units: Units, gate: Gate, up: Gate, opened: float, code: Tensor) -> None:
    units.add(gate, up, opened, code, a.TOKEN, GATE)


def _install_results(units: Units, number: list[Tensor]) -> None:
    steps = dims(a.STEPS).tolist()
    left, right = steps[:9], steps[9:]
    rule = dict(zip(RULES, dims(a.RULE).tolist(), strict=True))
    # Nothing is larger than any result: every step moves on by one number.
    every = dict.fromkeys(rule.values(), 1 / RULE_AT_COLON)
    _write(units, _at_colon({}, 0.25), every, 0.25, number[0] * WRITE)
    both = dict.fromkeys(steps, 1.0)
    for n in range(1, 19):
        _count(units, both, n - 0.5, rule["add"], number, n)
    for n in range(1, 10):
        pair = {left[n - 1]: 1.0, right[n - 1]: 1.0}
        _count(units, pair, 0.5, rule["larger"], number, n)
        _count(units, pair, 1.5, rule["smaller"], number, n)
        for more, less in ((left, right), (right, left)):
            surplus = {**dict.fromkeys(more, 1.0), **dict.fromkeys(less, -1.0)}
            _count(units, surplus, n - 0.5, rule["differ"], number, n)


def _count(
    units: Units, steps: Gate, least: float, rule: int, number: list[Tensor], n: int
) -> None:
    """Move the output at a colon after `rule` from number n - 1 to n if at least `least` of the
    steps are set.
    """
    gate = _at_colon({**steps, a.UNIT: -least}, 0.0)
    move = (number[n] - number[n - 1]) * WRITE
    units.add_step(gate, {rule: 1 / RULE_AT_COLON}, 0.025, move, a.TOKEN, COUNTING)


def _at_colon(gate: Gate, opened: float) -> Gate:
    """Return a gate that is closed except at a colon: no count of steps compensates for the missing
    flag.
    """
    strong = 8.0
    lift = strong * FLAG - opened
    return {**gate, a.COLON: strong, a.TEXT: -lift / TEXT_SIZE}
