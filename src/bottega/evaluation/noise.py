"""Wrong answers in a knowledge base, on purpose: how much do they matter?"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from bottega.errors import SettingError
from bottega.evaluation.labels import is_passage, labels_of
from bottega.types import Example

# An example with a wrong answer; None where no answer would be wrong.
Wrong = Callable[[Example, random.Random], Example | None]


def corrupted(
    knowledge: Sequence[Example], share: float, wrong: Wrong, *, seed: int
) -> list[Example]:
    """`share` of all examples answered wrongly, or as many as can be."""
    if not 0 <= share <= 1:
        raise SettingError(f"label noise is {share}", hint="set it to a share between 0 and 1")
    if all(map(is_passage, knowledge)):
        raise SettingError(
            "the examples are passages to read: they have no answers that could be made wrong",
            hint="leave --label-noise out",
        )
    rng = random.Random(f"{seed}:label noise")
    falsified = [wrong(example, rng) for example in knowledge]
    possible = [place for place, example in enumerate(falsified) if example is not None]
    if not possible:
        raise SettingError("no example can be answered wrongly", hint="leave --label-noise out")
    chosen = set(rng.sample(possible, min(len(possible), round(share * len(knowledge)))))
    return [
        (place in chosen and other) or example
        for place, (example, other) in enumerate(zip(knowledge, falsified, strict=True))
    ]


def confused(knowledge: Sequence[Example]) -> Wrong:
    """Another of the question's own choices or, without any, another label of the example's episode
    and topic, so that a wrong answer is a likely one. No rationale: it would tell the right one."""
    known: defaultdict[tuple[str | None, ...], dict[str, None]] = defaultdict(dict)
    for example in knowledge:
        known[_place(example)] |= dict.fromkeys(labels_of(example))

    def wrong(example: Example, rng: random.Random) -> Example | None:
        if len(labels_of(example)) != 1:
            raise SettingError(
                "label noise needs examples with one label each", hint="leave --label-noise out"
            )
        possible = example.query.choices or known[_place(example)]
        others = [label for label in possible if (label,) != labels_of(example)]
        if not others:
            return None
        label = rng.choice(others)
        labels = None if example.labels is None else (label,)
        return replace(example, answer=label, labels=labels, rationale=None)

    return wrong


def _place(example: Example) -> tuple[str | None, ...]:
    return example.tags.get("episode"), example.tags.get("topic")
