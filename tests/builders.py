"""Small parts that many tests build with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PIL import Image as Pillow

from bottega.image import Image
from bottega.types import Candidate, Example, Query

QUESTION = "What is in the image above?"


def picture(shade: int, size: tuple[int, int] = (8, 8)) -> Image:
    """A plain image; different shades are different images."""
    return Image.from_pillow(Pillow.new("RGB", size, (shade % 256, shade // 256, 90)))


def example(label: str, shade: int, id: str | None = None) -> Example:
    return Example(Query(QUESTION, (picture(shade),)), label, id=id or f"{label}-{shade}")


def candidates(*labels: str) -> list[Candidate]:
    """Best first, with falling scores."""
    return [Candidate(example(label, i), 1.0 - i / 10) for i, label in enumerate(labels)]


class ListPool:
    """Examples in a list, as the random retrievers see a knowledge base."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self.examples = {str(e.id): e for e in examples}

    def ids(self) -> Sequence[str]:
        return list(self.examples)

    def ids_by_label(self) -> Mapping[str, Sequence[str]]:
        labels: dict[str, list[str]] = {}
        for id, e in self.examples.items():
            for label in (e.answer,) if e.labels is None else e.labels:
                labels.setdefault(label, []).append(id)
        return labels

    def get_many(self, ids: Sequence[str]) -> list[Example]:
        return [self.examples[id] for id in ids]
