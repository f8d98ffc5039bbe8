"""Parsed benchmark specifications."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bottega.errors import OnError, SettingError
from bottega.naming import read_options

LOCATION = re.compile(r"(.*?)(?:,(\s*\w+\s*=.*))?", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """Benchmark specification: KIND:LOCATION, KIND:OPTIONS or KIND:LOCATION,OPTIONS.

    A location is a folder or a Hugging Face id. Unreadable rows go to `on_error`; if it is None
    they raise.
    """

    spec: str
    seed: int
    on_error: OnError | None = None

    @property
    def kind(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def location(self) -> str:
        return self.spec.partition(":")[2]

    @property
    def options(self) -> str | None:
        return self.location if ":" in self.spec else None


def read_location(
    source: Source, allowed: Mapping[str, Sequence[str]]
) -> tuple[str, dict[str, str]]:
    """Split a location from its options, as in `mmmu:DIR,split=validation`.

    `allowed` lists the values of each option, its default first; none for a free text, which is
    empty by default. Raises `SettingError`.
    """
    found = LOCATION.fullmatch(source.location)
    location, options = found.groups() if found else (source.location, None)
    chosen = {name: next(iter(values), "") for name, values in allowed.items()}
    for name, value in read_options(source.kind, options, chosen).items():
        if allowed[name] and value not in allowed[name]:
            raise SettingError(
                f"{name} is unknown, got {value!r}", hint=f"use {' or '.join(allowed[name])}"
            )
        chosen[name] = str(value)
    return location, chosen
