"""A prompt as a model's template writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image as Pillow

from bottega.image import Image
from bottega.types import Prefix, Sampling


@dataclass(frozen=True)
class Rendered:
    """A prompt as the model's template writes it. `pictures` are its images decoded, by sha256,
    but for those that the model remembers."""

    text: str
    images: tuple[Image, ...]
    sampling: Sampling
    pictures: Mapping[str, Pillow.Image] = field(default_factory=dict)
    prefix: Prefix | None = None

    @property
    def behind(self) -> int:
        """How many tokens stand before it."""
        return self.prefix.length if self.prefix else 0

    @property
    def shown(self) -> tuple[str, ...]:
        return tuple(image.sha256 for image in self.images)

    @property
    def samples(self) -> int:
        """Greedy samples are all alike: one is drawn and copied."""
        return self.sampling.n if self.sampling.temperature > 0 else 1

    @property
    def shape(self) -> tuple[bool, int, int, int, int, int]:
        """Prompts with equal or near shapes fit in one batch with little padding. Only those that
        are equal in the first three may share one."""
        limit = self.sampling.max_tokens
        kind = bool(self.images), self.samples, self.behind
        return (*kind, limit, len(self.images), len(self.text))


def pictures_of(batch: Sequence[Rendered]) -> dict[str, Pillow.Image]:
    return {sha: picture for one in batch for sha, picture in one.pictures.items()}
