"""What a benchmark is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bottega.errors import BottegaError

OnBad = Callable[[BottegaError], None]


@dataclass(frozen=True)
class Source:
    """`spec` is KIND:PLACE, KIND:KNOBS or KIND:PLACE,KNOBS; a place is a folder or a Hugging Face
    id. What cannot be read goes to `on_bad`, or is raised if that is None."""

    spec: str
    seed: int
    on_bad: OnBad | None = None

    @property
    def kind(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def place(self) -> str:
        return self.spec.partition(":")[2]

    @property
    def knobs(self) -> str | None:
        return self.place if ":" in self.spec else None
