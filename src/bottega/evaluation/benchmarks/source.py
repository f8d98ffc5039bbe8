"""Parsed benchmark specifications."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bottega.errors import OnError, SettingError

# Python refuses to parse thousands of digits; no option needs more than a billion.
MAX_DIGITS = 9
DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
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


def read_options(
    kind: str, options: str | None, defaults: Mapping[str, float | str]
) -> dict[str, float | str]:
    """Return the given options, each with its default's type. Raises `SettingError`."""
    listed = ", ".join(f"{name}={value}" for name, value in defaults.items())
    hint = f"options of {kind} and their defaults: {listed}"
    chosen: dict[str, float | str] = {}
    for part in [] if options is None else options.split(","):
        name, _, value = (text.strip() for text in part.partition("="))
        if not part.strip():
            raise SettingError(f"an option is empty in '{kind}:{options}'", hint=hint)
        if name in chosen:
            raise SettingError(f"{name} is set twice", hint=hint)
        if name not in defaults:
            raise SettingError(f"{kind} has no option {name!r}", hint=hint)
        if isinstance(defaults[name], str):
            chosen[name] = value
        elif value.isdigit() and len(value) > MAX_DIGITS:
            raise SettingError(
                f"{name} must have at most {MAX_DIGITS} digits, got {len(value)}", hint=hint
            )
        elif isinstance(defaults[name], float) and DECIMAL.fullmatch(value):
            chosen[name] = float(value)
        elif value.isascii() and value.isdigit():
            chosen[name] = int(value)
        else:
            raise SettingError(f"{name} must be a number, got {value!r}", hint=hint)
    return chosen


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
