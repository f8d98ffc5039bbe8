"""Controls: swapped images or questions, and label noise.

The swap controls retrieve as `visual-rag` and then replace the query's image or question by another
item's: accuracy drops by as much as the model uses it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from bottega._util.identity import image_hashes
from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark, is_passage
from bottega.evaluation.metrics.metric import labels_of
from bottega.protocols import Prompter, Recorder
from bottega.types import Example, Query

QueryIdentity = tuple[str, tuple[str, ...]]
Swap = Callable[[Query], Query]


def swapped_prompter(prompt: Prompter, swap: Swap) -> Prompter:
    """Return a prompter that swaps the query; retrieval, parsing and the gold answer keep the
    original."""
    return lambda query, demonstrations: prompt(swap(query), demonstrations)


def swapped_recorder(record: Recorder, swap: Swap) -> Recorder:
    """Return a recorder of the swapped query under the item's id."""
    return lambda trace: record(replace(trace, query=swap(trace.query)))


def swap_image(data: Benchmark, *, seed: int) -> Swap:
    """Return a function that replaces the images by those of a random other item."""
    others = _other_queries(
        data,
        lambda item: ":".join(image_hashes(item.query)),
        seed,
        "swap-image needs items with different images, got {} items with one image",
    )
    return lambda query: replace(query, images=others[_identity(query)].images)


def swap_question(data: Benchmark, *, seed: int) -> Swap:
    """Return a function that replaces the text by that of a random item with another question.

    The tag `topic` identifies the question; without it, the text.
    """
    others = _other_queries(
        data,
        lambda item: item.tags.get("topic", item.query.text),
        seed,
        "swap-question needs different questions, got {} items with one question",
    )
    return lambda query: replace(query, text=others[_identity(query)].text)


def _other_queries(
    data: Benchmark, kind: Callable[[Example], str], seed: int, problem: str
) -> Mapping[QueryIdentity, Query]:
    """Map each item's query to a query of another kind; kinds are equally likely."""
    kinds: defaultdict[str, list[Query]] = defaultdict(list)
    for item in data.items:
        kinds[kind(item)].append(item.query)
    if len(kinds) < 2:
        raise SettingError(
            problem.format(len(data.items)), hint="evaluate more items, or remove this control"
        )
    names, others = list(kinds), {}
    for item in data.items:
        rng = random.Random(f"{seed}:swap:{_identity(item.query)}")
        while (other := rng.choice(names)) == kind(item):
            pass
        others[_identity(item.query)] = rng.choice(kinds[other])
    return others


def _identity(query: Query) -> QueryIdentity:
    return query.text, image_hashes(query)


# Returns a copy of an example with a wrong answer; None if no answer would be wrong.
Corruption = Callable[[Example, random.Random], Example | None]


def corrupt(
    knowledge: Sequence[Example], share: float, corruption: Corruption, *, seed: int
) -> list[Example]:
    """Give `share` of all examples a wrong answer, or as many as can have one."""
    if not 0 <= share <= 1:
        raise SettingError(
            f"label noise must be between 0 and 1, got {share}", hint="change --label-noise"
        )
    if all(map(is_passage, knowledge)):
        raise SettingError(
            "label noise needs examples with answers, got passages only",
            hint="remove --label-noise",
        )
    rng = random.Random(f"{seed}:label noise")
    corrupted = [corruption(example, rng) for example in knowledge]
    possible = [index for index, example in enumerate(corrupted) if example is not None]
    if not possible:
        raise SettingError("no example can have a wrong answer", hint="remove --label-noise")
    chosen = set(rng.sample(possible, min(len(possible), round(share * len(knowledge)))))
    return [
        (index in chosen and other) or example
        for index, (example, other) in enumerate(zip(knowledge, corrupted, strict=True))
    ]


def label_confusion(knowledge: Sequence[Example]) -> Corruption:
    """Return a corruption that chooses a plausible wrong answer.

    It is another of the question's own choices; without choices, another label of the example's
    episode and topic. The rationale is removed, since it would reveal the right answer.
    """
    labels: defaultdict[tuple[str | None, ...], dict[str, None]] = defaultdict(dict)
    for example in knowledge:
        labels[_group(example)] |= dict.fromkeys(labels_of(example))

    def corruption(example: Example, rng: random.Random) -> Example | None:
        if len(labels_of(example)) != 1:
            raise SettingError(
                f"label noise needs one label for each example, got {len(labels_of(example))}",
                hint="remove --label-noise",
            )
        possible = example.query.choices or labels[_group(example)]
        others = [label for label in possible if (label,) != labels_of(example)]
        if not others:
            return None
        label = rng.choice(others)
        explicit = None if example.labels is None else (label,)
        return replace(example, answer=label, labels=explicit, rationale=None)

    return corruption


def _group(example: Example) -> tuple[str | None, ...]:
    return example.tags.get("episode"), example.tags.get("topic")
