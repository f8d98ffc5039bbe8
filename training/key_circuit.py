"""Key circuit, the MLP of layer 0: selects the match key of a position.

Without a topic in the question a position keeps its image. With a topic, the key of the requested
value replaces the image, so demonstrations with the same question and value vote. An image without
any such value stays: "Which traffic sign is this?" asks for similarity. After a question about a
relation, or in a passage, the key is the name with the relation.
"""

from __future__ import annotations

import torch

from bottega.tasks.attributes import SIZES
from bottega.tasks.task import RELATIONS, TOPICS
from training import architecture as a
from training.weights import TEXT_SIZE, Units, dims

SEEN = 0.25  # size of the concepts that `training.circuits` copies from an image
KEY = 0.52  # its square times the match's strength: 8 nats for the same value
GATE = 8.0
TOPIC, CLOSED = 0.5, 0.25  # a topic's flag, and the threshold of a gate
NAME_LEAST, RELATION_LEAST = 0.05, 0.03  # thresholds of a name and a relation
NAME_KEY, RELATION_KEY = 4.5, 2.2  # a passage shares its attention between the two


def _topic_gate(topic: int) -> dict[int, float]:
    """Return a gate that opens to TOPIC - CLOSED after a word of this topic."""
    return {a.TEXT: -CLOSED / TEXT_SIZE, topic: 1.0}


def _replacing_gate(is_master: bool) -> dict[int, float]:
    """Return a gate that opens to TOPIC - CLOSED for a question about an image with a scene, a row
    or a name; either alone leaves it at 0. The master reads a digit in any image, so a question
    about a digit is enough.
    """
    kinds = [(a.SCENES, len(SIZES)), (a.SYMBOL, 3), (a.LEFT, 3), (a.RIGHT, 3), (a.NAMED, 1)]
    shown = {dim: 1 / parts for kind, parts in kinds for dim in dims(kind).tolist()}
    topics = dict.fromkeys(dims(a.TOPIC).tolist(), 0.5)
    return {
        a.TEXT: -CLOSED / TEXT_SIZE,
        **topics,
        **shown,
        **({a.ABOUT_DIGIT: 1.0} if is_master else {}),
    }


def install_keys(units: Units, is_master: bool) -> None:
    topic = dict(zip(TOPICS, dims(a.TOPIC).tolist(), strict=True))
    one, gate = torch.ones(()), _replacing_gate(is_master)
    for dim in dims(a.KEY).tolist():
        units.add(gate, {dim: 1.0}, TOPIC - CLOSED, -one, dim, GATE)
    values, keys = dims(a.SCENES).tolist(), dims(a.KEY_SCENES).tolist()
    for size, name in zip(SIZES, TOPICS, strict=False):
        for _ in range(size):
            _copy_key(units, topic[name], values.pop(0), keys.pop(0))
    for value, key in zip(dims(a.SYMBOL).tolist(), dims(a.KEY_SYMBOL).tolist(), strict=True):
        _copy_key(units, topic["symbol"], value, key)
    text = {a.TEXT: 1 / TEXT_SIZE}
    for name_dim, key in zip(dims(a.NAMED).tolist(), dims(a.KEY_NAMED).tolist(), strict=True):
        gate = {name_dim: 1.0, a.TEXT: -NAME_LEAST / TEXT_SIZE}
        units.add(gate, text, 1 / NAME_KEY, one, key, GATE)
    for relation, key in zip(RELATIONS, dims(a.KEY_RELATION).tolist(), strict=True):
        gate = {topic[relation]: 1.0, a.TEXT: -RELATION_LEAST / TEXT_SIZE}
        units.add(gate, text, 1 / RELATION_KEY, one, key, GATE)


def install_image_barrier(units: Units) -> None:
    """Mark the positions of images as questions, so no answer continues after them."""
    gate = {a.IN_QUESTION: 1.0, a.TEXT: -2.0}
    units.add(gate, {a.IN_QUESTION: 1.0}, 0.1, torch.tensor(20.0), a.IN_QUESTION, 20.0)


def _copy_key(units: Units, topic: int, value: int, key: int) -> None:
    units.add(_topic_gate(topic), {value: 1 / SEEN}, TOPIC - CLOSED, torch.tensor(KEY), key, GATE)


STEP = 0.1


def install_steps(units: Units) -> None:
    """Encode the numbers of a row as thermometers: cleaner than the vision output, and easy to
    add."""
    half, sharp = 0.04, 35.0
    text = {a.TEXT: 1 / TEXT_SIZE}
    step = torch.tensor(STEP)
    steps = iter(dims(a.STEPS).tolist())
    for number in (a.LEFT, a.RIGHT):
        values = dims(number).tolist()
        for least in range(1, len(values)):
            gate = {dim: 1.0 if i >= least else -1.0 for i, dim in enumerate(values)}
            units.add_step(gate, text, half, step, next(steps), sharp)
    units.add({a.TEXT: 2 * half / TEXT_SIZE}, text, 2 * half, step, a.UNIT, sharp)
