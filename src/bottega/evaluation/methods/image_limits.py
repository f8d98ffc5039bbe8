"""Checks of the number of images in a prompt, for models that take few."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bottega.errors import SettingError
from bottega.evaluation.benchmark import Benchmark
from bottega.evaluation.methods.specifications import METHODS
from bottega.types import Example

if TYPE_CHECKING:
    from bottega.generation.loaded import LoadedModel

HINT = "use passages without images, or a model that takes several images"


def images_per_prompt(names: Sequence[str], shots: Sequence[int], data: Benchmark) -> int:
    """Return the largest number of images in a prompt of these methods. A compressor reads passages
    one by one."""
    query, shown = most_images(data.items), _counts(data.knowledge)
    largest = 0
    for name in names:
        spec = METHODS[name]
        if not spec.uses_model:
            continue
        if spec.compresses:
            largest = max(largest, query, *shown[:1])
        elif spec.retrieval == "none":
            largest = max(largest, query)
        else:
            count = 1 if name == "candidates" else max(shots)
            several = shown if spec.retrieval == "everything" else shown[:count]
            largest = max(largest, query + sum(several))
    return largest


def check_prompt_images(count: int, model: LoadedModel, name: str) -> None:
    """Raise `SettingError` for more images in a prompt than the model takes."""
    if model.max_images is not None and count > model.max_images:
        raise SettingError(
            f"{name} reads at most {model.image_limit} per prompt, got up to {count}",
            hint=f"{HINT}; racc gives passages to the compressor one by one",
        )


def most_images(examples: Iterable[Example]) -> int:
    return max((len(one.query.images) for one in examples), default=0)


def _counts(examples: Iterable[Example]) -> list[int]:
    """Return the numbers of images, the largest first."""
    return sorted((len(one.query.images) for one in examples), reverse=True)
