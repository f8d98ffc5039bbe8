"""What a benchmark is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bottega.errors import OnError, SettingError


@dataclass(frozen=True)
class Source:
    """`spec` is KIND:PLACE, KIND:KNOBS or KIND:PLACE,KNOBS; a place is a folder or a Hugging Face
    id. What cannot be read goes to `on_error`, or is raised if that is None."""

    spec: str
    seed: int
    on_error: OnError | None = None

    @property
    def kind(self) -> str:
        return self.spec.partition(":")[0]

    @property
    def place(self) -> str:
        return self.spec.partition(":")[2]

    @property
    def knobs(self) -> str | None:
        return self.place if ":" in self.spec else None


# No knob means anything beyond a billion, and Python refuses to read thousands of digits.
MOST_DIGITS = 9
PLACE = re.compile(r"(.*?)(?:,(\s*\w+\s*=.*))?", re.DOTALL)


def read_options(
    kind: str, knobs: str | None, defaults: Mapping[str, int | str]
) -> dict[str, int | str]:
    """Those that are named in `knobs`, each of its default's type. None: no colon, so no knobs.
    Raises `SettingError`."""
    listed = ", ".join(f"{name}={value}" for name, value in defaults.items())
    hint = f"the knobs of {kind} and what they are without you: {listed}"
    chosen: dict[str, int | str] = {}
    for part in [] if knobs is None else knobs.split(","):
        name, _, value = (text.strip() for text in part.partition("="))
        if not part.strip():
            raise SettingError(f"a knob is missing in '{kind}:{knobs}'", hint=hint)
        if name in chosen:
            raise SettingError(f"{name} is given twice", hint=hint)
        if name not in defaults:
            raise SettingError(f"{kind} has no knob {name!r}", hint=hint)
        if isinstance(defaults[name], str):
            chosen[name] = value
        elif value.isdigit() and len(value) > MOST_DIGITS:
            raise SettingError(f"{name} has {len(value)} digits", hint=hint)
        elif value.isascii() and value.isdigit():
            chosen[name] = int(value)
        else:
            raise SettingError(f"{name} is {value!r}, not a number", hint=hint)
    return chosen


def read_location(
    source: Source, allowed: Mapping[str, Sequence[str]]
) -> tuple[str, dict[str, str]]:
    """A place and the knobs behind it, as in `mmmu:DIR,asked=validation`. `allowed` are the values
    that each knob may have; without you it has the first. Raises `SettingError`."""
    found = PLACE.fullmatch(source.place)
    place, knobs = found.groups() if found else (source.place, None)
    chosen = {name: values[0] for name, values in allowed.items()}
    for name, value in read_options(source.kind, knobs, chosen).items():
        if value not in allowed[name]:
            raise SettingError(
                f"{name} is {value!r}", hint=f"{name} may be {' or '.join(allowed[name])}"
            )
        chosen[name] = str(value)
    return place, chosen
